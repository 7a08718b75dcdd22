"""How far values lie apart, and where two runs part: with other optimisations, in loops, and where not all fits in memory at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from miniort.errors import InputError
from miniort.runtime.comparison import ComputedNode, Tolerance, Visit, difference, first_difference, statistics
from miniort.runtime.observers import NodeInfo


def f(*values: float, dtype: Any = np.float32) -> np.ndarray:
    return np.array(values, dtype)


@pytest.mark.parametrize(
    ("found", "wanted", "absolute", "passed"),
    [
        (f(1, 2), f(1, 2), 0, True),
        (f(1, 2.00001), f(1, 2), pytest.approx(1e-5, rel=0.1), True),
        (f(1, 2.1), f(1, 2), pytest.approx(0.1, rel=1e-3), False),
        (f(np.nan, np.inf), f(np.nan, np.inf), 0, True),
        (f(np.nan, 1), f(1, 1), inf, False),
        (f(-np.inf), f(np.inf), inf, False),
        (f(np.inf), f(3e38), inf, False),
        (np.float32(1.5), np.float32(1.5), 0, True),
        (np.array([1, 2]), np.array([1, 3]), 1, False),
        (np.array([True]), np.array([False]), 1, False),
        (f(1, 2), f(1, 2, 3), inf, False),
        (f(1), f(1, dtype=np.float64), inf, False),
        (np.array(["a"], object), np.array(["a"], object), 0, True),
        (np.array(["a"], object), np.array(["b"], object), inf, False),
        (f(), f(), 0, True),
        ([f(1)], [f(1)], 0, True),
        ([f(1), f(2)], [f(1), f(3)], 1, False),
        ([f(1)], [f(1), f(2)], inf, False),
        (f(1, dtype=ml_dtypes.bfloat16), f(1.03, dtype=ml_dtypes.bfloat16), pytest.approx(0.031, rel=0.1), True),
        (f(1, dtype=np.float16), f(1.2, dtype=np.float16), pytest.approx(0.2, rel=0.01), False),
    ],
)
def test_difference(found: Any, wanted: Any, absolute: Any, passed: bool) -> None:
    result = difference(found, wanted)
    assert (result.absolute, result.passed) == (absolute, passed)


def test_the_place_and_the_relative_difference_are_those_of_the_worst_elements() -> None:
    result = difference(np.array([[100.0, 1], [2, 3]]), np.array([[101.0, 1], [2, 3.5]]))
    assert result.place == (0, 0)
    assert result.absolute == 1
    assert result.relative == pytest.approx(0.5 / 26.875)  # an element below the mean is measured by the mean


def test_tolerances_that_are_given_replace_those_of_the_type() -> None:
    assert not difference(f(1.1), f(1)).passed
    assert difference(f(1.1), f(1), Tolerance(absolute=0.2)).passed
    assert difference(f(1.1), f(1), Tolerance(relative=0.2)).passed
    assert not difference(np.array([1]), np.array([2]), Tolerance(absolute=5)).passed, "integers must be equal"


def test_statistics() -> None:
    found = statistics(f(1, np.nan, 3, np.inf))
    assert (found.least, found.mean, found.greatest, found.nans, found.infinities) == (1, 2, 3, 1, 1)
    assert statistics(f(np.nan)).mean is None
    assert statistics(np.array(["x"], object)).least is None


class Recording:
    """A run that was written down: (name of the node, reads, values by name)."""

    def __init__(self, nodes: Sequence[tuple[str, tuple[str, ...], Mapping[str, Any]]]) -> None:
        self.nodes = nodes
        self.runs = 0

    def trace(self, feeds: Mapping[str, Any], visit: Visit) -> None:
        self.runs += 1
        values: dict[str, Any] = dict(feeds)
        for path, reads, writes in self.nodes:
            inputs = [values.get(name) for name in reads]
            values.update(writes)
            info = NodeInfo(path, "Op", "", "p", reads, tuple(writes))
            if visit(ComputedNode(info, lambda inputs=inputs: inputs, lambda writes=writes: list(writes.values()))):  # type: ignore[misc]
                return


def chain(wrong: int | None = None, count: int = 20) -> Recording:
    return Recording(
        [
            (f"n{k}", (f"v{k - 1}" if k else "x",), {f"v{k}": f(k + (0.5 if wrong is not None and k >= wrong else 0), 1)})
            for k in range(count)
        ]
    )


@pytest.mark.parametrize("group_bytes", [1, 20, 1 << 20])
def test_the_first_of_many_is_found_whatever_is_kept_at_a_time(group_bytes: int) -> None:
    baseline = chain()
    found = first_difference(chain(wrong=13), baseline, {"x": f(0)}, group_bytes=group_bytes)
    assert found.divergence is not None
    assert (found.divergence.node.path, found.divergence.output, found.divergence.agreed) == ("n13", "v13", 13)
    (operand,) = found.divergence.inputs
    assert operand.name == "v12"
    assert operand.difference is not None
    assert operand.difference.absolute == 0
    assert (baseline.runs > 3) == (group_bytes < 1 << 20)
    same = first_difference(chain(), chain(), {"x": f(0)}, group_bytes=group_bytes)
    assert (same.divergence, same.compared) == (None, 20)


def test_values_that_only_one_run_has_are_passed_over() -> None:
    subject = Recording([("fused", ("x",), {"v3": f(3, 1)}), ("n4", ("v3",), {"v4": f(9, 9)})])
    found = first_difference(subject, chain(), {"x": f(0)})
    assert found.divergence is not None
    assert found.divergence.node.path == "n4"
    with pytest.raises(InputError, match="no value of the same name"):
        first_difference(Recording([("n", (), {"other": f(1)})]), chain(), {})


def test_a_loop_s_trips_are_compared_one_by_one() -> None:
    def trips(*values: float) -> Recording:
        return Recording([("loop/body/n", (), {"state": f(value)}) for value in values])

    found = first_difference(trips(1, 2, 3.5), trips(1, 2, 3), {})
    assert found.divergence is not None
    assert (found.divergence.agreed, found.divergence.found.tolist()) == (2, [3.5])
    assert first_difference(trips(1, 2, 3), trips(1, 2, 3), {}).divergence is None
