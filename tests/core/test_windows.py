"""Where windows lie on an axis: every padding, strides and gaps, windows that are too large."""

from __future__ import annotations

import pytest

from miniort.kernels import NodeView
from miniort.windows import Placement, SlidingWindow, sliding_window


def window(
    kernel: int, stride: int = 1, dilation: int = 1, pads: tuple[int, int] = (0, 0), auto_pad: str = "NOTSET", ceil: bool = False
) -> SlidingWindow:
    return SlidingWindow((kernel,), (stride,), (dilation,), (pads[0],), (pads[1],), auto_pad, ceil)


@pytest.mark.parametrize(
    ("given", "size", "placed"),
    [
        (window(3), 7, ((5,), (0,), (0,))),
        (window(3, pads=(1, 2)), 7, ((8,), (1,), (2,))),
        (window(3, stride=2, auto_pad="SAME_UPPER"), 6, ((3,), (0,), (1,))),
        (window(3, stride=2, auto_pad="SAME_LOWER"), 6, ((3,), (1,), (0,))),
        (window(3, pads=(5, 5), auto_pad="VALID"), 7, ((5,), (0,), (0,))),
        (window(2, stride=2, ceil=True), 5, ((3,), (0,), (0,))),
        (window(1, stride=3, pads=(0, 1), ceil=True), 3, ((1,), (0,), (1,))),  # the second would lie in the padding alone
        (window(3, dilation=3), 7, ((1,), (0,), (0,))),
        (window(4), 3, ((0,), (0,), (0,))),
    ],
)
def test_placement(given: SlidingWindow, size: int, placed: tuple[tuple[int, ...], ...]) -> None:
    assert given.place((size,)) == Placement(*placed)


def test_a_window_that_is_too_large() -> None:
    assert window(3, dilation=3).extents == (7,)
    with pytest.raises(ValueError, match="a window of 7 elements doesn't fit on axis 0 of 5 elements with padding 0, 0"):
        window(3, dilation=3).place((5,))


def test_it_is_read_from_a_node() -> None:
    node = NodeView("AveragePool", "", 22, "pool", (), (), {"strides": (2, 1), "pads": (0, 1, 2, 3), "ceil_mode": 1})
    assert sliding_window(node, (3, 4)) == SlidingWindow((3, 4), (2, 1), (1, 1), (0, 1), (2, 3), "NOTSET", True)
