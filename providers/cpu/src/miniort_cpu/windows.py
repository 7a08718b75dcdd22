"""Windows that slide over spatial axes, of convolutions and of pools: where they lie, and which elements they see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, TypeAlias

from miniort.types import Array

Index: TypeAlias = tuple[Any, ...]
"""An index of NumPy that begins with an ellipsis, so that it's good for any number of axes before the spatial ones."""


def overlap(offset: int, stride: int, size: int, count: int) -> tuple[int, int, slice]:
    """Which of the elements offset + i · stride, i in [0, count), are in [0, size): first i, last i + 1, and their slice."""
    first = min(max(-(offset // stride), 0), count)
    last = max(min((size - 1 - offset) // stride + 1, count), first)
    start = offset + first * stride
    return first, last, slice(start, start + (last - first - 1) * stride + 1, stride) if last > first else slice(0, 0)


@dataclass(frozen=True)
class Position:
    """What all windows see at one position of the kernel.

    tap: of an array [..., *kernel, *counts], the part [..., *counts] for this position.
    windows: of that part, the windows that see an element there; elements: which of the input, in the same order.
    outside: the slabs of windows that see padding. A window may lie in several of them.
    """

    tap: Index
    windows: Index
    elements: Index
    outside: tuple[Index, ...]


@lru_cache(maxsize=1024)
def positions(
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    begins: tuple[int, ...],
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
) -> tuple[Position, ...]:
    """What windows at -begins + i · strides, i in [0, counts), see of an input of these sizes: a Position per element of the kernel."""
    return tuple(_each_position(kernel, strides, dilations, begins, sizes, counts))


def _each_position(
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    begins: Sequence[int],
    sizes: Sequence[int],
    counts: Sequence[int],
) -> Iterator[Position]:
    rank = len(kernel)
    axes = [
        [overlap(k * dilations[axis] - begins[axis], strides[axis], sizes[axis], counts[axis]) for k in range(kernel[axis])]
        for axis in range(rank)
    ]
    for index in product(*(range(size) for size in kernel)):
        seen = [axes[axis][k] for axis, k in enumerate(index)]
        outside: list[Index] = []
        for axis, (first, last, _) in enumerate(seen):
            after = (slice(None),) * (rank - 1 - axis)
            if first > 0:
                outside.append((..., slice(0, first), *after))
            if last < counts[axis]:
                outside.append((..., slice(last, None), *after))
        yield Position(
            (..., *index, *(slice(None),) * rank),
            (..., *(slice(first, last) for first, last, _ in seen)),
            (..., *(each for _, _, each in seen)),
            tuple(outside),
        )


def gather_windows(x: Array, out: Array, seen: Sequence[Position]) -> Array:
    """Copy what windows see of x: one row of elements per position of the kernel, zeros for padding.

    x: [..., *sizes]; out: [..., *kernel, *counts] -> out
    """
    for each in seen:
        row = out[each.tap]
        for slab in each.outside:
            row[slab] = 0
        row[each.windows] = x[each.elements]
    return out


def scatter_windows(columns: Array, out: Array, seen: Sequence[Position]) -> Array:
    """Add what windows hold to the elements that they lie on; what lies on padding is dropped.

    columns: [..., *kernel, *counts]; out: [..., *sizes] -> out
    """
    for each in seen:
        out[each.elements] += columns[each.tap][each.windows]
    return out
