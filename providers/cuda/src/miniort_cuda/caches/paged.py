"""Pages of a fixed size and a table of them for each row, shared until somebody writes (Kwon et al. 2023, arXiv:2309.06180)."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.errors import PluginError
from miniort.generation.cache import CacheSpec
from miniort.types import IntArray
from miniort_cuda.caches.memory import DeviceCache, DeviceMemory, copied

Pair = tuple[Any, Any]

LEAST_PAGES = 32
"""The pool takes memory for as many pages at first, and doubles it when they're used up."""


class PagePool:
    """For each layer one buffer of keys and one of values, [kv heads, pages · page size, dim], and how many tables refer to each page."""

    def __init__(self, cache: DeviceCache, page_size: int) -> None:
        self.page_size = page_size
        self.references: list[int] = []
        self.buffers: list[Pair] = []
        self._grow(cache, LEAST_PAGES)

    def _grow(self, cache: DeviceCache, pages: int) -> None:
        spec, slots = cache.spec, pages * self.page_size
        new = [
            (cache.empty((spec.kv_heads, slots, spec.head_dim)), cache.empty((spec.kv_heads, slots, spec.value_head_dim)))
            for _ in range(spec.layers)
        ]
        used = len(self.references) * self.page_size
        for fresh, old in zip(new, self.buffers, strict=False):
            for target, source in zip(fresh, old, strict=True):
                target[:, :used] = source[:, :used]
        self.buffers = new
        self.references += [0] * (pages - len(self.references))

    def take(self, cache: DeviceCache, after: int | None) -> int:
        """A free page with one reference: the one behind page `after` if that's free, so that a row stays one array."""
        free = [number for number, count in enumerate(self.references) if count == 0]
        if not free:
            self._grow(cache, 2 * len(self.references))
            return self.take(cache, after)
        page = free[0] if after is None or after + 1 not in free else after + 1
        self.references[page] = 1
        return page

    def copy(self, source: int, target: int) -> None:
        """Copy one page to another, in all layers."""
        size = self.page_size
        for pair in self.buffers:
            for buffer in pair:
                buffer[:, target * size : (target + 1) * size] = buffer[:, source * size : (source + 1) * size]


class PagedCache(DeviceCache):
    """Tokens in pages. A fork copies nothing, and neither does `reorder`: both count references. Who writes on a shared page copies it.

    page_size: tokens of a page. A row whose pages follow each other in memory is read as one array without a copy; a batch, or a row whose
    pages are scattered, is gathered for the attention that reads it. Caches that were forked from one another share one pool of pages.
    """

    def __init__(self, memory: DeviceMemory, spec: CacheSpec, page_size: int = 32) -> None:
        if page_size < 1:
            raise PluginError(f"cache layout 'paged': page_size must be at least 1, found {page_size}")
        super().__init__(memory, spec)
        with memory.current_device():
            self._pool = PagePool(self, page_size)
        self._tables: list[list[int]] = [[] for _ in range(spec.batch)]

    def __del__(self) -> None:
        for table in getattr(self, "_tables", ()):
            self._release(table)

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._pool.references[page] -= 1

    def write(self, layer: int, key: Any, value: Any, new: int) -> Pair:
        """Write behind the committed tokens, and give all of them."""
        end = self.length + new
        self._make_room(end)
        keys, values = self._pool.buffers[layer]
        if new:
            self._write(keys, key, new)
            self._write(values, value, new)
        return self._read(keys, end), self._read(values, end)

    def _make_room(self, end: int) -> None:
        """Have pages up to token `end`, and alone the one that is going to be written on."""
        size, pool = self._pool.page_size, self._pool
        last = self.length // size
        for table in self._tables:
            if end > self.length and self.length % size and pool.references[table[last]] > 1:
                shared = table[last]
                table[last] = pool.take(self, table[last - 1] if last else None)
                pool.copy(shared, table[last])
                pool.references[shared] -= 1
            while len(table) * size < end:
                table.append(pool.take(self, table[-1] if table else None))

    def _write(self, buffer: Any, new: Any, count: int) -> None:
        """Put new tokens, [batch, kv heads, count, dim], on the pages behind the committed ones."""
        size, start = self._pool.page_size, self.length
        for row, table in enumerate(self._tables):
            done = 0
            while done < count:
                page, offset = divmod(start + done, size)
                some = min(count - done, size - offset)
                slot = table[page] * size + offset
                buffer[:, slot : slot + some] = new[row, :, done : done + some]
                done += some

    def _read(self, buffer: Any, end: int) -> Any:
        """The first `end` tokens of every row, [batch, kv heads, end, dim]: a view of one row that lies in one piece, else an array."""
        xp = self.memory.xp
        rows = [xp.expand_dims(self._row(buffer, table, end), 0) for table in self._tables]
        return rows[0] if len(rows) == 1 else xp.concatenate(rows, axis=0)

    def _row(self, buffer: Any, table: list[int], end: int) -> Any:
        size = self._pool.page_size
        pieces: list[tuple[int, int]] = []  # first slot and last slot + 1 of pages that follow each other
        for number, page in enumerate(table[: -(-end // size)]):
            first, last = page * size, page * size + min(size, end - number * size)
            if pieces and pieces[-1][1] == first:
                pieces[-1] = pieces[-1][0], last
            else:
                pieces.append((first, last))
        if not pieces:
            return buffer[:, :0]
        parts = [buffer[:, first:last] for first, last in pieces]
        return parts[0] if len(parts) == 1 else self.memory.xp.concatenate(parts, axis=1)

    def keep(self, length: int) -> None:
        """Make the first `length` tokens the committed ones; pages behind them that nobody else has are free again."""
        super().keep(length)
        pages = -(-length // self._pool.page_size)
        for table in self._tables:
            self._release(table[pages:])
            del table[pages:]

    def _shared(self, tables: list[list[int]]) -> list[list[int]]:
        """Copies of these tables' committed pages, each with one more reference."""
        pages = -(-self.length // self._pool.page_size)
        copies = [table[:pages] for table in tables]
        for table in copies:
            for page in table:
                self._pool.references[page] += 1
        return copies

    def reorder(self, rows: IntArray) -> None:
        """Make row i what row `rows[i]` was: rows that repeat share their pages."""
        rows = self.checked_rows(rows)
        old, self._tables = self._tables, self._shared([self._tables[row] for row in rows.tolist()])
        for table in old:
            self._release(table)
        self.batch = len(rows)
        self.keep(self.length)

    def fork(self) -> PagedCache:
        """A second cache that shares all pages. Nothing is copied."""
        other: PagedCache = copied(self)
        other._tables = self._shared(self._tables)
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that hold committed tokens, each counted once."""
        pages = -(-self.length // self._pool.page_size)
        used = len(np.unique([page for table in self._tables for page in table[:pages]]))
        return used * self._pool.page_size * self.spec.bytes_per_token() // self.spec.batch
