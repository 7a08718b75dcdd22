"""The entry point of miniort-cache-layouts. Nothing that costs start-up time is imported before a hook is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniort.plugins import hookimpl

if TYPE_CHECKING:
    from miniort.generation.cache import CacheLayoutInfo


@hookimpl
def miniort_cache_layouts() -> list[CacheLayoutInfo]:
    """The cache layouts of this package."""
    from miniort.generation.cache import CacheLayoutInfo
    from miniort_cache_layouts.concat import concat_bhtd, concat_bthd
    from miniort_cache_layouts.paged import PagedCache
    from miniort_cache_layouts.quantised import Int8Cache
    from miniort_cache_layouts.static import StaticCache
    from miniort_cache_layouts.window import WindowCache

    return [
        CacheLayoutInfo("concat_bhtd", create=concat_bhtd, summary="[batch, heads, time, dim], copied to grow at each step"),
        CacheLayoutInfo("concat_bthd", create=concat_bthd, summary="[batch, time, heads, dim], copied to grow at each step"),
        CacheLayoutInfo("static", create=StaticCache, summary="one buffer, written in place"),
        CacheLayoutInfo("paged", create=PagedCache, summary="pages that forks and rows share until one of them writes"),
        CacheLayoutInfo("window", create=WindowCache, summary="the first few tokens and the last ones", lets_go=True),
        CacheLayoutInfo(
            "int8", create=Int8Cache, summary="8-bit integers with a scale per head and block of tokens", relative_error=1 / 254
        ),
    ]
