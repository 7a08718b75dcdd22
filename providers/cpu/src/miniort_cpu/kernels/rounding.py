"""Round; Floor and Ceil are with the arithmetic."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable
from miniort_cpu.ufuncs import unary

kernels = KernelTable("cpu")

kernels.register("Round", versions=(11, None))(unary(np.rint))
