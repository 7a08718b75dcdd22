"""Runs that a provider records: what is handed to it, when a recording fits, and plans that can't be recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from miniort import InferenceSession
from miniort.errors import ProviderError
from miniort.plugins import hookimpl
from miniort.providers import Availability, ProviderInfo
from miniort.runtime.observers import BaseObserver

PLACE = np.zeros(1, np.int64)


class Replays:
    """Does a run again with other contents of the same arrays. All that's uploaded goes into them."""

    def __init__(self, device: Any, run: Callable[..., Sequence[Any]], arrays: Sequence[Any]) -> None:
        self.device, self.run, self.arrays = device, run, arrays

    def replay(self, *contents: np.ndarray) -> tuple[Any, ...]:
        for array, new in zip(self.arrays, contents, strict=True):
            self.device.unwrap(array)[...] = new
        return tuple(self.run(*self.arrays))


@pytest.fixture
def device(opaque: ModuleType) -> Any:
    """A device whose provider records, and uploads together."""

    class Recorder(opaque.OpaqueProvider):  # type: ignore[misc,name-defined]
        records_runs = True

        def upload_together(self, *arrays: Any) -> tuple[Any, ...]:
            return tuple(self.upload(array) for array in arrays)

        def record(self, run: Any, *arrays: Any) -> tuple[Replays, tuple[Any, ...]]:
            uploaded = [self.upload(array) for array in arrays]
            return Replays(self._device, run, uploaded), tuple(run(*uploaded))

    class RecordingDevice(opaque.Device):  # type: ignore[misc,name-defined]
        @hookimpl
        def miniort_providers(self) -> list[ProviderInfo]:
            return [ProviderInfo(self.name, self.priority, lambda: Availability(True, "made up"), lambda _: Recorder(self))]

    return RecordingDevice()


@pytest.fixture
def leaving(build: Callable[..., InferenceSession], device: Any) -> Callable[[str, str], InferenceSession]:
    """A session from text that leaves an output on the device."""

    def make(text: str, output: str) -> InferenceSession:
        found = build(text, add=(device,)).leaving_on_device(output)
        assert found is not None
        return found[1]

    return make


def f(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


SCALED = """g (float[N] x, float[N] y, int64[k] shape) => (float[a, b] z) {
    count = Size(x)  number = Cast<to = 1>(count)
    s = Add(x, y)  t = Mul(s, number)  z = Reshape(t, shape)
}"""


def test_a_replay_uploads_what_is_new_and_what_the_host_had_made(leaving: Callable[[str, str], InferenceSession], device: Any) -> None:
    session = leaving(SCALED, "z")
    told: list[Any] = []
    feed = {"x": f(1, 2), "y": f(3, 4), "shape": np.array([1, 2])}
    run, (rehearsed,) = session.record(feed, PLACE + 5, told.append)
    np.testing.assert_array_equal(device.unwrap(rehearsed), [[8, 12]])
    assert [int(device.unwrap(array)[0]) for array in told] == [5]
    feed |= {"x": f(10, 20)}
    replayed = run.replay(feed, PLACE + 6)
    assert replayed is not None
    (z,) = replayed
    np.testing.assert_array_equal(device.unwrap(z), [[26, 48]])
    assert int(device.unwrap(told[-1])[0]) == 6


def test_a_recording_is_replayed_where_shapes_and_what_the_host_reads_are_the_same(leaving: Callable[[str, str], InferenceSession]) -> None:
    session = leaving(SCALED, "z")
    feed = {"x": f(1, 2), "y": f(3, 4), "shape": np.array([1, 2])}
    run, _ = session.record(feed, PLACE, lambda _: None)
    assert run.replay(feed | {"x": f(7, 8), "y": f(9, 9), "shape": np.array([1, 2])}, PLACE)
    assert not run.replay(feed | {"x": f(1, 2, 3)}, PLACE), "another shape"
    assert not run.replay(feed | {"x": np.array([1.0, 2.0])}, PLACE), "another type"
    assert not run.replay(feed | {"shape": np.array([2, 1])}, PLACE), "the host reads it"
    assert not run.replay({"x": f(1, 2), "y": f(3, 4)}, PLACE), "one is missing"


@pytest.mark.parametrize(
    ("text", "output", "message"),
    [
        (
            "g (float[N] x) => (float[N] z) { a = Neg(x)  b = Exp(a)  z = Neg(b) }",
            "z",
            r"uploaded in one step; found besides: Upload\(b\)",
        ),
        (
            "g (float[N] x) => (float[N] y, float[N] z) { y = Neg(x)  z = Tanh(x) }",
            "z",
            r"a run whose results go to the host can't be recorded: Download\(y\)",
        ),
    ],
)
def test_plans_that_cannot_be_recorded(text: str, output: str, message: str, leaving: Callable[[str, str], InferenceSession]) -> None:
    with pytest.raises(ProviderError, match=message):
        leaving(text, output).record({"x": f(1, 2)}, PLACE, lambda _: None)


def test_a_run_that_is_watched_is_not_recorded(leaving: Callable[[str, str], InferenceSession]) -> None:
    session = leaving(SCALED, "z").observe(BaseObserver())
    with pytest.raises(ProviderError, match="a run that observers watch can't be recorded"):
        session.record({"x": f(1), "y": f(1), "shape": np.array([1, 1])}, PLACE, lambda _: None)


def test_control_flow_is_not_recorded(build: Callable[..., InferenceSession], device: Any) -> None:
    text = """g (float[N] x, bool flag) => (float[N] z) {
        y = Neg(x)
        z = If (flag) <then_branch = t () => (float[N] a) { a = Neg(y) }, else_branch = e () => (float[N] b) { b = Tanh(y) }>
    }"""
    with pytest.raises(ProviderError, match="control flow can't be recorded"):
        build(text, add=(device,)).record({"x": f(1), "flag": np.array(True)}, PLACE, lambda _: None)


def test_a_session_with_a_device_that_does_not_record(build: Callable[..., InferenceSession], opaque: ModuleType) -> None:
    session = build("g (float[N] x) => (float[N] y) { y = Neg(x) }", add=(opaque.Device(),))
    assert session.recorder is None
    with pytest.raises(ProviderError, match="no provider of this session records runs"):
        session.record({"x": f(1)}, PLACE, lambda _: None)
