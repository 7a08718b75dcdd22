"""Every layout through the kit: with small pages, windows and blocks, so that few tokens cross many borders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from miniort.generation.cache import CacheLayoutInfo, CacheSpec, KVCache
from miniort.plugins import create_plugin_manager, find_named
from miniort.testing import cache_layout_machine
from miniort.testing.cache_layouts import QUICK, THOROUGH
from miniort.types import Array

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
        yield name, cache_layout_machine(factory, profile=profile, tolerance=tolerance, dtypes=DTYPES, unused=unused).TestCase


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in machines(QUICK)])
def test_conforms(case: Any) -> None:
    case().runTest()


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in machines(THOROUGH)])
def test_conforms_thoroughly(case: Any) -> None:
    case().runTest()
