"""Stream capture for the test double of CuPy: launches are noted down with the buffers they touch, and done when the graph is launched.

As CUDA does: while a stream is captured nothing is computed, so what a launch gives holds nothing yet; a replay reads what the buffers
hold by then, and the host's numbers as they were. As CuPy 14 does: uploads, downloads and everything that calls cuBLAS raise while the
current stream is captured. It's stricter in three ways: memory of the common pool mustn't be taken during a capture, no kernel may be
compiled then, and a graph that is launched must find alive all memory that it touches: each array that was made before, and the pool of
those that were made during it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


class Capture:
    """The launches of one capture, in order."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], Any]] = []
        self.touched: list[tuple[str, weakref.ref[Any]]] = []
        self._own: weakref.WeakSet[Any] = weakref.WeakSet()  # memory that was taken during the capture

    def took(self, memory: Any, pool: Any) -> None:
        """Memory was taken from a pool: the graph needs the pool, which keeps others from it, and not the memory itself."""
        self._own.add(memory)
        self.touched.append(("the pool of a recorded run", weakref.ref(pool)))

    def note(self, launch: Callable[[], Any], memories: Iterable[Any]) -> None:
        """A launch, with the memory that it touches."""
        self.launches.append(launch)
        self.touched += [("memory that a recorded run reads", weakref.ref(each)) for each in memories if each not in self._own]


class Graph:
    """What a capture gives: it can be launched as often as one likes."""

    def __init__(self, cupy: Any, capture: Capture) -> None:
        self._cupy, self._capture = cupy, capture

    def launch(self) -> None:
        """Do all launches, with what their buffers hold now."""
        self._cupy.refuse_while_capturing("a graph was launched")
        for what, reference in self._capture.touched:
            if reference() is None:
                raise RuntimeError(f"{what} was given back")
        self._cupy.counts["graph launch"] += 1
        for launch in self._capture.launches:
            with np.errstate(all="ignore"):
                launch()


class Stream:
    """A stream; `with` makes it the thread's current one."""

    def __init__(self, cupy: Any, non_blocking: bool) -> None:
        self._cupy, self._non_blocking = cupy, non_blocking
        self.capture: Capture | None = None
        self._before: list[Any] = []

    def __enter__(self) -> Stream:
        self._before.append(self._cupy.stream)
        self._cupy.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        self._cupy.stream = self._before.pop()

    def synchronize(self) -> None:
        self._cupy.refuse_while_capturing("a stream was waited for")

    def begin_capture(self) -> None:
        if not self._non_blocking:
            raise RuntimeError("operation would make the legacy stream depend on a capturing blocking stream")
        self.capture = Capture()

    def end_capture(self) -> Graph:
        assert self.capture is not None, "no capture was begun"
        graph, self.capture = Graph(self._cupy, self.capture), None
        return graph


def undefined(array: np.ndarray) -> np.ndarray:
    """An array of the same form that holds what a launch has not computed yet: NaN, or zeros, which are an index at least."""
    return np.full(array.shape, np.nan if array.dtype.kind == "f" else 0, array.dtype)
