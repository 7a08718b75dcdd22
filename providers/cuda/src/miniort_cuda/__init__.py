"""CUDA kernels for miniort, through CuPy. Importing this package imports neither CuPy nor a driver."""
