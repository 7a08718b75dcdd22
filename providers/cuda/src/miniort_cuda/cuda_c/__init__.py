"""CUDA C sources: the few kernels where one pass over memory pays. They're compiled by NVRTC when they're first used."""
