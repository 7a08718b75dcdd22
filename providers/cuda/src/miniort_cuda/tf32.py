"""TF32: products of float32 matrices whose factors are rounded to 10 bits behind the point, on tensor cores."""

from __future__ import annotations

from typing import Any

import numpy as np


class TF32Products:
    """Allows CuPy TF32 for float32 while it's entered; afterwards CuPy goes by its own variable `CUPY_TF32` again.

    It's a setting of the process. Where runs overlap, a run that didn't ask for it may have it, and the first one that ends takes it back.
    """

    def __init__(self, xp: Any) -> None:
        self._linalg = xp._core._routines_linalg

    def __enter__(self) -> None:
        self._linalg.set_compute_type(np.float32, self._linalg.COMPUTE_TYPE_TF32)

    def __exit__(self, *_: object) -> None:
        self._linalg.set_compute_type(np.float32, self._linalg.COMPUTE_TYPE_TBD)
