"""Random inputs for a decoder's graphs that mean something: tokens of its vocabulary, a mask and positions that fit, and a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from miniort.errors import BindingError, InputError
from miniort.generation.binding import DecoderBinding, GraphBinding, bind_decoder
from miniort.model.constants import shape_of
from miniort.runtime.random_feeds import random_array
from miniort.types import Array


@dataclass(frozen=True)
class StepSizes:
    """Of one step of a decoder: rows, new tokens of each, and how many are in the cache."""

    batch: int = 1
    tokens: int = 5
    past: int = 7


def decoder_sizes(sizes: Mapping[str, int]) -> StepSizes:
    """Sizes by name. InputError for another name, or for a size that a step can't have."""
    known = StepSizes()
    for name, size in sizes.items():
        least = 0 if name == "past" else 1
        if not hasattr(known, name):
            raise InputError(f"a decoder has no size named {name!r}; its sizes: batch, tokens, past")
        if size < least:
            raise InputError(f"the size {name!r} must be at least {least}, found {size}")
    return StepSizes(**sizes)


def decoder_feeds(graphs: Sequence[ir.Graph], sizes: StepSizes, seed: int) -> list[dict[str, Array]] | None:
    """Feeds for each graph of a decoder (one with a past, or prefill and decode). None where they aren't a decoder's graphs with a cache.

    The cache is of normal numbers. No row is padded; positions count from 0.
    """
    try:
        binding = bind_decoder(graphs)
    except BindingError:
        return None
    rng = np.random.default_rng(seed)
    bound = [binding.decode] if binding.prefill is None else [binding.prefill, binding.decode]
    return [_feeds(graph, each, binding, sizes, rng) for graph, each in zip(graphs, bound, strict=True)]


def _feeds(graph: ir.Graph, binding: GraphBinding, decoder: DecoderBinding, sizes: StepSizes, rng: np.random.Generator) -> dict[str, Array]:
    past = sizes.past if binding.past else 0
    total = past + sizes.tokens
    vocabulary = _vocabulary(graph, binding)

    def integers(name: str, values: Any) -> Array:
        return np.ascontiguousarray(values, binding.dtypes[name])

    feeds = {binding.tokens: integers(binding.tokens, rng.integers(0, vocabulary, (sizes.batch, sizes.tokens)))}
    if binding.mask is not None:
        feeds[binding.mask] = integers(binding.mask, np.ones((sizes.batch, total)))
    if binding.positions is not None:
        feeds[binding.positions] = integers(binding.positions, np.tile(np.arange(past, total), (sizes.batch, 1)))
    for name in binding.extra:
        feeds[name] = integers(name, _extra(name, sizes, past))
    for layer in binding.past:
        key = (sizes.batch, decoder.kv_heads, past, decoder.head_dim)
        value = (sizes.batch, decoder.kv_heads, past, decoder.value_head_dim)
        if layer.packed:
            feeds[layer.key] = random_array(decoder.dtype, (2, *key), rng)
        else:
            feeds[layer.key], feeds[layer.value] = random_array(decoder.dtype, key, rng), random_array(decoder.dtype, value, rng)
    return feeds


def _vocabulary(graph: ir.Graph, binding: GraphBinding) -> int:
    """The size of the logits, 2 where the graph doesn't say."""
    (logits,) = [value for value in graph.outputs if value.name == binding.logits]
    shape = shape_of(logits)
    size = shape[-1] if shape else None
    return size if isinstance(size, int) else 2


def _extra(name: str, sizes: StepSizes, past: int) -> Any:
    if name == "use_cache_branch":
        return [past > 0]
    if name == "cache_position":
        return np.arange(past, past + sizes.tokens)
    if name == "token_type_ids":
        return np.zeros((sizes.batch, sizes.tokens))
    return 1  # num_logits_to_keep: the last position's
