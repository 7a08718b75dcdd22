"""Windows that slide over spatial axes, of convolutions and of pools, as one view of a padded array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miniort.errors import InputError
from miniort.kernels import NodeView


@dataclass(frozen=True)
class Placement:
    """Along each spatial axis: how many windows there are, and the padding before and after the elements."""

    counts: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """A window's shape and steps for each spatial axis: `kernel_shape`, `strides`, `dilations`, `pads`, `auto_pad`, `ceil_mode`."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    auto_pad: str
    ceil: bool

    def place(self, sizes: Sequence[int]) -> Placement:
        """Where the windows lie on axes of these sizes. InputError where one is larger than its padded axis."""
        counts, begins, ends = [], [], []
        for axis, size in enumerate(sizes):
            extent = (self.kernel[axis] - 1) * self.dilations[axis] + 1
            stride, begin, end = self.strides[axis], self.begins[axis], self.ends[axis]
            if self.auto_pad == "VALID":
                begin = end = 0
            elif self.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
                total = max((-(-size // stride) - 1) * stride + extent - size, 0)
                begin = total // 2 if self.auto_pad == "SAME_UPPER" else total - total // 2
                end = total - begin
            free = size + begin + end - extent
            if free < 0:
                raise InputError(f"a window of {extent} elements doesn't fit on an axis of {size} elements with {begin} + {end} of padding")
            count = (-(-free // stride) if self.ceil else free // stride) + 1
            if self.ceil and (count - 1) * stride >= size + begin:
                count -= 1  # it would lie in the padding behind the elements alone
            counts.append(count)
            begins.append(begin)
            ends.append(end)
        return Placement(tuple(counts), tuple(begins), tuple(ends))

    def reach(self, sizes: Sequence[int], placed: Placement) -> tuple[int, ...]:
        """The size of each axis, padding before it included, up to the end of the last window."""
        return tuple(
            max((count - 1) * stride + (kernel - 1) * dilation + 1, size + begin)
            for count, stride, kernel, dilation, size, begin in zip(
                placed.counts, self.strides, self.kernel, self.dilations, sizes, placed.begins, strict=True
            )
        )


def window_of(node: NodeView, kernel: Sequence[int]) -> Window:
    """The window that a node's attributes describe."""
    rank = len(kernel)
    pads = node.attribute("pads", None) or (0,) * (2 * rank)
    return Window(
        tuple(kernel),
        tuple(node.attribute("strides", None) or (1,) * rank),
        tuple(node.attribute("dilations", None) or (1,) * rank),
        tuple(pads[:rank]),
        tuple(pads[rank:]),
        node.attribute("auto_pad", "NOTSET"),
        bool(node.attribute("ceil_mode", 0)),
    )


def padded(xp: Any, x: Any, begins: Sequence[int], totals: Sequence[int], value: float) -> Any:
    """`x` in a larger array of `value`. x: [N, C, *sizes] -> [N, C, *totals]; itself where nothing is added."""
    if tuple(totals) == x.shape[2:]:
        return x
    out = xp.full((*x.shape[:2], *totals), value, x.dtype)
    out[(slice(None), slice(None), *(slice(begin, begin + size) for begin, size in zip(begins, x.shape[2:], strict=True)))] = x
    return out


def windows(xp: Any, x: Any, window: Window, counts: Sequence[int]) -> Any:
    """What each window sees, a view. x: [N, C, *padded sizes] -> [N, C, *counts, *kernel]."""
    steps = x.strides[2:]
    return xp.lib.stride_tricks.as_strided(
        x,
        (*x.shape[:2], *counts, *window.kernel),
        (
            *x.strides[:2],
            *(step * stride for step, stride in zip(steps, window.strides, strict=True)),
            *(step * dilation for step, dilation in zip(steps, window.dilations, strict=True)),
        ),
    )
