"""CUDA C++ sources of the kernels; read with importlib.resources, compiled by s2o_cupy.kernels."""
