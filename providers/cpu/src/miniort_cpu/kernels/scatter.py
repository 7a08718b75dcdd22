"""Scatter, the op that opset 11 renamed to ScatterElements."""

from __future__ import annotations

from miniort.kernels import KernelTable
from miniort_cpu.kernels.indexing import scatter_elements

kernels = KernelTable("cpu")

kernels.register("Scatter", versions=(9, 11))(scatter_elements)
