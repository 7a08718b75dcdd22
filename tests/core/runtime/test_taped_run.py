"""Runs on a tape: a replay gives what a run gives, or says that it can't."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from miniort import InferenceSession
from miniort.errors import ProviderError, RunError
from miniort.host_provider import HostProvider
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.plugins import hookimpl
from miniort.providers import Availability, ProviderInfo
from miniort.runtime.observers import BaseObserver
from miniort.tape import call
from miniort.types import Array

KERNELS = KernelTable("noting")
PLACE = np.zeros(1, np.int64)
counts = {"Neg": 0, "Tanh": 0}


@KERNELS.register("Neg")
def negative(node: NodeContext) -> Run:
    """Notes its call down."""

    def run(x: Array) -> Array:
        counts["Neg"] += 1
        y: Array = node.provider.allocate(x.shape, x.dtype)
        call(np.negative, x, y, writes=(y,))
        return y

    return run


@KERNELS.register("Tanh")
def tanh(node: NodeContext) -> Run:
    """Notes nothing, so it's run again."""

    def run(x: Array) -> Array:
        counts["Tanh"] += 1
        return np.tanh(x)

    return run


@KERNELS.register("Exp")
def exponential(node: NodeContext) -> Run:
    """Reads a copy that it makes without a call."""

    def run(x: Array) -> Array:
        y: Array = node.provider.allocate(x.shape, x.dtype)
        call(np.exp, x.copy(), y, writes=(y,))
        return y

    return run


class Plugin:
    @hookimpl
    def miniort_providers(self) -> list[ProviderInfo]:
        return [ProviderInfo("noting", 200, lambda: Availability(True, "made up"), lambda _: HostProvider(KERNELS))]


@pytest.fixture
def session(build: Callable[..., InferenceSession]) -> Callable[[str], InferenceSession]:
    """A session from text, with the provider before the CPU's; no pass fuses or folds anything."""
    return lambda text: build(text, add=(Plugin(),), level="none")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


PLANS = {
    "calls": "g (float[N, 3] x) => (float[N, 3] z) { y = Neg(x)  z = Neg(y) }",
    "a kernel that notes nothing": "g (float[N, 3] x) => (float[N, 3] z) { y = Neg(x)  t = Tanh(y)  z = Neg(t) }",
    "another provider's kernel": """g (float[N, 3] x, float[3] b) => (float[N, 3] z) {
        y = Neg(x)  t = Add(y, b)  s = Mul(t, t)  z = Neg(s)
    }""",
    "a kernel that reads what no call has written": "g (float[N, 3] x) => (float[N, 3] z) { y = Neg(x)  e = Exp(y)  z = Neg(e) }",
    "views": "g (float[N, 3] x) => (float[3, N] z) { y = Neg(x)  t = Transpose(y)  z = Neg(t) }",
    "a view at the end": "g (float[N, 3] x) => (float[3, N] z) { y = Neg(x)  z = Transpose(y) }",
    "what comes before": "g (float[N, 3] x) => (float[N, 3] z) { s = Sqrt(x)  t = Abs(s)  y = Neg(t)  z = Neg(y) }",
    "what comes later but waits for nothing": "g (float[N, 3] x) => (float[N, 3] z) { y = Neg(x)  t = Abs(x)  z = Add(y, t) }",
    "constants": """g (float[N, 3] x) => (float[N, 3] z) <float[3] c = {1.0, 2.0, 3.0}> {
        d = Mul(c, c)  n = Neg(d)  y = Neg(x)  t = Mul(y, d)  z = Add(t, n)
    }""",
    "several outputs": """g (float[N, 4] x) => (float[N, 2] b, float[N, 2] z) {
        y = Neg(x)  a, b = Split<axis = 1, num_outputs = 2>(y)  z = Neg(a)
    }""",
    "an input that is an output": "g (float[N, 3] x) => (float[N, 3] x, float[N, 3] y) { y = Neg(x) }",
}


@pytest.mark.parametrize("text", PLANS.values(), ids=PLANS.keys())
def test_a_replay_is_a_run(text: str, session: Callable[[str], InferenceSession]) -> None:
    built = session(text)
    width = built.get_inputs()[0].shape[1]
    feeds = [
        {each.name: draw(5, width, seed=s) if len(each.shape) == 2 else draw(3, seed=s + 9) for each in built.get_inputs()}
        for s in range(3)
    ]
    run, first = built.record(feeds[0], PLACE, lambda _: None)
    for found, wanted in zip(first, built.run(None, feeds[0]), strict=True):
        np.testing.assert_array_equal(found, wanted)
    kept = []
    for feed in feeds[1:]:
        replayed = run.replay(feed, PLACE)
        assert replayed is not None
        kept.append((replayed, built.run(None, feed)))
    for replayed, run_again in kept:  # each replay's results are its own
        for found, wanted in zip(replayed, run_again, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_calls_are_played_and_kernels_that_note_none_are_run(session: Callable[[str], InferenceSession]) -> None:
    run, _ = session(PLANS["a kernel that notes nothing"]).record({"x": draw(2, 3)}, PLACE, lambda _: None)
    before = dict(counts)
    for seed in range(4):
        run.replay({"x": draw(2, 3, seed=seed)}, PLACE)
    assert counts == {"Neg": before["Neg"], "Tanh": before["Tanh"] + 4}


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("g (float[N, 3] x) => (float[3] n) <float[3] c = {1.0, 2.0, 3.0}> { t = Tanh(c)  n = Tanh(t) }", 0),
        ("g (float[N, 3] x) => (float[2] n) { s = Shape(x)  f = Cast<to = 1>(s)  n = Tanh(f) }", 0),
        ("g (float[N, 3] x) => (float[2] n) { t = Tanh(x)  s = Shape(t)  f = Cast<to = 1>(s)  n = Tanh(f) }", 1),
    ],
)
def test_what_depends_on_constants_and_shapes_alone_is_not_run_again(
    text: str, again: int, session: Callable[[str], InferenceSession]
) -> None:
    built = session(text)
    run, first = built.record({"x": draw(2, 3)}, PLACE, lambda _: None)
    before = counts["Tanh"]
    found = run.replay({"x": draw(2, 3, seed=1)}, PLACE)
    assert found is not None
    np.testing.assert_array_equal(found[0], first[0])
    assert counts["Tanh"] == before + again


def test_random_numbers_are_drawn_anew(session: Callable[[str], InferenceSession]) -> None:
    built = session("g (float[3] x) => (float[3] z) { r = RandomUniform<shape = [3]>()  y = Neg(x)  z = Add(y, r) }")
    run, _ = built.record({"x": draw(3)}, PLACE, lambda _: None)
    first, second = (run.replay({"x": draw(3)}, PLACE) for _ in range(2))
    assert first is not None
    assert second is not None
    assert (first[0] != second[0]).any()


def test_other_shapes_types_and_objects_are_not_replayed(session: Callable[[str], InferenceSession]) -> None:
    built = session(
        """g (float[N] x) => (float[M] z) {
            c = Abs(x)  m = Cast<to = 7>(c)  y = Neg(x)  i = NonZero(m)  j = Squeeze(i)  t = Gather(y, j)  z = Neg(t)
        }"""
    )
    feed = {"x": np.array([1.5, 0.5, 2.5], np.float32)}
    run, _ = built.record(feed, PLACE, lambda _: None)
    same = run.replay({"x": np.array([0.5, 3.5, 2.5], np.float32)}, PLACE)
    assert same is not None
    np.testing.assert_array_equal(same[0], [3.5, 2.5])
    assert run.replay({"x": np.array([1.5, 2.5], np.float32)}, PLACE) is None, "another shape"
    assert run.replay({"x": np.array([1.5, 0.5, 2.5])}, PLACE) is None, "another type"
    assert run.replay({}, PLACE) is None, "one is missing"
    assert run.replay({"x": np.array([0.5, 0.5, 2.5], np.float32)}, PLACE) is None, "a kernel gives another shape"


def test_a_view_that_was_taken_elsewhere_is_not_replayed(session: Callable[[str], InferenceSession]) -> None:
    built = session("g (float[N] x, int64[1] start, int64[1] end) => (float[M] z) { y = Neg(x)  v = Slice(y, start, end)  z = Neg(v) }")
    feed = {"x": draw(5), "start": np.array([1]), "end": np.array([3])}
    run, _ = built.record(feed, PLACE, lambda _: None)
    found = run.replay(feed | {"x": draw(5, seed=1)}, PLACE)
    assert found is not None
    np.testing.assert_array_equal(found[0], draw(5, seed=1)[1:3])
    assert run.replay(feed | {"start": np.array([2]), "end": np.array([4])}, PLACE) is None


def test_a_view_taken_by_a_number_that_is_computed_is_taken_again(session: Callable[[str], InferenceSession]) -> None:
    built = session(
        """g (float[N] x, int64[1] place) => (float[M] z, float[N] y) <int64[1] one = {1}, int64[1] two = {2}> {
            start = Mul(place, one)  end = Add(start, two)  y = Neg(x)  v = Slice(y, start, end)  z = Neg(v)
        }"""
    )
    run, _ = built.record({"x": draw(5), "place": np.array([1])}, PLACE, lambda _: None)
    for place in (0, 2, 1):
        feed = {"x": draw(5, seed=place), "place": np.array([place])}
        found = run.replay(feed, PLACE)
        assert found is not None
        np.testing.assert_array_equal(found[0], feed["x"][place : place + 2])
        np.testing.assert_array_equal(found[1], -feed["x"])
    assert run.replay({"x": draw(5), "place": np.array([4])}, PLACE) is None, "the slice is shorter"


def test_what_is_told_is_read_anew(session: Callable[[str], InferenceSession]) -> None:
    told: list[np.ndarray] = []
    run, _ = session(PLANS["calls"]).record({"x": draw(2, 3)}, PLACE + 5, told.append)
    assert told[0].tolist() == [5]
    run.replay({"x": draw(2, 3)}, PLACE + 6)
    assert told[0].tolist() == [6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "g (float[N] x) => (float[N] y, seq(float[N]) z) { y = Neg(x)  z = SequenceConstruct(y) }",
            r"\(SequenceConstruct\) gives what isn't an array, so it can't be recorded",
        ),
        (
            """g (float[N] x, bool flag) => (float[N] z) {
                y = Neg(x)
                z = If (flag) <then_branch = t () => (float[N] a) { a = Neg(y) }, else_branch = e () => (float[N] b) { b = Abs(y) }>
            }""",
            "control flow can't be recorded",
        ),
    ],
)
def test_what_cannot_be_recorded(text: str, message: str, session: Callable[[str], InferenceSession]) -> None:
    with pytest.raises(ProviderError, match=message):
        session(text).record({"x": draw(3), "flag": np.array(True)}, PLACE, lambda _: None)


def test_a_run_that_is_watched_is_not_recorded(session: Callable[[str], InferenceSession]) -> None:
    with pytest.raises(ProviderError, match="observers watch"):
        session(PLANS["calls"]).observe(BaseObserver()).record({"x": draw(2, 3)}, PLACE, lambda _: None)


def test_a_kernel_that_fails_while_it_is_noted_down_is_named(session: Callable[[str], InferenceSession]) -> None:
    built = session("g (float[N] x, float[M] b) => (float[K] z) { y = Neg(x)  z = Add(y, b) }")
    with pytest.raises(RunError, match=r"Add\) on cpu failed on \(tensor\(float\)\[2\], tensor\(float\)\[3\]\)"):
        built.record({"x": draw(2), "b": draw(3)}, PLACE, lambda _: None)
