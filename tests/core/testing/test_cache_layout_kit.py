"""The kit for cache layouts catches layouts that are wrong, each in one way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from miniort.errors import CacheError
from miniort.generation.cache import CacheSpec, KVCache
from miniort.testing import cache_layout_machine
from miniort.testing.cache_layouts import QUICK, THOROUGH
from miniort.types import Array, IntArray


class PlainCache:
    """A right layout, made so that its parts can be got wrong: buffers [batch, heads, capacity, dim] that are written in place."""

    min_length = 0

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.length = 0
        shape = (spec.batch, spec.kv_heads, 0)
        self.arrays = [[np.empty((*shape, dim), spec.dtype) for dim in (spec.head_dim, spec.value_head_dim)] for _ in range(spec.layers)]
        self.appended = [0] * spec.layers

    def join(self, old: Array, new: Array) -> Array:
        return np.concatenate((old, new), axis=2)

    def committed(self, array: Array) -> Array:
        return array[:, :, : self.length]

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        if self.spec.capacity is not None and self.length + key.shape[2] > self.spec.capacity:
            raise CacheError("full")
        both = [self.join(self.committed(old), new) for old, new in zip(self.arrays[layer], (key, value), strict=True)]
        self.arrays[layer] = both
        self.appended[layer] = key.shape[2]
        return both[0], both[1]

    def commit(self, count: int) -> None:
        if not 0 <= count <= min(self.appended):
            raise CacheError("too many")
        self.length += count
        self.appended = [0] * self.spec.layers

    def crop(self, length: int) -> None:
        if not self.min_length <= length <= self.length:
            raise CacheError("out of reach")
        self.length = length
        self.appended = [0] * self.spec.layers

    def reorder(self, rows: IntArray) -> None:
        if (rows < 0).any() or (rows >= len(self.arrays[0][0])).any():
            raise CacheError("no such row")
        self.arrays = [[array[rows] for array in pair] for pair in self.arrays]
        self.appended = [0] * self.spec.layers

    def fork(self) -> KVCache:
        other = copy.copy(self)
        other.arrays = [list(pair) for pair in self.arrays]
        other.appended = [0] * self.spec.layers
        return other

    def positions(self) -> IntArray:
        return np.arange(self.length)

    @property
    def nbytes(self) -> int:
        return sum(self.committed(array).nbytes for pair in self.arrays for array in pair)


class Reversed(PlainCache):
    """New tokens in front of the old ones."""

    def join(self, old: Array, new: Array) -> Array:
        return np.concatenate((new, old), axis=2)


class SwapsSeveral(PlainCache):
    """Right for single tokens; several over a cache that isn't empty go in front."""

    def join(self, old: Array, new: Array) -> Array:
        several = new.shape[2] > 1 and old.shape[2] > 0
        return np.concatenate((new, old) if several else (old, new), axis=2)


class CropLowersTheOffsetOnly(PlainCache):
    """The tokens that a crop dropped come back at the next append."""

    hidden = 0

    def committed(self, array: Array) -> Array:
        return array[:, :, : self.length + self.hidden]

    def crop(self, length: int) -> None:
        dropped = self.length - length
        super().crop(length)
        self.hidden += dropped


class CropLeavesAppended(PlainCache):
    """What was appended can still be committed after a crop."""

    def crop(self, length: int) -> None:
        appended = self.appended
        super().crop(length)
        self.appended = appended


class CropTakesAnyLength(PlainCache):
    """A crop to more than there is is taken for one to all there is."""

    def crop(self, length: int) -> None:
        super().crop(min(max(length, 0), self.length))


class AbandonedTokensLeak(PlainCache):
    """Appending again before a commit adds, where it should replace."""

    def committed(self, array: Array) -> Array:
        return array


class PartialCommitKeepsAll(PlainCache):
    """A commit keeps whatever was appended."""

    def commit(self, count: int) -> None:
        super().commit(count)
        self.length = self.arrays[0][0].shape[2]


class CommitTakesAnyCount(PlainCache):
    """A commit of more than was appended moves the offset."""

    def commit(self, count: int) -> None:
        self.length += max(count, 0)
        self.appended = [0] * self.spec.layers


class CommitLooksAtOneLayer(PlainCache):
    """A commit is accepted when the first layer was appended to."""

    def commit(self, count: int) -> None:
        self.appended = [self.appended[0]] * self.spec.layers
        super().commit(count)


class ForkSharesWrites(PlainCache):
    """Both forks write into one buffer."""

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        keys, values = super().append(layer, key, value)
        for index, new in enumerate((keys, values)):
            size = list(new.shape)
            size[2] = 256
            buffer = self.buffers.setdefault((layer, index, *size), np.empty(size, new.dtype))
            buffer[:, :, : new.shape[2]] = new
            self.arrays[layer][index] = buffer[:, :, : new.shape[2]]
        return self.arrays[layer][0], self.arrays[layer][1]

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.buffers: dict[tuple[int, ...], Array] = {}


class ForkIsItself(PlainCache):
    """A fork that is no second cache."""

    def fork(self) -> KVCache:
        return self


class ForkTakesOverAppended(PlainCache):
    """A fork in the middle of a step can commit what only the other one appended."""

    def fork(self) -> KVCache:
        appended = list(self.appended)
        other = super().fork()
        assert isinstance(other, PlainCache)
        other.appended = appended
        return other


class LayersShareScratch(PlainCache):
    """The views of one layer are overwritten when the next is appended to."""

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        keys, values = super().append(layer, key, value)
        scratch = self.scratch.setdefault(keys.shape, np.empty_like(keys))
        scratch[...] = keys
        return scratch, values

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.scratch: dict[tuple[int, ...], Array] = {}


class ReorderSwapsRowsOfKeysOnly(PlainCache):
    """A reorder that forgets the values."""

    def reorder(self, rows: IntArray) -> None:
        values = [pair[1] for pair in self.arrays]
        batch = len(values[0])
        super().reorder(rows)
        if len(rows) == batch:
            self.arrays = [[pair[0], value] for pair, value in zip(self.arrays, values, strict=True)]


class ReorderWrapsAround(PlainCache):
    """Row -1 is taken for the last one."""

    def reorder(self, rows: IntArray) -> None:
        super().reorder(rows % len(self.arrays[0][0]))


class NoCapacity(PlainCache):
    """Grows past its capacity."""

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        both = [self.join(self.committed(old), new) for old, new in zip(self.arrays[layer], (key, value), strict=True)]
        self.arrays[layer] = both
        self.appended[layer] = key.shape[2]
        return both[0], both[1]


class LetsGoInSilence(PlainCache):
    """Keeps the last three tokens, and says that a crop can reach anything."""

    def positions(self) -> IntArray:
        return np.arange(self.length)[-3:]


class CountsNoBytes(PlainCache):
    """Says that it's empty."""

    nbytes = 0


class WidensHalfPrecision(PlainCache):
    """Hands float16 on as float32."""

    def join(self, old: Array, new: Array) -> Array:
        return np.concatenate((old, new), axis=2).astype(np.float32)


class Ring(PlainCache):
    """A right layout that keeps the last four tokens. It has nine slots that are written in turn, as soon as tokens are appended."""

    WINDOW = 4
    SLOTS = 9

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.arrays = [[np.empty((*old.shape[:2], self.SLOTS, old.shape[3]), old.dtype) for old in pair] for pair in self.arrays]
        self.written = 0

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        end = self.length + key.shape[2]
        if self.spec.capacity is not None and end > self.spec.capacity:
            raise CacheError("full")
        new = np.arange(self.length, end)
        self.wrote(end)
        for buffer, tokens in zip(self.arrays[layer], (key, value), strict=True):
            buffer[:, :, new % self.SLOTS] = tokens
        self.appended[layer] = key.shape[2]
        slots = np.concatenate([self.positions(), new]) % self.SLOTS
        keys, values = (buffer[:, :, slots] for buffer in self.arrays[layer])
        return keys, values

    def wrote(self, end: int) -> None:
        self.written = max(self.written, end)

    @property
    def lost(self) -> int:
        return max(0, self.written - self.SLOTS)

    @property
    def min_length(self) -> int:  # type: ignore[override]
        return self.lost + self.WINDOW if self.lost else 0

    def fork(self) -> KVCache:
        other = super().fork()
        other.reorder(np.arange(len(self.arrays[0][0])))
        return other

    def positions(self) -> IntArray:
        return np.arange(self.length)[-self.WINDOW :]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for pair in self.arrays for array in pair)


class RingForgetsWhatItAbandoned(Ring):
    """Tokens that were appended and abandoned have overwritten old ones, which a crop then serves."""

    def wrote(self, end: int) -> None:
        pass

    def commit(self, count: int) -> None:
        super().commit(count)
        self.written = max(self.written, self.length)


class RingCropsIntoItsWindow(Ring):
    """A crop reaches lengths whose window isn't all there any more."""

    @property
    def min_length(self) -> int:  # type: ignore[override]
        return self.lost + 1 if self.lost else 0

    def positions(self) -> IntArray:
        return np.arange(max(self.lost, self.length - self.WINDOW), self.length)


class Page:
    """Two tokens of all rows, in all layers."""

    def __init__(self, arrays: list[list[Array]]) -> None:
        self.arrays = arrays
        self.references = 1


class Paged(PlainCache):
    """A right layout with pages that forks share until one of them writes."""

    SIZE = 2

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.pages: list[Page] = []

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        end = self.length + key.shape[2]
        if self.spec.capacity is not None and end > self.spec.capacity:
            raise CacheError("full")
        for time in range(self.length, end):
            index, slot = divmod(time, self.SIZE)
            if index == len(self.pages):
                empty = [[np.empty((*old.shape[:2], self.SIZE, old.shape[3]), old.dtype) for old in pair] for pair in self.arrays]
                self.pages.append(Page(empty))
            if self.pages[index].references > 1:
                self.pages[index].references -= 1
                self.pages[index] = Page([[array.copy() for array in pair] for pair in self.pages[index].arrays])
            for array, tokens in zip(self.pages[index].arrays[layer], (key, value), strict=True):
                array[:, :, slot] = tokens[:, :, time - self.length]
        self.appended[layer] = key.shape[2]
        parts = [[old, *(page.arrays[layer][index] for page in self.pages)] for index, old in enumerate(self.arrays[layer])]
        keys, values = (np.concatenate(each, axis=2)[:, :, :end] for each in parts)
        return keys, values

    def crop(self, length: int) -> None:
        super().crop(length)
        kept = -(-length // self.SIZE)
        for page in self.pages[kept:]:
            page.references -= 1
        self.pages = self.pages[:kept]

    def reorder(self, rows: IntArray) -> None:
        self.crop(self.length)
        super().reorder(rows)
        for page in self.pages:
            page.references -= 1
        self.pages = [Page([[array[rows] for array in pair] for pair in page.arrays]) for page in self.pages]

    def fork(self) -> KVCache:
        other = super().fork()
        assert isinstance(other, Paged)
        other.pages = self.pages[: -(-self.length // self.SIZE)]
        self.share(other.pages)
        return other

    def share(self, pages: list[Page]) -> None:
        for page in pages:
            page.references += 1

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for page in self.pages for pair in page.arrays for array in pair)


class PagedCountsOneTooFew(Paged):
    """A fork isn't counted in the last page, so both write into it."""

    def share(self, pages: list[Page]) -> None:
        super().share(pages[:-1])


class PagedFreesTooEarly(Paged):
    """The pages that a crop drops are free, though a fork may have them. Right as long as nobody writes into free pages."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.free: list[Page] = []

    def crop(self, length: int) -> None:
        pages = self.pages
        super().crop(length)
        self.free += pages[len(self.pages) :]

    def unused(self) -> list[Array]:
        return [array for page in self.free for pair in page.arrays for array in pair]


class Rounds(PlainCache):
    """Keeps numbers to the nearest 1/64."""

    def join(self, old: Array, new: Array) -> Array:
        return np.concatenate((old, np.round(new * 64) / 64), axis=2).astype(new.dtype)


def run_kit(factory: Callable[[CacheSpec], KVCache], **options: Any) -> None:
    # Shrinking is for people who read the failure; nobody does here.
    quick = settings(QUICK, derandomize=True, database=None, phases=[Phase.generate])
    run_state_machine_as_test(cache_layout_machine(factory, **options), settings=quick)


@pytest.mark.parametrize("right", [PlainCache, Ring, Paged])
def test_a_right_layout_passes(right: Callable[[CacheSpec], KVCache]) -> None:
    run_kit(right)


@pytest.mark.parametrize(
    "wrong",
    [
        Reversed,
        SwapsSeveral,
        CropLowersTheOffsetOnly,
        CropLeavesAppended,
        CropTakesAnyLength,
        AbandonedTokensLeak,
        PartialCommitKeepsAll,
        CommitTakesAnyCount,
        CommitLooksAtOneLayer,
        ForkSharesWrites,
        ForkIsItself,
        ForkTakesOverAppended,
        LayersShareScratch,
        ReorderSwapsRowsOfKeysOnly,
        ReorderWrapsAround,
        NoCapacity,
        LetsGoInSilence,
        CountsNoBytes,
        WidensHalfPrecision,
        RingForgetsWhatItAbandoned,
        RingCropsIntoItsWindow,
        PagedCountsOneTooFew,
        Rounds,
    ],
)
def test_a_wrong_layout_is_caught(wrong: Callable[[CacheSpec], KVCache]) -> None:
    with pytest.raises((AssertionError, CacheError, ExceptionGroup)):  # CacheError: it refused what it must do
        run_kit(wrong)


def test_memory_that_is_freed_too_early_is_caught() -> None:
    run_kit(PagedFreesTooEarly)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_kit(PagedFreesTooEarly, unused=PagedFreesTooEarly.unused)


def test_a_tolerance_lets_rounding_through_and_nothing_else() -> None:
    run_kit(Rounds, tolerance=1 / 64)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_kit(Rounds, tolerance=1e-5)
    for wrong in (Reversed, AbandonedTokensLeak, CropLowersTheOffsetOnly, PagedCountsOneTooFew):
        with pytest.raises((AssertionError, CacheError, ExceptionGroup)):
            run_kit(wrong, tolerance=1 / 64)


def test_the_thorough_profile_is_larger() -> None:
    assert (THOROUGH.max_examples, THOROUGH.stateful_step_count) == (1500, 50)
    assert cache_layout_machine(PlainCache, profile=THOROUGH).TestCase.settings is THOROUGH


def test_the_machine_is_collected_as_a_test_case() -> None:
    import unittest

    assert issubclass(cache_layout_machine(PlainCache).TestCase, unittest.TestCase)
