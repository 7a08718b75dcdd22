"""Windows that slide along one axis and are reduced by a ufunc, as pools need it.

NumPy takes some 10 ns for each run of neighbouring elements that it is given, as long as for 100 elements of it. Image rows are often
shorter. So where that's faster, the ufunc runs over all elements as if they were one row: element p is combined with the elements
p + inner, p + 2 · inner, … of a kernel's taps. That is wrong only where a window leaves its axis, and these few windows are done again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from miniort.types import Array
from miniort_cpu.windows import overlap

SHORT_RUN = 256
"""Elements that are combined in vain sooner than NumPy begins another run of them, which it does for each of a window's taps."""


@dataclass(frozen=True)
class SlidingAxis:
    """Windows along the middle axis of [outer, size, inner]: window i sees its elements -begin + i · stride + k · dilation, k < kernel."""

    size: int
    inner: int
    kernel: int
    stride: int
    dilation: int
    begin: int
    count: int

    @property
    def is_plain(self) -> bool:
        """Whether each window sees the element of its own index, and nothing else."""
        return self.kernel == 1 and self.stride == 1 and self.count == self.size and not self.begin

    @property
    def offsets(self) -> list[int]:
        """Where window 0 sees elements."""
        return [tap * self.dilation - self.begin for tap in range(self.kernel)]

    @property
    def edges(self) -> list[int]:
        """The windows that see padding."""
        first, last = self.offsets[0], self.offsets[-1]
        return [i for i in range(self.count) if i * self.stride + first < 0 or i * self.stride + last >= self.size]

    @property
    def runs_flat(self) -> bool:
        """Whether it's faster to combine all elements as one row, at each of them, also where no window starts."""
        if self.kernel == 1 or (self.count - 1) * self.stride >= self.size or 2 * len(self.edges) > self.count:
            return False
        return self.stride == 1 or self.inner * (self.stride - 1) < SHORT_RUN

    def reduce(self, ufunc: np.ufunc, empty: Any, x: Array, out: Array, space: Array) -> None:
        """out: `ufunc` of all elements that each window sees, `empty` where it sees none, which is what changes no result of it.

        x: [outer, size, inner]; out: [outer, count, inner]; space: x.size elements; all C-contiguous, none overlaps another
        """
        plan = _plan(self)
        if not plan.flat:
            plan.by_tap(ufunc, empty, x, out)
            return
        is_dense = self.stride == 1 and self.count == self.size
        full = out if is_dense else space[: x.size].reshape(x.shape)
        _combine_flat(ufunc, x.reshape(-1), full.reshape(-1), [offset * self.inner for offset in self.offsets])
        if not is_dense:
            np.copyto(out, full[:, : (self.count - 1) * self.stride + 1 : self.stride])
        for window, seen in plan.edges:
            target = out[:, window]
            if not seen:
                target[...] = empty
                continue
            first, *others = seen
            if others:
                ufunc(x[:, first], x[:, others[0]], out=target)
            else:
                target[...] = x[:, first]
            for each in others[1:]:
                ufunc(target, x[:, each], out=target)


def _combine_flat(ufunc: np.ufunc, x: Array, out: Array, offsets: list[int]) -> None:
    """out[p] = ufunc of x[p + offset] for each offset, wherever all of them exist. x, out: [n]; offsets ascend, at least two."""
    start, end = max(-offsets[0], 0), len(x) - max(offsets[-1], 0)
    if end <= start:
        return
    first, second, *others = [x[start + offset : end + offset] for offset in offsets]
    target = out[start:end]
    ufunc(first, second, out=target)
    for each in others:
        ufunc(target, each, out=target)


@dataclass(frozen=True)
class _Plan:
    """What follows from a `SlidingAxis`: how it's done; what each window at an edge sees; the windows and elements of each tap."""

    flat: bool
    edges: tuple[tuple[int, tuple[int, ...]], ...]
    spans: tuple[tuple[int, int, slice], ...]

    def by_tap(self, ufunc: np.ufunc, empty: Any, x: Array, out: Array) -> None:
        """A tap of the kernel at a time, for all windows that see something there."""
        (first, last, seen), *others = self.spans
        out[:, :first] = empty
        out[:, last:] = empty
        start = 0
        if others and others[0][:2] == (first, last):
            ufunc(x[:, seen], x[:, others[0][2]], out=out[:, first:last])
            start = 1
        else:
            out[:, first:last] = x[:, seen]
        for first, last, seen in others[start:]:
            if last > first:
                target = out[:, first:last]
                ufunc(target, x[:, seen], out=target)


@lru_cache(maxsize=1024)
def _plan(axis: SlidingAxis) -> _Plan:
    edges = tuple(
        (window, tuple(at for offset in axis.offsets if 0 <= (at := window * axis.stride + offset) < axis.size)) for window in axis.edges
    )
    spans = [overlap(offset, axis.stride, axis.size, axis.count) for offset in axis.offsets]
    spans.sort(key=lambda span: span[0] - span[1])  # the one that most windows see something of first: it needs no `out` to start from
    return _Plan(axis.runs_flat, edges, tuple(spans))
