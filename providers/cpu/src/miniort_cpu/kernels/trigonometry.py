"""Trigonometric and hyperbolic functions and their inverses; Sin, Cos and Tanh are with the arithmetic and the activations."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable
from miniort_cpu.ufuncs import Ufunc, unary

kernels = KernelTable("cpu")

FUNCTIONS: dict[str, tuple[int, Ufunc]] = {
    "Tan": (7, np.tan),
    "Asin": (7, np.arcsin),
    "Acos": (7, np.arccos),
    "Atan": (7, np.arctan),
    "Sinh": (9, np.sinh),
    "Cosh": (9, np.cosh),
    "Asinh": (9, np.arcsinh),
    "Acosh": (9, np.arccosh),
    "Atanh": (9, np.arctanh),
}
"""Op -> its first version, and the ufunc that is the op. Narrow floats are computed in float32 and rounded once by the ufunc itself."""

for op, (since, ufunc) in FUNCTIONS.items():
    kernels.register(op, versions=(since, None))(unary(ufunc))
