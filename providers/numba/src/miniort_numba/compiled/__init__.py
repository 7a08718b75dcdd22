"""Functions that Numba compiles, by family. They take contiguous float32 arrays and know nothing of nodes or graphs."""
