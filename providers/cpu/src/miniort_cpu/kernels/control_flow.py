"""Running sub-graphs: If, Loop, Scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, ValueInfo
from miniort_cpu.axes import normalize_axis

kernels = KernelTable("cpu")


@kernels.register("If", versions=(1, None))
def if_(node: NodeContext) -> Run:
    """The outputs of one of two graphs, that see the outer graph's values. condition: one bool."""
    then, otherwise = node.subgraph("then_branch"), node.subgraph("else_branch")
    return lambda scope, condition: tuple((then if condition.item() else otherwise)(scope))


@kernels.register("Loop", versions=(1, None))
def loop(node: NodeContext) -> Run:
    """A graph run up to `limit` times, while its condition holds.

    body(iteration, condition, carried...) -> condition, carried..., scanned...

    limit: one int64, absent for no limit; condition: one bool, absent for True; carried: any values
    -> the last carried values, and of each scanned value [iterations, ...]
    """
    body = node.subgraph("body")

    def run(scope: Any, limit: Array | None = None, condition: Array | None = None, *carried: Any) -> tuple[Any, ...]:
        count = None if limit is None else int(limit.item())
        state: Sequence[Any] = carried
        scanned: list[list[Array]] = [[] for _ in body.outputs[1 + len(carried) :]]
        going = True if condition is None else bool(condition.item())
        iteration = 0
        while going and (count is None or iteration < count):
            condition, *results = body(scope, np.array(iteration, np.int64), np.array(going), *state)
            going = bool(condition.item())
            state = results[: len(carried)]
            for collected, value in zip(scanned, results[len(carried) :], strict=True):
                collected.append(value)
            iteration += 1
        return (*state, *map(stacked, scanned, body.outputs[1 + len(carried) :]))

    return run


def stacked(values: Sequence[Array], info: ValueInfo, axis: int = 0) -> Array:
    """Values of all iterations along a new axis. Where there were none, empty, with the sizes that the graph's output is known to have."""
    if values:
        return np.stack(values, axis)
    sizes = [size if isinstance(size, int) else 0 for size in info.shape or ()]
    sizes.insert(normalize_axis(axis, len(sizes) + 1), 0)
    return np.empty(sizes, info.dtype or np.dtype(np.float32))


@kernels.register("Scan", versions=(9, None))
def scan(node: NodeContext) -> Run:
    """A graph run once for each element along an axis of some inputs: body(state..., elements...) -> state..., scanned...

    -> the last state, and of each scanned value one tensor with a new axis
    """
    body, inputs = node.subgraph("body"), node.attribute("num_scan_inputs")
    states = len(body.inputs) - inputs
    outputs = len(body.outputs) - states
    input_axes, input_backward = node.attribute("scan_input_axes", (0,) * inputs), node.attribute("scan_input_directions", (0,) * inputs)
    output_axes, output_backward = (
        node.attribute("scan_output_axes", (0,) * outputs),
        node.attribute("scan_output_directions", (0,) * outputs),
    )

    def run(scope: Any, *values: Array) -> tuple[Array, ...]:
        state: Sequence[Array] = values[:states]
        sequences = [np.moveaxis(x, axis, 0) for x, axis in zip(values[states:], input_axes, strict=True)]
        sequences = [x[::-1] if backward else x for x, backward in zip(sequences, input_backward, strict=True)]
        scanned: list[list[Array]] = [[] for _ in range(outputs)]
        for step in range(len(sequences[0])):
            results = body(scope, *state, *(x[step, ...] for x in sequences))
            state = results[:states]
            for collected, value in zip(scanned, results[states:], strict=True):
                collected.append(value)
        tensors = [
            stacked(collected[::-1] if backward else collected, info, axis)
            for collected, info, axis, backward in zip(scanned, body.outputs[states:], output_axes, output_backward, strict=True)
        ]
        return (*state, *tensors)

    return run


@kernels.register("Scan", versions=(8, 8))
def scan_batch(node: NodeContext) -> Run:
    """Scan of every row of a batch by itself, over axis 1. lengths: [batch] int64, absent for all of it; what lies beyond is zero.

    states: [batch, ...]; inputs: [batch, time, ...] -> states: [batch, ...]; scanned: [batch, time, ...]
    """
    body, inputs = node.subgraph("body"), node.attribute("num_scan_inputs")
    states = len(body.inputs) - inputs
    backward = node.attribute("directions", (0,) * inputs)

    def run_row(scope: Any, state: Sequence[Array], sequences: Sequence[Array], length: int) -> tuple[Array, ...]:
        time = len(sequences[0])
        scanned: list[list[Array]] = [[] for _ in body.outputs[states:]]
        for step in range(length):
            elements = [x[length - 1 - step if reverse else step, ...] for x, reverse in zip(sequences, backward, strict=True)]
            results = body(scope, *state, *elements)
            state = results[:states]
            for collected, value in zip(scanned, results[states:], strict=True):
                collected.append(value)
        tensors = [stacked(collected, info) for collected, info in zip(scanned, body.outputs[states:], strict=True)]
        padded = [np.concatenate((x, np.zeros((time - length, *x.shape[1:]), x.dtype))) for x in tensors]
        return (*state, *padded)

    def run(scope: Any, lengths: Array | None, *values: Array) -> tuple[Array, ...]:
        batch, time = values[states].shape[:2]
        counts = [time] * batch if lengths is None else lengths.tolist()
        rows = [
            run_row(scope, [x[row, ...] for x in values[:states]], [x[row] for x in values[states:]], count)
            for row, count in enumerate(counts)
        ]
        return tuple(np.stack(results) for results in zip(*rows, strict=True))

    return run
