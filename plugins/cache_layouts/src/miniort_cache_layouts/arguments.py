"""What a layout is asked, checked: the same errors whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniort.errors import CacheError, PluginError
from miniort.generation.cache import CacheSpec
from miniort.types import Array, IntArray, format_shape


def require_positive(layout: str, **options: int | None) -> None:
    """PluginError for an option that is neither left out (None) nor at least 1."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise PluginError(f"cache layout {layout!r}: {name} must be at least 1, found {value}")


def check_append(spec: CacheSpec, batch: int, limit: int | None, length: int, layer: int, key: Array, value: Array) -> int:
    """How many tokens are appended. CacheError for a layer, shape or dtype that isn't the spec's, or for more than `limit` tokens."""
    new = key.shape[2] if key.ndim == 4 else -1
    fits = (
        key.shape == (batch, spec.kv_heads, new, spec.head_dim)
        and value.shape == (batch, spec.kv_heads, new, spec.value_head_dim)
        and key.dtype == spec.dtype == value.dtype
        and 0 <= layer < spec.layers
        and (limit is None or length + new <= limit)
    )
    if not fits:
        raise append_error(spec, batch, limit, length, layer, key, value)
    return new


def append_error(spec: CacheSpec, batch: int, limit: int | None, length: int, layer: int, key: Array, value: Array) -> CacheError:
    """What is wrong with an append, on one line."""
    if not 0 <= layer < spec.layers:
        return CacheError(f"the cache has layers 0 to {spec.layers - 1}, found layer {layer}")
    for noun, dim, new in (("key", spec.head_dim, key), ("value", spec.value_head_dim, value)):
        fits = new.ndim == 4 and (batch, spec.kv_heads, dim) == (*new.shape[:2], new.shape[3])
        if not fits or new.dtype != spec.dtype:
            return CacheError(
                f"layer {layer}: the cache takes a {noun} of {spec.dtype} {format_shape((batch, spec.kv_heads, 'new', dim))}, "
                f"found {new.dtype} {format_shape(new.shape)}"
            )
    if key.shape[2] != value.shape[2]:
        return CacheError(f"layer {layer}: key and value must have as many tokens, found {key.shape[2]} and {value.shape[2]}")
    return CacheError(
        f"the cache holds {limit} tokens at most: {length} are in it, and {key.shape[2]} more don't fit; "
        "generate fewer tokens or shorten the prompt"
    )


def check_commit(count: int, appended: Sequence[int]) -> None:
    """CacheError if fewer than `count` tokens were appended to some layer. appended: how many that were, by layer."""
    if count < 0:
        raise CacheError(f"commit needs 0 tokens or more, found {count}")
    for layer, new in enumerate(appended):
        if new < count:
            raise CacheError(f"commit of {count} tokens: layer {layer} was appended only {new}")


def check_crop(length: int, shortest: int, longest: int) -> None:
    """CacheError for a length that can't be reached."""
    if not shortest <= length <= longest:
        lost = "" if shortest == 0 else ": older tokens are gone"
        raise CacheError(f"crop needs a length from {shortest} to {longest}, found {length}{lost}")


def checked_rows(rows: IntArray, batch: int) -> IntArray:
    """The rows of a reorder. CacheError for what isn't a list of rows that are there."""
    rows = np.asarray(rows)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or ((rows < 0) | (rows >= batch)).any():
        raise CacheError(f"reorder needs a list of rows from 0 to {batch - 1}, found {np.array2string(rows, threshold=8)}")
    return rows
