"""Modules of the emulated GPU are not tests, and loading its plugin puts it in CuPy's place."""

collect_ignore_glob = ["*.py"]
