"""The kit for cache layouts: a hypothesis state machine that compares a layout with a plain concatenation.

from miniort.testing import cache_layout_machine

TestMyLayout = cache_layout_machine(MyLayout).TestCase
TestMyLayoutThoroughly = pytest.mark.slow(cache_layout_machine(MyLayout, profile=THOROUGH).TestCase)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from miniort.errors import CacheError
from miniort.generation.cache import CacheSpec, KVCache, ReservesTokens
from miniort.types import Array, DType, IntArray

QUICK = settings(max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Seconds: for every run of the tests."""

THOROUGH = settings(QUICK, max_examples=1500, stateful_step_count=50)
"""Minutes: for a test that is marked as slow."""

_MOST_NEW = 5
_MOST_ROWS = 4
_MOST_CACHES = 4


def _specs(dtypes: Sequence[DType]) -> st.SearchStrategy[CacheSpec]:
    return st.builds(
        CacheSpec,
        layers=st.integers(1, 3),
        batch=st.integers(1, 3),
        kv_heads=st.integers(1, 2),
        head_dim=st.integers(1, 3),
        value_head_dim=st.integers(1, 3),
        dtype=st.sampled_from(list(dtypes)),
        capacity=st.none() | st.integers(1, 12),
    )


class _Host:
    def upload(self, array: Array) -> Array:
        return array

    def download(self, array: Array) -> Array:
        return array


def on_host(cache: Any) -> Any:
    """For `device`, where that's the host: nothing has to be copied."""
    return _Host()


@dataclass
class _History:
    """The oracle: every committed token of each layer, keys and values [batch, kv heads, time, dim]; and the cache that should agree."""

    cache: KVCache
    keys: list[Array]
    values: list[Array]
    origins: list[int]
    """Which of the first rows each row comes from; what those of one origin have in common, a layout may store once."""
    kept_at: dict[int, list[int]] = field(default_factory=dict)
    """What was kept at each length that there was, for a crop has to lead back to that."""
    largest: float = 0.0
    """The largest magnitude that was ever appended."""

    @property
    def length(self) -> int:
        return int(self.keys[0].shape[2])

    @property
    def batch(self) -> int:
        return int(self.keys[0].shape[0])


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except CacheError:
        return
    raise AssertionError(f"{what} must be a CacheError")


def cache_layout_machine(
    factory: Callable[[CacheSpec], KVCache],
    *,
    profile: settings = QUICK,
    tolerance: float = 0.0,
    dtypes: Sequence[Any] = (np.float32, np.float16),
    unused: Callable[[Any], Iterable[Array]] | None = None,
    device: Callable[[Any], Any] | None = None,
) -> type[RuleBasedStateMachine]:
    """A state machine that appends, abandons, commits (all or some), crops, reorders and forks caches that `factory` makes.

    Its `TestCase` is what a test runner collects. Each view is compared with a plain concatenation of the tokens that `positions()`
    says are kept, so a layout may let go of old tokens, if it says so by `min_length`. Tokens that are never committed are NaN: one
    that leaks can't go unnoticed. Views must stay valid until the same layer is appended to again, for a graph may be fed all at once.

    profile: `QUICK` or `THOROUGH`, or settings of your own.
    tolerance: for a layout that rounds, the largest error as a fraction of the largest magnitude that it was given. Such a layout isn't
        asked for a least `nbytes`, and its uncommitted tokens are numbers like any others.
    dtypes: element types to try.
    unused: gives views of all memory of a cache that holds no committed token, of that cache or of a fork. It's filled with NaN, and
        integers with their least value, after every step: what was freed too early, or is read past its end, can't go unnoticed.
    device: for a layout whose caches a recorded step can append to (`ReservesTokens`), which is then tried as well: gives what copies
        arrays to and from a cache's device, such as a provider; `on_host` where that's the host.
    """

    def spoil(*arrays: Array) -> None:
        for array in arrays if tolerance == 0 else ():
            array[...] = np.nan

    class CacheLayoutMachine(RuleBasedStateMachine):
        caches: Bundle[_History] = Bundle("caches")

        def __init__(self) -> None:
            super().__init__()
            self.histories: list[_History] = []
            self.tokens_made = 0

        def fresh_tokens(self, history: _History, count: int) -> list[tuple[Array, Array]]:
            """A key and a value for each layer, [batch, kv heads, count, dim], unlike any others."""
            self.tokens_made += 1
            rng = np.random.default_rng(self.tokens_made)
            rows = (history.batch, self.spec.kv_heads, count)
            return [
                (
                    rng.standard_normal((*rows, self.spec.head_dim)).astype(self.spec.dtype),
                    rng.standard_normal((*rows, self.spec.value_head_dim)).astype(self.spec.dtype),
                )
                for _ in range(self.spec.layers)
            ]

        def append(self, history: _History, tokens: list[tuple[Array, Array]]) -> None:
            """Append to each layer, and compare all views once the last layer has been appended to."""
            kept = self.checked_positions(history)
            views = [history.cache.append(layer, key, value) for layer, (key, value) in enumerate(tokens)]
            history.largest = max(history.largest, *(np.abs(new.astype(np.float64)).max(initial=0) for pair in tokens for new in pair), 0)
            for layer, (view, new) in enumerate(zip(views, tokens, strict=True)):
                for noun, found, old, added in (
                    ("keys", view[0], history.keys[layer], new[0]),
                    ("values", view[1], history.values[layer], new[1]),
                ):
                    found = np.asarray(found)
                    wanted = np.concatenate((old[:, :, kept], added), axis=2)
                    if found.shape != wanted.shape or found.dtype != wanted.dtype:
                        difference = f"wanted {wanted.dtype} {wanted.shape}, found {found.dtype} {found.shape}"
                    elif not self.agrees(found, wanted, tolerance * history.largest):
                        difference = f"wanted\n{wanted}\nfound\n{found}"
                    else:
                        continue  # not made before it's needed: to print arrays takes longer than all the rest
                    raise AssertionError(f"{noun} of layer {layer}, {len(kept)} old tokens and {added.shape[2]} new ones: {difference}")

        @staticmethod
        def agrees(found: Array, wanted: Array, error: float) -> bool:
            """Whether they're equal, NaN included, or not more than `error` apart."""
            found, wanted = found.astype(np.float64), wanted.astype(np.float64)
            return np.array_equal(found, wanted, equal_nan=True) or bool((np.abs(found - wanted) <= error).all())

        @staticmethod
        def remember(history: _History, tokens: list[tuple[Array, Array]]) -> None:
            """Take tokens as committed. The lists are new ones, as forks have the old."""
            history.keys = [np.concatenate((old, key), axis=2) for old, (key, _) in zip(history.keys, tokens, strict=True)]
            history.values = [np.concatenate((old, value), axis=2) for old, (_, value) in zip(history.values, tokens, strict=True)]

        def look(self, history: _History) -> None:
            """Compare what is committed, by an append of no tokens."""
            self.append(history, self.fresh_tokens(history, 0))

        def room(self, history: _History, wanted: int) -> int:
            """`wanted`, or as many tokens as still fit."""
            return wanted if self.spec.capacity is None else min(wanted, self.spec.capacity - history.length)

        @initialize(target=caches, spec=_specs([np.dtype(dtype) for dtype in dtypes]))
        def create(self, spec: CacheSpec) -> _History:
            self.spec = spec
            keys = np.empty((spec.batch, spec.kv_heads, 0, spec.head_dim), spec.dtype)
            values = np.empty((spec.batch, spec.kv_heads, 0, spec.value_head_dim), spec.dtype)
            history = _History(factory(spec), [keys] * spec.layers, [values] * spec.layers, origins=list(range(spec.batch)))
            self.histories.append(history)
            return history

        @rule(history=caches, new=st.integers(0, _MOST_NEW), left_out=st.just(0) | st.integers(0, _MOST_NEW))
        def step(self, history: _History, new: int, left_out: int) -> None:
            """Append `new` tokens to every layer and commit all but the last `left_out`."""
            new = self.room(history, new)
            count = max(0, new - left_out)
            tokens = self.fresh_tokens(history, new)
            for key, value in tokens:
                spoil(key[:, :, count:], value[:, :, count:])
            self.append(history, tokens)
            history.cache.commit(count)
            self.remember(history, [(key[:, :, :count], value[:, :, :count]) for key, value in tokens])

        @rule(history=caches, steps=st.integers(2, 6))
        def run_on(self, history: _History, steps: int) -> None:
            """Several steps of a token or two, for a history that is long enough to fill pages and windows."""
            for number in range(steps):
                self.step(history, 1 + number % 2, 0)

        @rule(history=caches, new=st.integers(1, _MOST_NEW), layers=st.integers(1, 3))
        def abandon(self, history: _History, new: int, layers: int) -> None:
            """Append to some of the layers, as a step that fails half-way does."""
            self.append_some(history, new, layers)

        def append_some(self, history: _History, new: int, layers: int) -> int:
            """Append spoilt tokens to the first `layers` layers, as many as fit; how many that were."""
            new = self.room(history, new)
            tokens = self.fresh_tokens(history, new)
            spoil(*(array for pair in tokens for array in pair))
            self.append(history, tokens[:layers])
            return new

        @rule(history=caches, new=st.integers(0, _MOST_NEW))
        def commit_too_many(self, history: _History, new: int) -> None:
            new = self.append_some(history, new, self.spec.layers)
            with _refused(f"a commit of {new + 1} tokens of {new} that were appended"):
                history.cache.commit(new + 1)
            with _refused("a commit of -1 tokens"):
                history.cache.commit(-1)

        @precondition(lambda self: self.spec.layers > 1)
        @rule(history=caches, new=st.integers(1, _MOST_NEW))
        def commit_half_a_step(self, history: _History, new: int) -> None:
            """Commit when the last layer has got nothing."""
            history.cache.commit(0)
            new = self.append_some(history, new, self.spec.layers - 1)
            if new:
                with _refused("a commit when a layer was appended nothing"):
                    history.cache.commit(new)

        @precondition(lambda self: self.spec.capacity is not None)
        @rule(history=caches, excess=st.integers(1, 2))
        def overflow(self, history: _History, excess: int) -> None:
            """More tokens than the capacity, which may be refused when they are appended or when they are committed."""
            assert self.spec.capacity is not None
            new = self.spec.capacity - history.length + excess
            with _refused(f"a length of {history.length + new} with a capacity of {self.spec.capacity}"):
                for layer, (key, value) in enumerate(self.fresh_tokens(history, new)):
                    spoil(key, value)
                    history.cache.append(layer, key, value)
                history.cache.commit(new)

        @rule(history=caches, near_start=st.booleans(), distance=st.integers(0, 3), pending=st.integers(0, _MOST_NEW))
        def crop(self, history: _History, near_start: bool, distance: int, pending: int) -> None:
            """Rewind to close by the shortest length or the whole one, also in the middle of a step."""
            pending = self.append_some(history, pending, self.spec.layers)
            shortest, length = history.cache.min_length, history.length
            length = min(shortest + distance, length) if near_start else max(shortest, length - distance)
            history.cache.crop(length)
            history.keys = [keys[:, :, :length] for keys in history.keys]
            history.values = [values[:, :, :length] for values in history.values]
            if pending:
                with _refused("a commit after a crop, which drops what was appended,"):
                    history.cache.commit(pending)
            self.look(history)

        @rule()
        def look_at_all(self) -> None:
            """No cache has changed because of what happened to another."""
            for history in self.histories:
                self.look(history)

        @rule(history=caches, choice=st.lists(st.integers(0, 255), min_size=1, max_size=_MOST_ROWS))
        def reorder(self, history: _History, choice: list[int]) -> None:
            """Rows that repeat, vanish and swap; the batch grows and shrinks."""
            rows = np.array(choice, dtype=np.int64) % history.batch
            history.cache.reorder(rows)
            history.keys = [keys[rows] for keys in history.keys]
            history.values = [values[rows] for values in history.values]
            history.origins = [history.origins[row] for row in rows]
            self.look(history)

        @precondition(lambda self: len(self.histories) < _MOST_CACHES)
        @rule(target=caches, history=caches, pending=st.integers(0, 2))
        def fork(self, history: _History, pending: int) -> _History:
            """A second continuation, which knows nothing of tokens that aren't committed yet."""
            pending = self.append_some(history, pending, self.spec.layers)
            other = _History(
                history.cache.fork(), history.keys, history.values, list(history.origins), dict(history.kept_at), history.largest
            )
            if pending:
                with _refused("a commit in a fork, which takes over committed tokens only,"):
                    other.cache.commit(pending)
            self.histories.append(other)
            return other

        @invariant()
        def what_it_says_of_itself_is_right(self) -> None:
            for history in self.histories:
                cache, length = history.cache, history.length
                kept = len(self.checked_positions(history))
                _check(0 <= cache.min_length <= length, f"min_length: wanted 0 … {length}, found {cache.min_length}")
                least = kept * self.spec.bytes_per_token() // self.spec.batch * len(set(history.origins))
                _check(tolerance > 0 or cache.nbytes >= least, f"nbytes: {kept} tokens take {least} bytes at least, found {cache.nbytes}")

        def checked_positions(self, history: _History) -> IntArray:
            """Which tokens are kept, by what the cache says."""
            length = history.length
            _check(history.cache.length == length, f"length: wanted {length}, found {history.cache.length}")
            positions = np.asarray(history.cache.positions())
            kept = positions.tolist()
            _check(
                positions.dtype == np.int64 and positions.ndim == 1,
                f"positions: wanted a list of int64, found {positions.dtype} {positions.shape}",
            )
            _check(kept == sorted(set(kept) & set(range(length))), f"positions: wanted some of 0 … {length - 1}, rising, found {kept}")
            _check(kept[-1:] == list(range(length))[-1:], f"positions: the newest token, {length - 1}, must be kept, found {kept}")
            before = history.kept_at.setdefault(length, kept)
            _check(kept == before, f"positions: at length {length} it kept {before} before, now, after a crop, {kept}")
            return positions

        @invariant()
        def what_it_refuses_changes_nothing(self) -> None:
            for history in self.histories:
                cache, length = history.cache, history.length
                for outside in (cache.min_length - 1, length + 1):
                    with _refused(f"a crop to {outside} where {cache.min_length} … {length} can be reached"):
                        cache.crop(outside)
                for row in (-1, history.batch):
                    with _refused(f"row {row} of {history.batch}"):
                        cache.reorder(np.array([0, row], dtype=np.int64))

        @invariant()
        def fill_what_is_unused(self) -> None:
            for history in self.histories if unused is not None else ():
                assert unused is not None
                for array in unused(history.cache):
                    array[...] = np.iinfo(array.dtype).min if array.dtype.kind in "iu" else np.nan

    class RecordedStepsMachine(CacheLayoutMachine):
        @rule(history=CacheLayoutMachine.caches)
        def step_as_recorded(self, history: _History) -> None:
            """One token, as a replay of a recorded step writes it."""
            cache, length = cast(ReservesTokens, history.cache), history.length
            reserved = cache.reserved()
            if reserved is None:
                return
            size = reserved.size
            _check(size >= length + 2, f"reserved: wanted room for two tokens behind {length}, found {size} in all")
            _check(cache.reserved() is reserved, "reserved: wanted the same object while memory and size stay")
            tokens = self.fresh_tokens(history, 1)
            reserved.clear(length)
            assert device is not None
            memory = device(history.cache)
            reserved.write_at(memory.upload(np.array([length], np.int64)))
            for layer, pair in enumerate(tokens):
                views = reserved.append(layer, *(memory.upload(new) for new in pair))
                for view, old, new in zip(views, (history.keys[layer], history.values[layer]), pair, strict=True):
                    found, nothing = memory.download(view), np.zeros((*new.shape[:2], size - length - 1, new.shape[3]), new.dtype)
                    wanted = np.concatenate((old, new, nothing), axis=2)
                    _check(
                        np.array_equal(found, wanted), f"reserved, layer {layer}, {length} old tokens and a new one: found {found.shape}"
                    )
            cache.note_replay()
            history.cache.commit(1)
            self.remember(history, tokens)
            self.look(history)

    machine = CacheLayoutMachine if device is None else RecordedStepsMachine
    machine.TestCase.settings = profile
    return machine
