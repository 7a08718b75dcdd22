"""The KV cache: what a layout plugin has to offer, and what it's told about the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from miniort.types import Array, DType, IntArray


class Block(NamedTuple):
    """Some rows' keys or values of consecutive tokens, of which the first is token `start` of the view.

    tokens: [rows, kv heads, count, dim], or [1, kv heads, count, dim] where all of these rows share them.
    """

    rows: slice
    start: int
    tokens: Array


class BlockedView:
    """Keys or values of one layer in blocks, for a layout that doesn't store them as one array.

    shape: [batch, kv heads, time, dim]. blocks: every row's every token in just one of them; they may be walked several times, and may be
    made while they're walked. `np.asarray(view)` makes one array of them, for whoever can't read blocks.
    """

    __slots__ = ("blocks", "dtype", "shape")

    ndim = 4

    def __init__(self, shape: Sequence[int], dtype: DType, blocks: Iterable[Block]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.blocks = blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the array that it stands for."""
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: DType | None = None, copy: bool | None = None) -> Array:
        """One array of all blocks, always a new one. ValueError where NumPy was told not to copy."""
        if copy is False:
            raise ValueError("a view in blocks can't be one array without a copy")
        array = np.empty(self.shape, self.dtype if dtype is None else dtype)
        for rows, start, tokens in self.blocks:
            array[rows, :, start : start + tokens.shape[2]] = tokens
        return array


View: TypeAlias = Array | BlockedView
"""Keys or values of one layer, of the logical shape [batch, kv heads, time, head dim]."""


@dataclass(frozen=True)
class CacheSpec:
    """The shape of a model's cache: what a layout needs to know when it's made.

    `head_dim` is the size of a key, `value_head_dim` of a value (nearly always the same).
    `capacity` is the most tokens that the cache will hold, None where the model sets no limit.
    `allocate(shape, dtype)` gives an array with undefined contents: a decoder's takes over the memory of its caches that are gone, which
    the system needn't clear again.
    """

    layers: int
    batch: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: DType
    capacity: int | None = None
    allocate: Callable[[Sequence[int], DType], Array] = field(default=np.empty, compare=False, repr=False)

    def bytes_per_token(self) -> int:
        """Bytes that one token of every row takes: 2·layers·kv_heads·head_dim·batch·itemsize where keys and values are of one size."""
        return self.layers * self.kv_heads * (self.head_dim + self.value_head_dim) * self.batch * self.dtype.itemsize


@runtime_checkable
class KVCache(Protocol):
    """The keys and values of all tokens so far, for every layer.

    A step appends the new tokens to each layer, then commits. What was appended and not committed is gone at the next append, so a step
    that failed or was abandoned leaves nothing behind.
    """

    length: int
    """Committed tokens, padding included: the only offset there is."""

    min_length: int
    """The shortest length that `crop` can still reach; more than 0 where a layout has let go of old tokens."""

    def append(self, layer: int, key: Array, value: Array) -> tuple[View, View]:
        """Add new tokens to one layer, [batch, kv heads, new, head dim], behind the committed ones.

        Returns all keys and values of that layer, [batch, kv heads, kept + new, head dim], oldest first, as arrays or in blocks; they stay
        valid until the next append to the same layer, crop or reorder. Appending again to one layer before `commit` replaces what was
        appended. `new` may be 0.
        CacheError for a layer, shape or element type that isn't the spec's, and, here or in `commit`, past the capacity.
        """

    def commit(self, count: int) -> None:
        """Keep the first `count` of the appended tokens. CacheError if some layer was not appended that many."""

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens; what was appended and not committed goes too. It keeps what it kept at that length.

        CacheError outside `min_length` … `length`.
        """

    def reorder(self, rows: IntArray) -> None:
        """Make row i what row `rows[i]` was; rows may repeat, and the batch becomes as long as `rows`.

        Drops what was appended and not committed. CacheError for a row outside of the batch.
        """

    def fork(self) -> KVCache:
        """A second cache with the same committed history. Neither sees what happens to the other from here on."""

    def positions(self) -> IntArray:
        """Time index of each token that is kept, [kept], oldest first: 0 … length-1 unless the layout let go of some.

        The newest token is always kept.
        """

    @property
    def nbytes(self) -> int:
        """Bytes that the committed tokens take, by what is really stored."""


class ReservedTokens(Protocol):
    """A cache as a step sees it that is recorded once for all lengths: of a fixed size, its last tokens not written yet."""

    size: int
    """How many tokens `append` gives, whatever the cache's length."""

    def clear(self, start: int) -> None:
        """Make what lies behind the first `start` tokens zeros: a weight of 0 hides a number only if it's finite."""

    def write_at(self, place: Any) -> None:
        """Say where appended tokens go: `place` is [1] int64 on the device, and may hold another number in each replay."""

    def append(self, layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        """Write one new token of a layer, [batch, kv heads, 1, head dim], and give [batch, kv heads, size, head dim] of keys and values."""


@runtime_checkable
class ReservesTokens(Protocol):
    """What a cache on a device offers besides where steps that append to it can be recorded (`miniort.providers.RecordsRuns`)."""

    def reserved(self) -> ReservedTokens | None:
        """The cache at a size with room for two more tokens, None if that's too many; the same object while memory and size stay."""

    def note_replay(self) -> None:
        """Take one token of every layer as appended: the device has written them."""


def reserved_size(length: int, room: int, step: int) -> int | None:
    """For how many tokens a cache of that length is recorded: `step` doubled as often as needed, so that little is looked at in vain.

    There's room for two more tokens: with room for one alone a step at that size is the ordinary step, and nothing could be told by
    comparing them. room: tokens that the buffers hold; None if two more are too many.
    """
    needed = length + 2
    if needed > room:
        return None
    while step < needed:
        step *= 2
    return min(step, room)


@dataclass(frozen=True)
class CacheLayoutInfo:
    """A cache layout that a plugin offers. `create(spec, **options)` makes an empty cache.

    `lets_go` says that it may let go of old tokens: a model that counts positions by what is kept can't be given it.
    `relative_error`: how far a kept number may lie from the one that was appended, as a share of the largest magnitude in its head; 0 for a
    layout that keeps numbers as they are.
    """

    name: str
    create: Callable[..., KVCache]
    summary: str = ""
    lets_go: bool = False
    relative_error: float = 0.0


def layer_contents(cache: KVCache, spec: CacheSpec, layer: int) -> tuple[View, View]:
    """All committed keys and values of one layer, [batch, kv heads, kept, head dim]: what appending no token gives."""
    key, value = (np.empty((spec.batch, spec.kv_heads, 0, dim), spec.dtype) for dim in (spec.head_dim, spec.value_head_dim))
    return cache.append(layer, key, value)
