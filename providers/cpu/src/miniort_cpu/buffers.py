"""Where results are written: large ones into the provider's pool, small ones wherever NumPy likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from miniort.types import Array, DType

Allocate: TypeAlias = Callable[[Sequence[int], DType], Array]
"""`Provider.allocate`: (shape, dtype) -> a new C-contiguous array with undefined contents."""


def copied(allocate: Allocate, x: Array) -> Array:
    """A C-contiguous copy of x."""
    out = allocate(x.shape, x.dtype)
    np.copyto(out, x)
    return out
