"""Integer arithmetic where ONNX's (C's) isn't NumPy's (Python's)."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.types import Array, DType


def is_integer(dtype: DType) -> bool:
    """Whether a type is one of NumPy's integers (int4 and its like, which no arithmetic op takes, are none of these)."""
    return dtype.kind in "iu"


def truncated_quotient(a: Array, b: Array, out: Any) -> Array:
    """`a` / b rounded toward zero, written into `out`, which is neither of them: what a lacks of its remainder divides evenly.

    a, b: integers of one type, any shapes that broadcast. `out=...` asks for a new array.
    """
    rest = np.fmod(a, b, out=out)
    np.subtract(a, rest, out=rest)
    return np.floor_divide(rest, b, out=rest)  # type: ignore[no-any-return]
