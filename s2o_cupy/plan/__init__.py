"""From a problem to what will be launched, without an array, a GPU or CuPy."""
