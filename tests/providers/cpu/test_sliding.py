"""Windows along one axis are reduced alike whether each tap runs over all windows or all elements run as one row."""

from __future__ import annotations

import numpy as np
import pytest

from miniort_cpu.sliding import SlidingAxis


@pytest.mark.parametrize(
    ("axis", "flat"),
    [
        (SlidingAxis(size=9, inner=1, kernel=3, stride=1, dilation=1, begin=1, count=9), True),
        (SlidingAxis(size=9, inner=4, kernel=3, stride=2, dilation=1, begin=1, count=5), True),
        (SlidingAxis(size=11, inner=2, kernel=4, stride=3, dilation=2, begin=2, count=3), True),
        (SlidingAxis(size=9, inner=2, kernel=2, stride=1, dilation=3, begin=0, count=6), True),
        (SlidingAxis(size=5, inner=1, kernel=5, stride=1, dilation=1, begin=2, count=5), False),  # most windows see padding
        (SlidingAxis(size=9, inner=600, kernel=3, stride=2, dilation=1, begin=1, count=5), False),  # long runs
        (SlidingAxis(size=3, inner=2, kernel=2, stride=1, dilation=4, begin=4, count=7), False),  # some see nothing at all
    ],
)
def test_windows_along_one_axis(axis: SlidingAxis, flat: bool) -> None:
    assert axis.runs_flat == flat
    x = np.random.default_rng(0).standard_normal((3, axis.size, axis.inner)).astype(np.float32)
    out, space = np.empty((3, axis.count, axis.inner), np.float32), np.empty(x.size, np.float32)
    axis.reduce(np.maximum, -np.inf, x, out, space)
    for window in range(axis.count):
        places = [window * axis.stride + offset for offset in axis.offsets]
        seen = [x[:, place] for place in places if 0 <= place < axis.size]
        np.testing.assert_array_equal(out[:, window], np.max(seen, axis=0) if seen else np.full_like(out[:, window], -np.inf))
