"""A value is dropped after its last use; what is an output, an input or a weight stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miniort import InferenceSession
from miniort.kernels import Kernel, NodeContext, Run
from miniort.runtime.observers import BaseObserver

Build = Callable[..., InferenceSession]


class Tracked(np.ndarray[Any, Any]):
    """An array that a weak reference can watch."""


class Watch:
    """Kernels that note, before they compute, which of all the values made so far are alive."""

    def __init__(self) -> None:
        self.made: dict[str, weakref.ref[Any]] = {}
        self.alive: dict[str, list[str]] = {}

    def kernels(self) -> list[Kernel]:
        return [Kernel("cpu", op, "test", 1, None, self.compile) for op in ("One", "Two")]

    def compile(self, node: NodeContext) -> Run:
        names = [output.name if output is not None else "unnamed" for output in node.outputs]

        def run(*inputs: Any) -> Any:
            self.alive[node.name] = sorted(name for name, ref in self.made.items() if ref() is not None)
            outputs = [np.ones(4, np.float32).view(Tracked) for _ in names]
            self.made.update({name: weakref.ref(output) for name, output in zip(names, outputs, strict=True)})
            return tuple(outputs) if len(outputs) > 1 else outputs[0]

        return run


@pytest.fixture
def watch() -> Watch:
    return Watch()


X = {"x": np.ones(4, np.float32)}


@pytest.mark.parametrize("observed", [False, True])
def test_a_chain(build: Build, watch: Watch, observed: bool) -> None:
    session = build(
        """g (float[4] x) => (float[4] y)
        { a = test.One <n = 1>(x)  b = test.One <n = 2>(a)  c = test.One <n = 3>(b)  y = test.One <n = 4>(c) }""",
        kernels=watch.kernels(),
    )
    if observed:
        session = session.observe(BaseObserver())
    session.run(None, X)
    assert list(watch.alive.values()) == [[], ["a"], ["b"], ["c"]]


@pytest.mark.parametrize("observed", [False, True])
def test_several_outputs_and_outputs_that_nobody_reads(build: Build, watch: Watch, observed: bool) -> None:
    session = build(
        """g (float[4] x) => (float[4] y) {
            a, b, unread = test.Two(x)
            c = test.One <n = 1>(a)  d = test.One <n = 2>(b)  e = test.One <n = 3>(c)  y = test.One <n = 4>(d, e)
        }""",
        level="none",
        kernels=watch.kernels(),
    )
    if observed:
        session = session.observe(BaseObserver())
    session.run(None, X)
    alive = list(watch.alive.values())
    assert alive[2] == ["b", "c"]
    assert alive[3] == ["c", "d"]
    assert alive[4] == ["d", "e"]


def test_a_value_that_a_later_body_reads_stays_until_then(build: Build, watch: Watch) -> None:
    session = build(
        """g (float[4] x, bool c) => (float[4] y) {
            a = test.One <n = 1>(x)  b = test.One <n = 2>(x)  z = test.One <n = 3>(b)
            i = If(c) <then_branch = t () => (float[4] p) { p = test.One <n = 4>(a) },
                       else_branch = e () => (float[4] q) { q = test.One <n = 5>(z) }>
            y = test.One <n = 6>(i)
        }""",
        kernels=watch.kernels(),
    )
    session.run(None, {**X, "c": np.array(True)})
    values = list(watch.alive.values())
    assert values[2] == ["a", "b"]
    assert values[3] == ["a", "z"]
    assert values[4] == ["p"]


def test_values_in_a_loop_go_with_each_trip(build: Build, watch: Watch) -> None:
    session = build(
        """g (float[4] x, int64 trips) => (float[4] y) {
            y = Loop(trips, , x) <body = l (int64 i, bool going, float[4] s) => (bool still, float[4] n)
                { still = Identity(going)  a = test.One <n = 1>(s)  b = test.One <n = 2>(a)  n = test.One <n = 3>(b) }>
        }""",
        kernels=watch.kernels(),
    )
    session.run(None, {**X, "trips": np.array(5)})
    # As of the last trip. The kernel of Loop holds its state, n of the trip before, while a body runs.
    assert list(watch.alive.values()) == [["n"], ["a", "n"], ["b", "n"]]


def test_nothing_is_left_after_a_run(build: Build, watch: Watch) -> None:
    session = build(
        """g (float[4] x, bool c) => (float[4] y, float[4] z) { a = test.One <n = 1>(x)  y = test.One <n = 2>(a)
            z = If(c) <then_branch = t () => (float[4] p) { p = test.One <n = 4>(a) },
                       else_branch = e () => (float[4] q) { q = test.One <n = 5>(a) }> }""",
        kernels=watch.kernels(),
    )
    gc.disable()
    try:
        session.run(None, {**X, "c": np.array(False)})
        assert [name for name, ref in watch.made.items() if ref() is not None] == []
    finally:
        gc.enable()


def test_nothing_is_left_after_a_run_that_failed(build: Build, watch: Watch) -> None:
    from miniort.errors import RunError

    session = build(
        "g (float[4] x) => (float[4] y) { a = test.One(x)  y = MatMul(a, b) }".replace("float[4] x)", "float[4] x, float[K] b)"),
        kernels=watch.kernels(),
    )
    with pytest.raises(RunError):
        session.run(None, {**X, "b": np.ones(3, np.float32)})
    gc.collect()
    assert watch.made["a"]() is None


def test_memory_goes_back_to_the_pool(build: Build) -> None:
    """A chain of 30 large values needs room for two or three, not for thirty."""
    chain = "  ".join(f"v{i + 1} = {'Neg' if i % 2 else 'Sqrt'}(v{i})" for i in range(30))
    session = build(f"g (float[N] v0) => (float[N] v30) {{ {chain} }}")
    session.run(None, {"v0": np.ones(100_000, np.float32)})
    peak = session.providers[0].provider.memory().peak
    assert 0 < peak <= 4 * 401_408
