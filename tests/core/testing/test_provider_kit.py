"""The kit for providers catches kernels that are wrong, each in one way, and passes those that are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from miniort.errors import RunError
from miniort.kernels import CompileKernel, Kernel, NodeContext, Run
from miniort.testing import ProviderConformance
from miniort.testing.operators import Operator, operator_versions
from miniort.types import Array

EXAMPLES = 30

CAUGHT = (AssertionError, ExceptionGroup, RunError)
"""RunError: NumPy refused to write into a read-only array, or the kernel's result had no place in the graph."""


def kit(op: str, version: int, compile_kernel: CompileKernel) -> tuple[ProviderConformance, Operator]:
    """A kit that asks the kernel before the CPU provider's own, and what it's to run."""

    class Kit(ProviderConformance):
        examples = EXAMPLES
        kernels = (Kernel("cpu", op, "", version, version, compile_kernel),)

    [operator] = [each for each in operator_versions() if (each.domain, each.op, each.version) == ("", op, version)]
    return Kit(), operator


def floor_division(node: NodeContext) -> Run:
    def run(a: Array, b: Array) -> Any:
        with np.errstate(all="ignore"):
            return a / b if a.dtype.kind not in "iu" else a // b

    return run


def last_of_ties(node: NodeContext) -> Run:
    axis, largest = node.attribute("axis", -1), node.attribute("largest", 1)

    def run(x: Array, k: Array) -> Any:
        order = np.flip(np.argsort(x, axis, kind="stable"), axis) if largest else np.argsort(x, axis, kind="stable")
        indices = order.take(range(int(k[0])), axis)
        return np.take_along_axis(x, indices, axis), indices.astype(np.int64)

    return run


def none_of_nothing(node: NodeContext) -> Run:
    """A sum over an axis of size 0 that leaves the axis."""
    keep, skips = bool(node.attribute("keepdims", 1)), bool(node.attribute("noop_with_empty_axes", 0))

    def run(x: Array, axes: Array | None = None) -> Any:
        if (axes is None or axes.size == 0) and skips:
            return x.copy()
        over = tuple(range(x.ndim)) if axes is None or axes.size == 0 else tuple(axes.tolist())
        if any(x.shape[axis] == 0 for axis in over):
            return x.copy()
        return np.asarray(x.sum(over, x.dtype, keepdims=keep))

    return run


def softmax_of_one_axis(node: NodeContext) -> Run:
    """Version 13's meaning of the axis."""
    axis = node.attribute("axis", 1)

    def run(x: Array) -> Any:
        powers = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
        return powers / powers.sum(axis, keepdims=True)

    return run


def both_bounds(node: NodeContext) -> Run:
    """A Clip that takes an absent lower bound for 0."""

    def run(x: Array, low: Array | None = None, high: Array | None = None) -> Any:
        clipped = np.maximum(x, x.dtype.type(0) if low is None else low)
        return clipped if high is None else np.minimum(clipped, high)

    return run


def wide_sum(node: NodeContext) -> Run:
    return lambda x, axis: np.cumsum(x, int(axis), np.float64)


def in_place(node: NodeContext) -> Run:
    return lambda x: np.negative(x, out=x)


def flat_scalars(node: NodeContext) -> Run:
    return lambda x: np.atleast_1d(np.abs(x))


def quiet_nan(node: NodeContext) -> Run:
    return lambda a, b: np.nan_to_num(a + b)


def clamped_axis(node: NodeContext) -> Run:
    """A Gather along the first axis for every axis that's counted from the end."""
    axis = max(node.attribute("axis", 0), 0)
    return lambda x, indices: x.take(indices, axis)


def truncating_division(node: NodeContext) -> Run:
    def run(a: Array, b: Array) -> Any:
        with np.errstate(all="ignore"):
            return np.trunc(a / b).astype(a.dtype) if a.dtype.kind in "iu" else a / b

    return run


@pytest.mark.parametrize(
    ("op", "version", "wrong"),
    [
        ("Div", 14, floor_division),
        ("TopK", 11, last_of_ties),
        ("ReduceSum", 13, none_of_nothing),
        ("Softmax", 11, softmax_of_one_axis),
        ("Clip", 13, both_bounds),
        ("CumSum", 14, wide_sum),
        ("Neg", 13, in_place),
        ("Abs", 13, flat_scalars),
        ("Add", 14, quiet_nan),
        ("Gather", 13, clamped_axis),
    ],
)
def test_wrong_kernels_are_caught(op: str, version: int, wrong: CompileKernel) -> None:
    conformance, operator = kit(op, version, wrong)
    with pytest.raises(CAUGHT):
        conformance.test_operator(operator)


def test_a_right_kernel_passes() -> None:
    conformance, operator = kit("Div", 14, truncating_division)
    conformance.test_operator(operator)


def test_the_kit_runs_every_op_and_version_by_default() -> None:
    asked: list[tuple[str, Any]] = []

    class Metafunc:
        fixturenames = ("operator",)

        def parametrize(self, name: str, values: Any, ids: Any) -> None:
            asked.append((name, values))

    ProviderConformance().pytest_generate_tests(Metafunc())  # type: ignore[arg-type]
    assert asked == [("operator", operator_versions())]
    covered = {(each.domain, each.op) for each in operator_versions()}
    assert {("", "Conv"), ("", "If"), ("ai.onnx.ml", "TreeEnsemble")} <= covered
