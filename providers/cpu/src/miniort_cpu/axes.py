"""Axes as ONNX gives them: counted from either end, in an attribute or in an input."""

from __future__ import annotations

from collections.abc import Iterable

from miniort.types import Array


def normalize_axis(axis: int, rank: int) -> int:
    """An axis counted from the front. IndexError if it's outside [-rank, rank)."""
    if not -rank <= axis < rank:
        raise IndexError(f"axis {axis} is outside [-{rank}, {rank}) for a tensor of rank {rank}")
    return axis + rank if axis < 0 else axis


def normalize_axes(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Axes counted from the front, in the order given. IndexError if one is outside [-rank, rank)."""
    return tuple(normalize_axis(axis, rank) for axis in axes)


def as_ints(values: Array | None) -> tuple[int, ...] | None:
    """The elements of an integer input as ints; None for an absent one. A scalar counts as one element."""
    return None if values is None else tuple(values.ravel().tolist())
