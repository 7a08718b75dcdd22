"""All kernels of the provider, by families of ops."""

from __future__ import annotations

from miniort.kernels import KernelTable, merge_tables
from miniort_accelerate.kernels import activation, attention, convolution, elementwise, matrix, movement, normalization

KERNELS: KernelTable = merge_tables(
    "accelerate",
    matrix.kernels,
    elementwise.kernels,
    activation.kernels,
    normalization.kernels,
    attention.kernels,
    convolution.kernels,
    movement.kernels,
)
