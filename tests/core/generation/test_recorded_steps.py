"""A step as it's recorded: fed as though the cache were full. That it then gives the same tokens, `tests/providers/cuda` looks at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from miniort.generation import open_decoder
from miniort.generation.cache import reserved_size
from miniort.generation.recorded_steps import RecordedSteps, ReplayCounts
from miniort.generation.step_feeds import Step


@pytest.mark.parametrize("window", [0, 1, 3, 5])
def test_a_step_within_a_larger_cache_sees_what_it_saw_and_nothing_else(window: int) -> None:
    mask = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    step = Step(np.zeros((2, 1), np.int64), np.array([[4], [6]]), mask, np.arange(7), every_logit=False)
    larger = step.within(12)
    assert larger.kept == 11
    np.testing.assert_array_equal(larger.visible(window)[..., :7], step.visible(window))
    assert not larger.visible(window)[..., 7:].any()
    np.testing.assert_array_equal(larger.positions, step.positions)
    assert step.mask.shape == (2, 7)


def test_nobody_counts_replays_where_that_was_turned_off() -> None:
    assert open_decoder("demo", providers=["cpu"]).replay_counts == ReplayCounts()
    assert open_decoder("demo", providers=["cpu"], replay=False).replay_counts is None


class Told:
    """A cache, its reserved tokens, a provider, a session and its recording, all in one."""

    length, size = 5, 8

    def __init__(self, *, fits: bool = True, found: float = 0.0) -> None:
        self.does_fit, self.found, self.cleared = fits, found, 0

    def reserved(self) -> Told:
        return self

    def note_replay(self) -> None:
        self.length += 1

    def clear(self, start: int) -> None:
        self.cleared += 1

    def write_at(self, place: Any) -> None: ...

    def record(self, feed: Any, told: np.ndarray, tell: Any) -> tuple[Any, Any]:
        return self, [np.array([[0.0, self.found, 1.0]], np.float32)]

    def download(self, array: np.ndarray) -> np.ndarray:
        return array

    def append(self, layer: int, key: Any, value: Any) -> Any: ...

    def replay(self, feed: Any, told: np.ndarray) -> list[np.ndarray] | None:
        return [np.zeros((1, 3))] if self.does_fit else None


def run_steps(told: Told, count: int) -> list[str]:
    """How each step was run."""
    anything: Any = told
    steps = RecordedSteps(anything, anything, None)
    ways = []
    for _ in range(count):
        reserved = steps.reserved(anything, 1)
        if reserved is not None and steps.replay(anything, {}) is not None:
            ways.append("replayed")
            continue
        before = steps.counts.recorded
        if reserved is not None:
            steps.record(anything, 1, reserved, {}, lambda: np.array([[0.0, 0.0, 1.0]], np.float32))
        ways.append("recorded" if steps.counts.recorded > before else "ordinary")
    return [*ways, steps.counts.obstacle or ""]


def test_the_second_step_with_a_cache_is_recorded_and_those_after_it_are_replayed() -> None:
    assert run_steps(Told(), 5) == ["ordinary", "recorded", "replayed", "replayed", "replayed", ""]


def test_a_step_that_would_be_recorded_again_and_again_is_given_up() -> None:
    told = Told(fits=False)
    assert run_steps(told, 5) == [
        *("ordinary", "recorded", "ordinary", "ordinary", "ordinary"),
        "the host reads an input that is another in each step",
    ]
    assert told.cleared == 1


def test_a_step_that_gives_other_logits_is_not_replayed() -> None:
    *ways, obstacle = run_steps(Told(found=0.1), 4)
    assert ways == ["ordinary"] * 4
    assert "it gives other logits" in obstacle


@pytest.mark.parametrize(
    ("length", "room", "size"),
    [(0, 1000, 256), (254, 1000, 256), (255, 1000, 512), (600, 1000, 1000), (998, 1000, 1000), (999, 1000, None)],
)
def test_a_cache_is_recorded_at_few_sizes(length: int, room: int, size: int | None) -> None:
    assert reserved_size(length, room, 256) == size
