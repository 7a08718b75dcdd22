"""Steps of one token that are recorded once, by a device or on a tape, and then replayed, each with other tokens, masks and positions.

What is decided when a step is recorded must then be the same in all of them. The length of the cache isn't, so a recorded step is fed as
though the cache were full: its mask covers all tokens that there's room for, and hides those that aren't there yet. The cache is told where
to write.
That gives what an ordinary step gives where the graph takes padding and positions from its inputs. If the length of its past mattered as
well, as it does for a sliding window, the two would differ, and the more the shorter the past: so the step that's recorded is run both ways
and compared, and a shorter one is recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np

from miniort.generation.cache import KVCache, ReservedTokens, ReservesTokens
from miniort.generation.probes import differ
from miniort.providers import DeviceArray, Provider
from miniort.runtime.recording import RecordedRun
from miniort.runtime.session import InferenceSession
from miniort.runtime.taped_run import TapedRun
from miniort.types import Array


@dataclass
class ReplayCounts:
    """How often a graph's steps were recorded and replayed, and why they couldn't be recorded, None if nothing stood against it."""

    recorded: int = 0
    replayed: int = 0
    obstacle: str | None = None


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A recorded step, the cache that it appends to, and the length that this had."""

    run: RecordedRun | TapedRun
    reserved: ReservedTokens
    length: int


class RecordedSteps:
    """The recorded steps of one graph, one for each cache.

    session: leaves the logits, its only output, on the device of `provider`; None where they're made elsewhere. obstacle: why steps can't
    be recorded, if that's known already.
    """

    def __init__(self, provider: Provider, session: InferenceSession | None, obstacle: str | None) -> None:
        self.provider = provider
        self.session = session
        self.counts = ReplayCounts(obstacle=obstacle or ("the logits are made on the host" if session is None else None))
        self._never = self.counts.obstacle is not None
        self._runs: WeakKeyDictionary[KVCache, _Recorded] = WeakKeyDictionary()
        self._met: WeakKeyDictionary[KVCache, ReservedTokens] = WeakKeyDictionary()
        self._refused: set[int] = set()  # batches for which it was tried in vain

    def reserved(self, cache: KVCache, batch: int) -> ReservedTokens | None:
        """The cache as a recorded step sees it; None where a step with this cache isn't recorded."""
        if self._never or cache.length == 0 or batch in self._refused:
            return None
        if not _reserves(type(cache)):
            self.counts.obstacle = "the cache's layout has no place of its own for each token; static has"
            return None
        return cast(ReservesTokens, cache).reserved()

    def replay(self, cache: KVCache, feed: Mapping[str, Any]) -> DeviceArray | None:
        """The logits of a step that was recorded; None if it wasn't, or anything but the contents of its inputs is another now."""
        recorded = self._runs.get(cache)
        if recorded is None or cache.length < recorded.length:
            return None
        outputs = recorded.run.replay(feed, _place(cache))
        if outputs is None:
            return None
        cast(ReservesTokens, cache).note_replay()
        self.counts.replayed += 1
        return outputs[0]

    def record(self, cache: KVCache, batch: int, reserved: ReservedTokens, feed: Mapping[str, Any], ordinary: Callable[[], Any]) -> Any:
        """Run a step as ever by `ordinary`, for its logits; but record it before, if the step before it met the cache in the same memory.

        So a beam search, which puts the cache elsewhere in each step, isn't recorded again and again. Where a step can't be recorded, or
        gives other logits, none of this batch is tried again, and `counts` says why.
        """
        if self._met.get(cache) is not reserved:
            self._met[cache] = reserved
            return ordinary()
        assert self.session is not None
        before = self._runs.pop(cache, None)
        if before is not None and before.reserved is reserved and cache.length >= before.length:
            self._refuse(batch, "the host reads an input that is another in each step")
            return ordinary()
        reserved.clear(cache.length)
        try:
            run, rehearsed = self.session.record(feed, _place(cache), reserved.write_at)
            found = self.provider.download(rehearsed[0])
        except Exception as error:
            # A kernel may raise anything, and then steps are run as ever.
            self._refuse(batch, str(error))
            return ordinary()
        logits = ordinary()  # last, for a rehearsal that was wrong has put wrong keys and values into the cache
        if differ(found, logits if isinstance(logits, np.ndarray) else self.provider.download(logits)):
            self._refuse(batch, "fed as though the cache were full it gives other logits, for it counts positions or a window by length")
        else:
            self._runs[cache] = _Recorded(run, reserved, cache.length)
            self.counts.recorded += 1
        return logits

    def _refuse(self, batch: int, reason: str) -> None:
        self._refused.add(batch)
        self.counts.obstacle = reason


def _place(cache: KVCache) -> Array:
    return np.array([cache.length], np.int64)


@lru_cache
def _reserves(kind: type) -> bool:
    """Whether caches of a class offer what a recorded step needs; looked up once, as that takes longer than all else here."""
    return issubclass(kind, ReservesTokens)
