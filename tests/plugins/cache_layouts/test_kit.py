"""Every layout through the kit: with small pages, windows and blocks, so that few tokens cross many borders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from miniort.errors import CacheError
from miniort.generation.cache import CacheLayoutInfo, CacheSpec, KVCache
from miniort.plugins import create_plugin_manager, find_named
from miniort.testing import cache_layout_machine
from miniort.testing.cache_layouts import QUICK, THOROUGH, on_host
from miniort.types import Array
from miniort_cache_layouts.reserved import ReservedBuffers
from miniort_cache_layouts.static import StaticCache

PLUGINS = create_plugin_manager(allow=["cache_layouts"])
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
INT8_ERROR = 1 / 254 + 2.0**-8  # half a scale, and half a unit in the last place of bfloat16


def small(layout: str, **options: int) -> Callable[[CacheSpec], KVCache]:
    """A layout, by its name as a generator finds it, with these options."""
    info = find_named(PLUGINS, "miniort_cache_layouts", CacheLayoutInfo, layout, "cache layout")
    return lambda spec: info.create(spec, **options)


def unused(cache: Any) -> Iterable[Array]:
    return cache.unused() if hasattr(cache, "unused") else ()


CASES: Mapping[str, Callable[[CacheSpec], KVCache]] = {
    "concat_bhtd": small("concat_bhtd"),
    "concat_bthd": small("concat_bthd"),
    "static": small("static", step=3),
    "paged": small("paged", page_size=2),
    "paged_by_one": small("paged", page_size=1),
    "window": small("window", window=3, sinks=2, rewind=2),
    "window_alone": small("window", window=1, sinks=0, rewind=0),
    "int8": small("int8", block=3),
}


def machines(profile: Any) -> Iterable[tuple[str, type]]:
    for name, factory in CASES.items():
        tolerance = INT8_ERROR if name == "int8" else 0.0
        device = on_host if name == "static" else None
        machine = cache_layout_machine(factory, profile=profile, tolerance=tolerance, dtypes=DTYPES, unused=unused, device=device)
        yield name, machine.TestCase


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in machines(QUICK)])
def test_conforms(case: Any) -> None:
    case().runTest()


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in machines(THOROUGH)])
def test_conforms_thoroughly(case: Any) -> None:
    case().runTest()


class KeepsOldBuffers(StaticCache):
    """A recorded step would write into buffers that a growth has left behind."""

    def reserved(self) -> ReservedBuffers | None:
        found = super().reserved()
        self.first = getattr(self, "first", found)
        return self.first if self.first is not None and self.first.size >= self.length + 2 else found


class HasRoomForOne(StaticCache):
    def reserved(self) -> ReservedBuffers | None:
        found = super().reserved()
        return None if found is None else ReservedBuffers(self._buffers, self.length + 1)


class ForgetsReplays(StaticCache):
    def note_replay(self) -> None: ...


class DoesNotClear(ReservedBuffers):
    def clear(self, start: int) -> None: ...


class LeavesOldNumbers(StaticCache):
    def reserved(self) -> ReservedBuffers | None:
        found = super().reserved()
        if found is not None and not isinstance(found, DoesNotClear):
            self._reserved = found = DoesNotClear(self._buffers, found.size)
        return found


@pytest.mark.parametrize("wrong", [KeepsOldBuffers, HasRoomForOne, ForgetsReplays, LeavesOldNumbers])
def test_a_wrong_reserve_is_caught(wrong: type[StaticCache]) -> None:
    machine = cache_layout_machine(lambda spec: wrong(spec, step=6), device=on_host, unused=unused)
    with pytest.raises((AssertionError, CacheError, ExceptionGroup)):
        machine.TestCase().runTest()
