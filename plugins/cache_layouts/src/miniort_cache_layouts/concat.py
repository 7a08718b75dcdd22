"""The plainest layouts: each step makes new arrays out of the old ones and the new tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniort.generation.cache import CacheSpec
from miniort.types import Array, IntArray
from miniort_cache_layouts.arguments import append_error, check_commit, check_crop, checked_rows

BHTD = (0, 1, 2, 3)
BTHD = (0, 2, 1, 3)
"""Orders of axes: where each axis of the stored array is in [batch, kv heads, time, head dim]. Both are their own inverse."""


class ConcatCache:
    """One array of keys and one of values for each layer, with the axes in the order that `axes` names.

    An array is never written once it's made: append, commit, crop and reorder put another in its place. So forks may share arrays, and
    neither sees what happens to the other. A crop, and a commit of fewer tokens than were appended, keep a view; the memory behind it
    goes at the next step.
    """

    min_length = 0

    def __init__(self, spec: CacheSpec, axes: tuple[int, int, int, int]) -> None:
        empty = [np.empty((spec.batch, spec.kv_heads, 0, dim), spec.dtype).transpose(axes) for dim in (spec.head_dim, spec.value_head_dim)]
        self.length = 0
        self._spec = spec
        self._axes = axes
        self._time = axes.index(2)
        self._keys: Sequence[Array] = [empty[0]] * spec.layers
        self._values: Sequence[Array] = [empty[1]] * spec.layers
        self._discard_appended()

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        """Old, then new: key [batch, kv heads, new, head dim] -> [batch, kv heads, length + new, head dim], and so for the value.

        CacheError for tokens of another shape or dtype than the cache's, or past its capacity.
        """
        axes, time, spec = self._axes, self._time, self._spec
        # NumPy itself checks shapes and dtypes here; only a refusal costs more than the copy.
        try:
            keys = np.concatenate((self._keys[layer], key.transpose(axes)), axis=time, dtype=spec.dtype, casting="no")
            values = np.concatenate((self._values[layer], value.transpose(axes)), axis=time, dtype=spec.dtype, casting="no")
        except (IndexError, TypeError, ValueError):
            raise self._misfit(layer, key, value) from None
        length = keys.shape[time]
        if length != values.shape[time] or (spec.capacity is not None and length > spec.capacity) or layer < 0:
            raise self._misfit(layer, key, value)
        self._appended[layer] = keys, values
        return keys.transpose(axes), values.transpose(axes)

    def commit(self, count: int) -> None:
        """Keep the first `count` of the appended tokens. CacheError if some layer was not appended that many."""
        check_commit(count, [0 if pair is None else pair[0].shape[self._time] - self.length for pair in self._appended])
        if count:
            appended = [pair for pair in self._appended if pair is not None]
            self._keep([keys for keys, _ in appended], [values for _, values in appended], self.length + count)
        self._discard_appended()

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, and what was appended and not committed. CacheError outside 0 … `self.length`."""
        check_crop(length, 0, self.length)
        self._keep(self._keys, self._values, length)
        self._discard_appended()

    def reorder(self, rows: IntArray) -> None:
        """Make row i what row `rows[i]` was; what was appended and not committed is dropped. CacheError for a row that isn't there."""
        rows = checked_rows(rows, self._batch)
        self._keys = [keys[rows] for keys in self._keys]
        self._values = [values[rows] for values in self._values]
        self._discard_appended()

    def fork(self) -> ConcatCache:
        """A second cache with the same committed tokens, which shares their arrays: nobody writes them."""
        other = object.__new__(ConcatCache)
        other.__dict__.update(self.__dict__)
        other._discard_appended()
        return other

    def positions(self) -> IntArray:
        """0 … length-1: no token is ever let go."""
        return np.arange(self.length, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the committed tokens' keys and values."""
        return sum(array.nbytes for array in (*self._keys, *self._values))

    @property
    def _batch(self) -> int:
        batch: int = self._keys[0].shape[0]
        return batch

    def _keep(self, keys: Sequence[Array], values: Sequence[Array], length: int) -> None:
        """Make the first `length` tokens of these the committed ones."""
        first = (slice(None),) * self._time + (slice(length),)
        self._keys = [array[first] for array in keys]
        self._values = [array[first] for array in values]
        self.length = length

    def _discard_appended(self) -> None:
        self._appended: list[tuple[Array, Array] | None] = [None] * len(self._keys)

    def _misfit(self, layer: int, key: Array, value: Array) -> Exception:
        return append_error(self._spec, self._batch, self._spec.capacity, self.length, layer, key, value)


def concat_bhtd(spec: CacheSpec) -> ConcatCache:
    """Stored [batch, kv heads, time, head dim]: a head's tokens stand one behind the other."""
    return ConcatCache(spec, BHTD)


def concat_bthd(spec: CacheSpec) -> ConcatCache:
    """Stored [batch, time, kv heads, head dim]: new tokens stand behind the old ones."""
    return ConcatCache(spec, BTHD)
