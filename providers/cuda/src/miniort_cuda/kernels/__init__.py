"""All kernels of the provider, by families of ops. Each is written with the functions that its node's provider names."""

from __future__ import annotations

from miniort.kernels import KernelTable, merge_tables
from miniort_cuda.kernels import activation, elementwise, matrix, normalization, shape

KERNELS: KernelTable = merge_tables("cuda", elementwise.kernels, matrix.kernels, shape.kernels, normalization.kernels, activation.kernels)
