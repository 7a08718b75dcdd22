"""What the caches on a device have in common: its memory, and how keys and values get there from wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from miniort.errors import CacheError
from miniort.generation.cache import CacheSpec
from miniort.types import Array, IntArray, format_shape
from miniort_cuda.bfloat16 import BFloat16Array
from miniort_cuda.element_types import BFLOAT16


class DeviceMemory(Protocol):
    """What a cache needs of its provider."""

    xp: Any

    def current_device(self) -> AbstractContextManager[Any]:
        """The device as the thread's current one."""

    def upload(self, array: Array) -> Any:
        """A copy of a host array on the device."""

    def download(self, array: Any) -> Array:
        """A copy of a device array on the host."""


class DeviceCache:
    """The part of a cache that doesn't depend on how it's laid out. Layouts store bfloat16 as its bits, which `raw` and `typed` see to.

    `append` gives arrays of the kind that it's given: device arrays to a kernel, host arrays to whoever looks at a cache from outside.
    """

    min_length = 0

    def __init__(self, memory: DeviceMemory, spec: CacheSpec) -> None:
        self.length = 0
        self.memory = memory
        self.spec = spec
        self.batch = spec.batch
        self.stored_dtype = np.dtype(np.uint16) if spec.dtype == BFLOAT16 else spec.dtype
        self.appended = [0] * spec.layers

    def append(self, layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        """Add new tokens to one layer, [batch, kv heads, new, dim]; gives all of its keys and values. See `KVCache.append`."""
        new = self._checked(layer, key, value)
        on_host = isinstance(key, np.ndarray)
        with self.memory.current_device():
            if on_host:
                key, value = self.memory.upload(key), self.memory.upload(value)
            keys, values = (self._typed(each) for each in self.write(layer, self._raw(key), self._raw(value), new))
        self.appended[layer] = new
        return (self.memory.download(keys), self.memory.download(values)) if on_host else (keys, values)

    def write(self, layer: int, key: Any, value: Any, new: int) -> tuple[Any, Any]:
        """Store new tokens behind the committed ones, and give all. A layout's own affair."""
        raise NotImplementedError

    def _raw(self, x: Any) -> Any:
        return x.bits if isinstance(x, BFloat16Array) else x

    def _typed(self, x: Any) -> Any:
        return BFloat16Array(x) if self.spec.dtype == BFLOAT16 else x

    def _checked(self, layer: int, key: Any, value: Any) -> int:
        """How many tokens are appended. CacheError for what doesn't fit."""
        spec = self.spec
        if not 0 <= layer < spec.layers:
            raise CacheError(f"the cache has layers 0 to {spec.layers - 1}, found layer {layer}")
        for noun, dim, each in (("key", spec.head_dim, key), ("value", spec.value_head_dim, value)):
            if each.ndim != 4 or (self.batch, spec.kv_heads, dim) != (*each.shape[:2], each.shape[3]) or each.dtype != spec.dtype:
                wanted = format_shape((self.batch, spec.kv_heads, "new", dim))
                raise CacheError(f"layer {layer}: the cache takes a {noun} of {spec.dtype} {wanted}, found {each.dtype} {list(each.shape)}")
        new: int = key.shape[2]
        if value.shape[2] != new:
            raise CacheError(f"layer {layer}: key and value must have as many tokens, found {new} and {value.shape[2]}")
        limit = self.limit()
        if limit is not None and self.length + new > limit:
            raise CacheError(
                f"the cache holds {limit} tokens at most: {self.length} are in it, and {new} more don't fit; "
                "generate fewer tokens or shorten the prompt"
            )
        return new

    def limit(self) -> int | None:
        """The most tokens it holds, None for no limit."""
        return self.spec.capacity

    def commit(self, count: int) -> None:
        """Keep the first `count` of the appended tokens. CacheError if some layer was not appended that many."""
        if count < 0:
            raise CacheError(f"commit needs 0 tokens or more, found {count}")
        for layer, new in enumerate(self.appended):
            if new < count:
                raise CacheError(f"commit of {count} tokens: layer {layer} was appended only {new}")
        self.keep(self.length + count)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, and what was appended and not committed."""
        if not 0 <= length <= self.length:
            raise CacheError(f"crop needs a length from 0 to {self.length}, found {length}")
        self.keep(length)

    def keep(self, length: int) -> None:
        """Make the first `length` tokens the committed ones."""
        self.length = length
        self.appended = [0] * self.spec.layers

    def checked_rows(self, rows: IntArray) -> IntArray:
        """The rows of a reorder. CacheError for what isn't a list of rows that are there."""
        rows = np.asarray(rows)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or ((rows < 0) | (rows >= self.batch)).any():
            raise CacheError(f"reorder needs a list of rows from 0 to {self.batch - 1}, found {np.array2string(rows, threshold=8)}")
        return rows

    def positions(self) -> IntArray:
        """0 … length-1: no token is ever let go."""
        return np.arange(self.length, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the committed tokens' keys and values."""
        return self.length * self.spec.bytes_per_token() // self.spec.batch * self.batch

    def empty(self, shape: Sequence[int]) -> Any:
        """Memory for keys or values, its contents undefined."""
        return self.memory.xp.empty(tuple(shape), self.stored_dtype)


def copied(cache: DeviceCache) -> Any:
    """A second object of the same class with the same fields, nothing appended."""
    other = object.__new__(type(cache))
    other.__dict__.update(cache.__dict__)
    other.appended = [0] * cache.spec.layers
    return other
