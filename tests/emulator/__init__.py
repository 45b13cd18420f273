"""The kernels on a processor: their PTX is interpreted, and what stands for CuPy has its arrays in host memory."""
