"""Sequences, which are Python lists of tensors that nobody changes once they're made."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.kernels import ANY_INPUT, KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.axes import normalize_axis

kernels = KernelTable("cpu")


@kernels.register("SequenceConstruct", versions=(11, None), view_of=ANY_INPUT)
def sequence_construct(node: NodeContext) -> Run:
    """A sequence of all inputs."""
    return lambda *xs: list(xs)


@kernels.register("SequenceEmpty", versions=(11, None))
def sequence_empty(node: NodeContext) -> Run:
    """A sequence of nothing."""
    return lambda: []


@kernels.register("SequenceInsert", versions=(11, None), view_of=ANY_INPUT)
def sequence_insert(node: NodeContext) -> Run:
    """The sequence with one tensor more: at its end, or before what is at `position` ([] int) now; from the back if that's negative."""

    def run(sequence: list[Array], x: Array, position: Array | None = None) -> list[Array]:
        size = len(sequence)
        place = size if position is None else int(position.item())
        if not -size <= place <= size:
            raise IndexError(f"the position in a sequence of {size} must lie in [-{size}, {size}], found {place}")
        result = list(sequence)
        result.insert(place, x)
        return result

    return run


@kernels.register("SequenceErase", versions=(11, None), view_of=0)
def sequence_erase(node: NodeContext) -> Run:
    """The sequence without its last tensor, or that at `position` ([] int)."""

    def run(sequence: list[Array], position: Array | None = None) -> list[Array]:
        place = _place(sequence, -1 if position is None else int(position.item()))
        return [*sequence[:place], *sequence[place + 1 :]]

    return run


@kernels.register("SequenceAt", versions=(11, None), view_of=0)
def sequence_at(node: NodeContext) -> Run:
    """The tensor at `position` ([] int) of a sequence."""
    return lambda sequence, position: sequence[_place(sequence, int(position.item()))]


def _place(sequence: list[Array], position: int) -> int:
    size = len(sequence)
    if not -size <= position < size:
        raise IndexError(f"the position in a sequence of {size} must lie in [-{size}, {size}), found {position}")
    return position % size


@kernels.register("SequenceLength", versions=(11, None))
def sequence_length(node: NodeContext) -> Run:
    """The number of tensors in a sequence -> [] int64."""
    return lambda sequence: np.array(len(sequence), np.int64)


@kernels.register("ConcatFromSequence", versions=(11, None))
def concat_from_sequence(node: NodeContext) -> Run:
    """All tensors of a sequence one after the other along an axis, or side by side along a new one."""
    axis, join = node.attribute("axis"), np.stack if node.attribute("new_axis", 0) else np.concatenate
    return lambda sequence: join(sequence, axis)


@kernels.register("SplitToSequence", versions=(11, None), view_of=0)
def split_to_sequence(node: NodeContext) -> Run:
    """A sequence of parts of x along an axis: of the sizes given, or of one size (the last one smaller), or single elements.

    x: [..., N, ...]; split: [number of parts] or [] int, or absent for 1, and then without the axis if not `keepdims`
    """
    axis, keepdims = node.attribute("axis", 0), bool(node.attribute("keepdims", 1))

    def run(x: Array, split: Array | None = None) -> list[Array]:
        place = normalize_axis(axis, x.ndim)
        length, before = x.shape[place], _whole_axes(place)
        if split is None and not keepdims:
            return [x[(*before, index, ...)] for index in range(length)]
        if split is None or split.ndim == 0:
            size = 1 if split is None else int(split.item())
            ends = [*range(size, length, size), length] if length else []
        else:
            ends = np.cumsum(split).tolist()
            if (ends[-1] if ends else 0) != length or (split < 0).any():
                raise ValueError(f"the parts of a SplitToSequence must add up to the size of its axis: {split.tolist()} for {length}")
        return [x[(*before, slice(start, end))] for start, end in zip([0, *ends], ends, strict=False)]

    return run


def _whole_axes(count: int) -> tuple[Any, ...]:
    return (slice(None),) * count


@kernels.register("SequenceMap", versions=(17, None))
def sequence_map(node: NodeContext) -> Run:
    """A graph run for each tensor of a sequence: body(tensors of every sequence at one place, other inputs as they are) -> tensors.

    first: a sequence; others: sequences of the same length, or tensors -> a sequence of each of the graph's outputs
    """
    body = node.subgraph("body")

    def run(scope: Any, first: list[Any], *others: Any) -> tuple[list[Any], ...]:
        for other in others:
            if isinstance(other, list) and len(other) != len(first):
                raise ValueError(f"SequenceMap's sequences must have one length, found {len(first)} and {len(other)}")
        results = [
            body(scope, first[index], *(other[index] if isinstance(other, list) else other for other in others))
            for index in range(len(first))
        ]
        return tuple([result[place] for result in results] for place in range(len(body.outputs)))

    return run
