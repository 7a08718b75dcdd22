"""NumPy kernels for miniort: the provider `cpu`, which every other provider is compared with."""
