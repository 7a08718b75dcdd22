"""Logic on booleans, with NumPy's broadcasting (opset 7 and later)."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable
from miniort_cpu.ufuncs import binary, unary

kernels = KernelTable("cpu")

kernels.register("And", versions=(7, None))(binary(np.logical_and))
kernels.register("Or", versions=(7, None))(binary(np.logical_or))
kernels.register("Xor", versions=(7, None))(binary(np.logical_xor))
kernels.register("Not", versions=(1, None))(unary(np.logical_not))
