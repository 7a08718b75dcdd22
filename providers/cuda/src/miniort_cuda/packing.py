"""Host arrays as one block of bytes, so that one transfer brings them all to the device; there they're parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miniort.types import Array
from miniort_cuda.bfloat16 import BFloat16Array
from miniort_cuda.element_types import BFLOAT16

ALIGNMENT = 256
"""Bytes at whose multiples packed arrays begin: what CUDA's own allocations are aligned to."""


def pack(arrays: Sequence[Array]) -> Array:
    """The arrays' bytes behind each other, each from a multiple of `ALIGNMENT` on: uint8."""
    starts = _starts(arrays)
    block = np.zeros(starts[-1], np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        block[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return block


def unpack(block: Any, arrays: Sequence[Array]) -> list[Any]:
    """The parts of a packed block on the device, of the types and shapes of the host's arrays."""
    return [_part(block[start : start + array.nbytes], array) for start, array in zip(_starts(arrays), arrays, strict=False)]


def _starts(arrays: Sequence[Array]) -> list[int]:
    """Where each array begins in the block, and where the last one ends."""
    starts: list[int] = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
    return starts


def _part(raw: Any, array: Array) -> Any:
    """Bytes on the device as an array like a host array."""
    if array.dtype == BFLOAT16:
        return BFloat16Array(raw.view(np.uint16).reshape(array.shape))
    return raw.view(array.dtype).reshape(array.shape)
