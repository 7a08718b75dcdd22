"""Cache layouts whose keys and values stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miniort_cuda.caches.concat import ConcatCache
from miniort_cuda.caches.paged import PagedCache
from miniort_cuda.caches.static import StaticCache

DEVICE_LAYOUTS: Mapping[str, Callable[..., Any]] = {"concat_bhtd": ConcatCache, "static": StaticCache, "paged": PagedCache}
"""Device versions of cache layouts, by the layout's name: `create(memory, spec, **options)`."""
