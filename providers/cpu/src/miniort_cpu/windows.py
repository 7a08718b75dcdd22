"""Windows that slide over spatial axes, of convolutions and of pools: where they lie, and which elements they see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, TypeAlias

from miniort.kernels import NodeView
from miniort.types import Array

Index: TypeAlias = tuple[Any, ...]
"""An index of NumPy that begins with an ellipsis, so that it's good for any number of axes before the spatial ones."""


@dataclass(frozen=True)
class Placement:
    """Where windows lie on one input: how many along each axis, and the elements of padding before the first axis' elements."""

    counts: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class SlidingWindow:
    """A window's shape and steps per spatial axis: a node's `kernel_shape`, `strides`, `dilations`, `pads`, `auto_pad` and `ceil_mode`."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    auto_pad: str = "NOTSET"
    ceil: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        """Elements from a window's first to its last, both counted."""
        return tuple((size - 1) * dilation + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True))

    @lru_cache(maxsize=1024)  # noqa: B019  # a window is a small value, made when a session is built
    def place(self, sizes: tuple[int, ...]) -> Placement:
        """Where the windows lie on axes of these sizes. ValueError where a window is larger than an axis with its padding."""
        counts, begins, ends = [], [], []
        for axis, size in enumerate(sizes):
            extent, stride = self.extents[axis], self.strides[axis]
            begin, end = self.begins[axis], self.ends[axis]
            if self.auto_pad == "VALID":
                begin = end = 0
            elif self.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
                padding = max((-(-size // stride) - 1) * stride + extent - size, 0)
                begin = padding // 2 if self.auto_pad == "SAME_UPPER" else padding - padding // 2
                end = padding - begin
            rest = size + begin + end - extent
            count = (-(-rest // stride) if self.ceil else rest // stride) + 1
            if self.ceil and count > 0 and (count - 1) * stride >= size + begin:
                count -= 1  # it would start in the padding after the last element
            if count < 0:
                raise ValueError(f"a window of {extent} elements doesn't fit on axis {axis} of {size} elements with padding {begin}, {end}")
            counts.append(count)
            begins.append(begin)
            ends.append(end)
        return Placement(tuple(counts), tuple(begins), tuple(ends))


def sliding_window(node: NodeView, kernel: Sequence[int]) -> SlidingWindow:
    """The window that a node's attributes describe; its kernel's shape may come from its weights."""
    rank = len(kernel)
    pads = node.attribute("pads", None) or (0,) * (2 * rank)
    return SlidingWindow(
        tuple(kernel),
        tuple(node.attribute("strides", None) or (1,) * rank),
        tuple(node.attribute("dilations", None) or (1,) * rank),
        tuple(pads[:rank]),
        tuple(pads[rank:]),
        node.attribute("auto_pad", "NOTSET"),
        bool(node.attribute("ceil_mode", 0)),
    )


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
