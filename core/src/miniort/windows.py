"""Windows that slide over spatial axes, of convolutions and of pools: how many there are, and what is padded for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from miniort.kernels import NodeView


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
