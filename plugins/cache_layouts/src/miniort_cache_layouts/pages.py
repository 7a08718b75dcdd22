"""Memory in pages of a fixed number of tokens, counted references, for caches that share what they have in common."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from miniort.generation.cache import CacheSpec
from miniort.types import Array, IntArray

SLAB_TOKENS = 1024
"""Memory is taken from the system in slabs of as many tokens, or of what is wanted at once where that's more."""


class Slab:
    """Consecutive pages: for each layer keys and values, [kv heads, pages · page size, dim]. `first` is its first page's number."""

    def __init__(self, spec: CacheSpec, first: int, slots: int) -> None:
        self.first = first
        self.layers = [
            tuple(spec.allocate((spec.kv_heads, slots, dim), spec.dtype) for dim in (spec.head_dim, spec.value_head_dim))
            for _ in range(spec.layers)
        ]


class PagePool:
    """Pages by number, and how many block tables refer to each. A page is the same place in every layer.

    Slabs are never moved or given back, so a view of them stays where it is; pages that nobody refers to any more are used again.
    """

    def __init__(self, spec: CacheSpec, page_size: int) -> None:
        tokens = SLAB_TOKENS if spec.capacity is None else min(SLAB_TOKENS, spec.capacity * spec.batch)
        self.page_size = page_size
        self.slabs: list[Slab] = []
        self.references: IntArray = np.zeros(0, np.int64)
        self.slab_of: IntArray = np.zeros(0, np.int64)
        self._spec = spec
        self._least_pages = max(1, -(-tokens // page_size))

    def take(self, count: int) -> IntArray:
        """Numbers of `count` free pages, which now have one reference each; consecutive ones of one slab where there are any."""
        pages = self._find(count)
        if pages is None:
            self._add_slab(count)
            pages = self._find(count)
            assert pages is not None
        self.references[pages] = 1
        return pages

    def _find(self, count: int) -> IntArray | None:
        free = np.flatnonzero(self.references == 0)
        if len(free) < count:
            return None
        first, last = free[: len(free) - count + 1], free[count - 1 :]
        runs = np.flatnonzero((last - first == count - 1) & (self.slab_of[first] == self.slab_of[last]))
        start = int(runs[0]) if runs.size else 0
        return free[start : start + count]

    def _add_slab(self, count: int) -> None:
        pages = max(count, self._least_pages)
        self.slabs.append(Slab(self._spec, len(self.references), pages * self.page_size))
        self.references = np.concatenate([self.references, np.zeros(pages, np.int64)])
        self.slab_of = np.concatenate([self.slab_of, np.full(pages, len(self.slabs) - 1)])

    def retain(self, pages: IntArray) -> None:
        """One more reference to each of these; a page may be named several times."""
        np.add.at(self.references, pages, 1)

    def release(self, pages: IntArray) -> None:
        """One reference less to each of these."""
        np.subtract.at(self.references, pages, 1)

    def place(self, page: int) -> tuple[int, int]:
        """A page's slab, and its first slot there."""
        slab = int(self.slab_of[page])
        return slab, (page - self.slabs[slab].first) * self.page_size

    def page(self, layer: int, page: int) -> tuple[Array, Array]:
        """A page's keys and values in a layer, [kv heads, page size, dim] each."""
        slab, slot = self.place(page)
        keys, values = self.slabs[slab].layers[layer]
        return keys[:, slot : slot + self.page_size], values[:, slot : slot + self.page_size]

    def free_memory(self, layer: int) -> Iterator[Array]:
        """The keys and values of a layer in pages that nobody refers to, [kv heads, tokens, dim], as few arrays."""
        for number, slab in enumerate(self.slabs):
            free = np.flatnonzero(self.references[self.slab_of == number] == 0)
            for run in np.split(free, np.flatnonzero(np.diff(free) > 1) + 1):
                if run.size:
                    yield from (array[:, run[0] * self.page_size : (run[-1] + 1) * self.page_size] for array in slab.layers[layer])

    def copy(self, source: int, target: int) -> None:
        """Copy one page to another, in all layers."""
        for layer in range(self._spec.layers):
            for new, old in zip(self.page(layer, target), self.page(layer, source), strict=True):
                new[...] = old
