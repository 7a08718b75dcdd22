"""bfloat16 on a device whose arrays have no such type: the upper halves of float32 numbers, kept as 16-bit integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort_cuda.element_types import BFLOAT16

HIGH_HALF = 16
QUIET_NAN = 0x7FC0


class BFloat16Array:
    """An array of bfloat16 on the device: `bits` holds it, uint16 of the same shape."""

    __slots__ = ("bits",)

    dtype = BFLOAT16

    def __init__(self, bits: Any) -> None:
        self.bits = bits

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        shape: tuple[int, ...] = self.bits.shape
        return shape

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        nbytes: int = self.bits.nbytes
        return nbytes


def widened(x: BFloat16Array) -> Any:
    """The same numbers as float32, which has all of them."""
    return (x.bits.astype(np.uint32) << HIGH_HALF).view(np.float32)


def rounded(xp: Any, x: Any) -> BFloat16Array:
    """The nearest bfloat16 numbers, ties to the even one; NaN stays NaN. x: float32, any shape."""
    bits = xp.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    nearest = (bits + (((bits >> HIGH_HALF) & 1) + 0x7FFF)) >> HIGH_HALF
    return BFloat16Array(xp.where(xp.isnan(x), QUIET_NAN, nearest).astype(np.uint16))
