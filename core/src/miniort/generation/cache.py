"""The KV cache: what a layout plugin has to offer, and what it's told about the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from miniort.types import Array, DType, IntArray

View: TypeAlias = Any
"""Keys or values of one layer, of the logical shape [batch, kv heads, time, head dim]."""


@dataclass(frozen=True)
class CacheSpec:
    """The shape of a model's cache: what a layout needs to know when it's made.

    `head_dim` is the size of a key, `value_head_dim` of a value (nearly always the same).
    `capacity` is the most tokens that the cache will hold, None where the model sets no limit.
    """

    layers: int
    batch: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: DType
    capacity: int | None = None

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

        Returns all keys and values of that layer, [batch, kv heads, kept + new, head dim], oldest first; they stay valid until the next
        append, crop or reorder. Appending again to one layer before `commit` replaces what was appended. `new` may be 0.
        """

    def commit(self, count: int) -> None:
        """Keep the first `count` of the appended tokens. CacheError if some layer was not appended that many."""

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens. CacheError outside `min_length` … `length`."""

    def reorder(self, rows: IntArray) -> None:
        """Make row i what row `rows[i]` was; rows may repeat, and the batch becomes as long as `rows`."""

    def fork(self) -> KVCache:
        """A second cache with the same history. Neither sees what happens to the other from here on."""

    def positions(self) -> IntArray:
        """Time index of each token that is kept, [kept], oldest first: 0 … length-1 unless the layout let go of some."""

    @property
    def nbytes(self) -> int:
        """Bytes that the committed tokens take, by what is really stored."""


@dataclass(frozen=True)
class CacheLayoutInfo:
    """A cache layout that a plugin offers. `create(spec, **options)` makes an empty cache."""

    name: str
    create: Callable[..., KVCache]
    summary: str = ""
