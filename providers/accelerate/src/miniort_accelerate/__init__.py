"""Apple Accelerate kernels for miniort, through ctypes. Importing this package loads no library; off macOS it does nothing."""
