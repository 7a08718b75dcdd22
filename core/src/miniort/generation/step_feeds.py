"""What the graph of a step is fed, and what is taken out of its presents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from miniort.generation.binding import GraphBinding
from miniort.generation.cache import KVCache, ReservedTokens, View
from miniort.generation.cache_axes import Axes
from miniort.generation.fused_attention import POSITIONS_INPUT, visible_input
from miniort.generation.join import CACHE_INPUT, PAST_SHAPE_INPUT, Join
from miniort.types import Array, DType, IntArray


@dataclass(frozen=True, eq=False)
class Step:
    """The new tokens of a step, and what they follow.

    tokens, positions: [batch, new]; mask: [batch, kept + new], 0 for padding; places: [kept + new], the time index of each token, which
    skips those that the cache has let go of. `every_logit`: the logits of all new tokens are wanted, not the last's alone.
    """

    tokens: IntArray
    positions: IntArray
    mask: IntArray
    places: IntArray
    every_logit: bool

    @property
    def kept(self) -> int:
        """How many tokens the cache holds."""
        kept: int = len(self.places) - self.tokens.shape[1]
        return kept

    def within(self, size: int) -> Step:
        """The same step of one token as though `size` tokens were there: those behind the new one are hidden, as padding is.

        The last of them stands in for the new one, so it has its place in time.
        """
        mask = np.zeros((len(self.mask), size), self.mask.dtype)
        mask[:, : self.mask.shape[1]] = self.mask
        return replace(self, mask=mask, places=np.append(np.arange(size - 1), self.places[-1]))

    def visible(self, window: int = 0) -> Array:
        """Which keys each new token may see: none after its own, no padding, and only the last `window` unless that's 0.

        [batch, 1, new, kept + new] bool.
        """
        own = self.places[self.kept :, None]
        seen = self.places <= own
        if window:
            seen &= self.places > own - window
        visible: Array = (self.mask != 0)[:, None, None, :] & seen
        return visible


def step_feeds(
    binding: GraphBinding, join: Join, step: Step, cache: KVCache | ReservedTokens, past_shape: tuple[int, int, int, int]
) -> dict[str, Any]:
    """The feeds of one run by name, apart from a past that isn't joined. past_shape: [batch, kv heads, kept, head dim]."""
    feeds: dict[str, Any] = {binding.tokens: _integers(binding, binding.tokens, step.tokens)}
    if binding.mask is not None:
        feeds[binding.mask] = _mask(binding, binding.mask, step)
    if binding.positions is not None:
        feeds[binding.positions] = _positions(binding, binding.positions, step)
    for name, role in binding.extra.items():
        values = np.asarray(_extra(role, step))
        rank = len(binding.shapes.get(name) or values.shape)
        feeds[name] = _integers(binding, name, values.reshape(-1) if rank == 1 else values.reshape(()) if rank == 0 else values)
    if join.wants_positions:
        feeds[POSITIONS_INPUT] = np.ascontiguousarray(step.positions, np.int64)
    for window in join.windows:
        feeds[visible_input(window)] = step.visible(window)
    if join.wants_past_shape:
        feeds[PAST_SHAPE_INPUT] = np.array(past_shape, np.int64)
    if join.appends:
        feeds[CACHE_INPUT] = cache
    return feeds


def past_feeds(binding: GraphBinding, pasts: Sequence[tuple[View, View]]) -> dict[str, Any]:
    """A past that isn't joined, as the graph stores it. pasts: by layer keys and values [batch, kv heads, kept, head dim]."""
    feeds: dict[str, Any] = {}
    for layer, names in enumerate(binding.past):
        key, value = (_stored(part, axes) for part, axes in zip(pasts[layer], (binding.axes.key, binding.axes.value), strict=True))
        if names.packed:
            feeds[names.key] = np.stack([key, value])
        else:
            feeds[names.key], feeds[names.value] = key, value
    return feeds


def cache_parts(binding: GraphBinding, outputs: dict[str, Any], new: int, dtype: DType) -> Iterator[tuple[Array, Array]]:
    """What the presents hold of the `new` last tokens, layer by layer: keys and values [batch, kv heads, new, head dim].

    Copies, because a view would keep the whole present alive, history and all; so each present is taken out of `outputs`.
    """
    for names in binding.present:
        both = outputs.pop(names.key) if names.packed else (outputs.pop(names.key), outputs.pop(names.value))
        key, value = (
            np.array(np.transpose(part, axes)[:, :, -new:], dtype)
            for part, axes in zip(both, (binding.axes.key, binding.axes.value), strict=True)
        )
        del both
        yield key, value


def _stored(part: View, axes: Axes) -> Array:
    """[batch, kv heads, time, head dim] with its axes where a graph has them: axis `axes[i]` is logical axis i."""
    return np.transpose(np.asarray(part), [axes.index(axis) for axis in range(4)])


def _integers(binding: GraphBinding, name: str, values: Any) -> Array:
    return np.ascontiguousarray(values, binding.dtypes[name]).reshape(np.shape(values))


def _mask(binding: GraphBinding, name: str, step: Step) -> Array:
    """[batch, time]; or where the graph wants it so, [batch, 1, new, time] with causality in it, to select by or to add to the scores."""
    dtype, shape = binding.dtypes[name], binding.shapes.get(name)
    if shape is None or len(shape) != 4:
        return _integers(binding, name, step.mask)
    visible = step.visible()
    if dtype.kind in "biu":
        return visible.astype(dtype)
    lowest = np.array(-3e38 if dtype.name in ("bfloat16", "float32", "float64") else -65504, dtype)
    return np.where(visible, np.zeros((), dtype), lowest)


def _positions(binding: GraphBinding, name: str, step: Step) -> Array:
    """[batch, new]; [new] for a graph of one row; or [n, batch, new], the same on each axis, where positions are those of points."""
    shape = binding.shapes.get(name)
    if shape is not None and len(shape) == 1:
        return _integers(binding, name, step.positions[0])
    if shape is not None and len(shape) == 3 and isinstance(shape[0], int):
        return _integers(binding, name, np.broadcast_to(step.positions, (shape[0], *step.positions.shape)))
    return _integers(binding, name, step.positions)


def _extra(role: str, step: Step) -> Any:
    batch, new = step.tokens.shape
    if role == "use_cache_branch":
        return [step.kept > 0]
    if role == "cache_position":
        return np.arange(step.kept, step.kept + new)
    if role == "token_type_ids":
        return np.zeros_like(step.tokens)
    if role == "seqlens_k":
        return np.full(batch, step.kept + new - 1)
    if role == "total_sequence_length":
        return [step.kept + new]
    if role == "past_sequence_length":
        return [step.kept]
    return [0 if step.every_logit else 1]  # num_logits_to_keep: the last position's, or all that there are
