"""The provider `numba`: kernels in Python, compiled for the processor at hand."""
