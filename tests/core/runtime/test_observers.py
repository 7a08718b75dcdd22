"""Observers: every step in order, the values that they ask for, and a session that goes on without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from miniort import InferenceSession
from miniort.errors import InputError
from miniort.plugins import hookimpl
from miniort.runtime.observers import BaseObserver, NodeInfo, Profiler, ValueRecorder

Build = Callable[..., InferenceSession]
X = np.array([1, 2], np.float32)
TEXT = """g (float[2] x, int64 trips, bool c) => (float[2] y) <float[2] w = {10, 20}> {
    a = Add(x, w)
    l = Loop(trips, , a) <body = b (int64 i, bool going, float[2] s) => (bool still, float[2] n) {
        still = Identity(going)
        d = Add(s, w)
        n = If(c) <then_branch = t () => (float[2] p) { p = Neg(d) }, else_branch = e () => (float[2] q) { q = Abs(d) }>
    }>
    y = Exp(l)
}"""


def feeds(trips: int = 2, c: bool = True) -> dict[str, Any]:
    return {"x": X, "trips": np.array(trips), "c": np.array(c)}


class Log(BaseObserver):
    """Everything that it's told, in order."""

    def __init__(self, *wants: str) -> None:
        self.wants = wants
        self.events: list[tuple[str, str]] = []
        self.values: list[tuple[str, Any]] = []
        self.infos: dict[str, NodeInfo] = {}

    def before_node(self, node: NodeInfo, inputs: Sequence[Any]) -> None:
        self.events.append(("before", node.path))
        self.infos[node.path] = node
        assert len(inputs) == len(node.reads)

    def after_node(self, node: NodeInfo, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.events.append(("after", node.path))
        assert len(inputs) == len(node.reads)
        assert len(outputs) == len(node.writes)
        assert all(value is not None for value in outputs)

    def on_value(self, name: str, value: Any) -> None:
        self.values.append((name, np.array(value).tolist()))


def test_steps_in_order_with_the_way_to_those_in_bodies(build: Build) -> None:
    log = Log()
    build(TEXT).observe(log).run(None, feeds(trips=1))
    body = "Loop_0/body/"
    assert log.events == [
        ("before", "Add_0"),
        ("after", "Add_0"),
        ("before", "Loop_0"),
        ("before", f"{body}Identity_0"),
        ("after", f"{body}Identity_0"),
        ("before", f"{body}Add_1"),
        ("after", f"{body}Add_1"),
        ("before", f"{body}If_0"),
        ("before", f"{body}If_0/then_branch/Neg_0"),
        ("after", f"{body}If_0/then_branch/Neg_0"),
        ("after", f"{body}If_0"),
        ("after", "Loop_0"),
        ("before", "Exp_0"),
        ("after", "Exp_0"),
    ]
    add = log.infos["Add_0"]
    assert (add.op, add.domain, add.provider, add.reads, add.writes) == ("Add", "", "cpu", ("x", "w"), ("a",))
    assert log.infos["Loop_0"].reads == ("trips", "", "a")


def test_wanted_values_wherever_they_come_from(build: Build) -> None:
    """An input, a constant, a value of the graph, and one of a body in each trip: each as soon as it's there, and not again."""
    log = Log("x", "w", "a", "d", "s", "p", "q", "y")
    build(TEXT).observe(log).run(["y"], feeds(trips=2))
    expected: list[tuple[str, list[float]]] = [("a", [11, 22]), ("s", [11, 22]), ("d", [21, 42]), ("p", [-21, -42])]
    expected += [("s", [-21, -42]), ("d", [-11, -22]), ("p", [11, 22])]
    assert log.values[2:-1] == expected
    assert sorted(log.values[:2]) == [("w", [10, 20]), ("x", [1, 2])]
    assert log.values[-1][0] == "y"


def test_a_name_that_no_value_has(build: Build) -> None:
    session = build(TEXT)
    with pytest.raises(InputError, match=r"no value is named 'ghost'.*graph_optimization_level='none'"):
        session.observe(ValueRecorder(["a", "ghost"]))


def test_the_session_itself_goes_on_unobserved(build: Build) -> None:
    session = build(TEXT)
    log = Log()
    watched = session.observe(log)
    expected = session.run(None, feeds())
    assert log.events == []
    np.testing.assert_array_equal(watched.run(None, feeds())[0], expected[0])
    count = len(log.events)
    assert count > 0
    session.run(None, feeds())
    assert len(log.events) == count
    assert watched.weights is session.weights
    other = Log()
    watched.observe(other).run(None, feeds())
    assert len(log.events) == 2 * count, "an observed session that is observed further"
    assert len(other.events) == count


def test_several_observers_are_told_in_the_order_given(build: Build) -> None:
    told: list[str] = []

    class Tell(BaseObserver):
        def __init__(self, name: str) -> None:
            self.name = name

        def before_node(self, node: NodeInfo, inputs: Sequence[Any]) -> None:
            told.append(self.name)

    build("g (float[2] x) => (float[2] y) { y = Exp(x) }").observe(Tell("b"), Tell("a")).run(None, {"x": X})
    assert told == ["b", "a"]


def test_what_an_observer_raises_ends_the_run(build: Build) -> None:
    class Stop(BaseObserver):
        def after_node(self, node: NodeInfo, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            raise LookupError(node.path)

    session = build("g (float[2] x) => (float[2] y) { y = Exp(x) }")
    with pytest.raises(LookupError, match="Exp_0"):
        session.observe(Stop()).run(None, {"x": X})


def test_observers_of_plugins(build: Build) -> None:
    log = Log()
    seen: list[list[str]] = []

    class Plugin:
        @hookimpl
        def miniort_observers(self, session: InferenceSession) -> list[Any]:
            seen.append([each.name for each in session.get_inputs()])
            return [log] if len(session.get_inputs()) == 1 else []

    build("g (float[2] x) => (float[2] y) { y = Exp(x) }", add=(Plugin(),)).run(None, {"x": X})
    assert log.events == [("before", "Exp_0"), ("after", "Exp_0")]
    quiet = build(TEXT, add=(Plugin(),))
    quiet.run(None, feeds())
    assert seen == [["x"], ["x", "trips", "c"]]
    assert quiet.plan.observers == ()
    assert len(log.events) == 2


def test_the_profiler_adds_up(build: Build) -> None:
    profiler = Profiler()
    watched = build(TEXT).observe(profiler)
    for _ in range(3):
        watched.run(None, feeds(trips=2))
    calls = {info.path: count for info, count in profiler.calls.items()}
    assert calls["Add_0"] == 3
    assert calls["Loop_0/body/Add_1"] == 6
    by_op = profiler.by_op()
    assert list(by_op.values()) == sorted(by_op.values(), reverse=True)
    assert by_op["Loop"] >= by_op["If"] >= by_op["Neg"] > 0


def test_values_are_the_arrays_themselves(build: Build) -> None:
    recorder = ValueRecorder(["x", "a"])
    x = X.copy()
    build("g (float[2] x) => (float[2] y) { a = Neg(x)  y = Exp(a) }").observe(recorder).run(None, {"x": x})
    assert recorder.values["x"] is x
    assert recorder.values["a"].tolist() == [-1, -2]
