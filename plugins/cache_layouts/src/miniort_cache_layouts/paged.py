"""Pages of a fixed size and a table of them for each row, like an operating system's (Kwon et al. 2023, arXiv:2309.06180)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from miniort.generation.cache import Block, BlockedView, CacheSpec, View
from miniort.types import Array, IntArray
from miniort_cache_layouts.arguments import check_append, check_commit, check_crop, checked_rows, require_positive
from miniort_cache_layouts.pages import PagePool


class _BlockTable:
    """The pages of each row in the order of time, [batch, pages]. It holds one reference to each, until it's dropped itself."""

    def __init__(self, pool: PagePool, pages: IntArray) -> None:
        self.pool = pool
        self.pages = pages
        pool.retain(pages)

    def __del__(self) -> None:
        self.pool.release(self.pages)

    def extend(self, columns: int) -> None:
        """Give every row `columns` new pages."""
        rows = len(self.pages)
        pages = self.pool.take(rows * columns).reshape(rows, columns)
        self.pages = np.concatenate([self.pages, pages], axis=1)

    def own(self, column: int) -> bool:
        """Copy those pages of a column that somebody else refers to as well. Whether there were any."""
        shared = False
        for row, page in enumerate(self.pages[:, column].tolist()):
            if self.pool.references[page] > 1:
                [new] = self.pool.take(1)
                self.pool.copy(page, new)
                self.pool.release(self.pages[row : row + 1, column])
                self.pages[row, column] = new
                shared = True
        return shared


class _Run(NamedTuple):
    """Pages that stand in memory so that they're one array: `pages` of them for each of some rows, from `column` of the table on.

    `slot` is where the first row's begin in the slab; each further row's begin `stride` slots behind, 0 where all rows share them.
    """

    rows: slice
    column: int
    pages: int
    slab: int
    slot: int
    stride: int


class PagedCache:
    """Tokens in pages that rows and forks share until one of them writes.

    page_size: tokens of a page. A fork copies nothing, and neither does `reorder`: both only count references. The last page of a history,
    where it isn't full, is copied once by whoever writes on first. So a common prompt is stored once, among forks and among rows.

    Caches that were forked from one another have one pool of pages, so they must be used in one thread at a time.
    """

    min_length = 0

    def __init__(self, spec: CacheSpec, page_size: int = 32) -> None:
        require_positive("paged", page_size=page_size)
        self.length = 0
        self._spec = spec
        self._pool = PagePool(spec, page_size)
        self._replace_table(np.zeros((spec.batch, 0), np.int64))
        self._discard_appended()

    def append(self, layer: int, key: Array, value: Array) -> tuple[View, View]:
        """Write behind the committed tokens, key [batch, kv heads, new, dim], and give the pages as blocks: as few as memory allows."""
        start = self.length
        end = start + check_append(self._spec, self._batch, self._spec.capacity, start, layer, key, value)
        self._make_room(end)
        self._appended[layer] = end - start
        return self._write(layer, 0, key), self._write(layer, 1, value)

    def commit(self, count: int) -> None:
        """Keep the first `count` of the appended tokens. CacheError if some layer was not appended that many."""
        check_commit(count, self._appended)
        self.length += count
        self._discard_appended()

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens. Pages that nobody else has are free again."""
        check_crop(length, 0, self.length)
        self.length = length
        self._replace_table(self._committed)
        self._discard_appended()

    def reorder(self, rows: IntArray) -> None:
        """Make row i what row `rows[i]` was: rows that repeat share their pages."""
        rows = checked_rows(rows, self._batch)
        self._replace_table(self._committed[rows])
        self._discard_appended()

    def fork(self) -> PagedCache:
        """A second cache that shares all pages. Nothing is copied."""
        other = object.__new__(PagedCache)
        other.length, other._spec, other._pool = self.length, self._spec, self._pool
        other._replace_table(self._committed)
        other._discard_appended()
        return other

    def positions(self) -> IntArray:
        """0 … length-1: no token is ever let go."""
        return np.arange(self.length, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that hold committed tokens, each counted once; what forks share, each of them counts."""
        pages = len(set(self._committed.ravel().tolist()))
        return pages * self._pool.page_size * self._spec.bytes_per_token() // self._spec.batch

    def unused(self) -> Iterator[Array]:
        """Pages that nobody refers to, and what is behind the last token in pages that only this cache has."""
        size, pool = self._pool.page_size, self._pool
        committed = -(-self.length // size)
        last = self._table.pages[:, committed - 1].tolist() if committed else []
        behind = self.length - (committed - 1) * size
        for layer in range(self._spec.layers):
            yield from pool.free_memory(layer)
            yield from (array[:, behind:] for page in last if pool.references[page] == 1 for array in pool.page(layer, page))

    @property
    def _batch(self) -> int:
        return len(self._table.pages)

    @property
    def _committed(self) -> IntArray:
        """The pages of committed tokens, [batch, pages]; a copy."""
        return self._table.pages[:, : -(-self.length // self._pool.page_size)].copy()

    def _replace_table(self, pages: IntArray) -> None:
        self._table = _BlockTable(self._pool, pages)
        self._runs = self._find_runs()

    def _make_room(self, end: int) -> None:
        """Have pages up to token `end`, and alone the one that is going to be written on."""
        size, pages = self._pool.page_size, self._table.pages.shape[1]
        copied = bool(end > self.length and self.length % size) and self._table.own(self.length // size)
        missing = -(-end // size) - pages
        if missing > 0:
            self._table.extend(missing)
        if copied or missing > 0:
            self._runs = self._find_runs()

    def _find_runs(self) -> list[_Run]:
        """The table's pages as few runs: columns whose rows are equally far apart together, others row by row."""
        table, pool = self._table.pages, self._pool
        rows, columns = table.shape
        runs: list[_Run] = []
        column = 0
        while column < columns:
            stride = self._stride(column)
            if stride is None:
                for row in range(rows):
                    slab, slot = pool.place(int(table[row, column]))
                    runs.append(_Run(slice(row, row + 1), column, 1, slab, slot, 0))
                column += 1
                continue
            end = column + 1
            while end < columns and (stride == 0 or end - column < stride) and self._follows(end):
                end += 1
            slab, slot = pool.place(int(table[0, column]))
            runs.append(_Run(slice(0, rows), column, end - column, slab, slot, stride * pool.page_size))
            column = end
        return runs

    def _stride(self, column: int) -> int | None:
        """How many pages each row's page is behind that of the row before. None if that differs, or if the slab ends within a stride."""
        pages, slab_of = self._table.pages[:, column], self._pool.slab_of
        if len(pages) == 1:
            return 0
        stride = int(pages[1] - pages[0])
        last = int(pages[0]) + max(1, len(pages) * stride) - 1
        if stride < 0 or last >= len(slab_of) or slab_of[last] != slab_of[pages[0]] or bool((np.diff(pages) != stride).any()):
            return None
        return stride

    def _follows(self, column: int) -> bool:
        """Whether each row's page is the one behind that of the column before, in the same slab."""
        before, pages = self._table.pages[:, column - 1], self._table.pages[:, column]
        slab_of = self._pool.slab_of
        return bool((pages == before + 1).all() and slab_of[pages[0]] == slab_of[before[0]])

    def _write(self, layer: int, part: int, new: Array) -> View:
        """Put new tokens behind the committed ones of keys (part 0) or values (part 1), and give all of them: one array if it's one run."""
        size, start = self._pool.page_size, self.length
        batch, heads, count, dim = new.shape
        end = start + count
        blocks = [
            self._block(run, layer, part, min(run.pages * size, end - run.column * size)) for run in self._runs if run.column * size < end
        ]
        for rows, first, tokens in blocks:
            if first + tokens.shape[2] > start:  # these pages belong to one row of one cache each
                kept = max(0, start - first)
                tokens[:, :, kept:] = new[rows, :, first + kept - start : first + tokens.shape[2] - start]
        if len(blocks) == 1 and len(blocks[0].tokens) == batch:
            return blocks[0].tokens
        return BlockedView((batch, heads, end, dim), new.dtype, blocks)

    def _block(self, run: _Run, layer: int, part: int, count: int) -> Block:
        """A run's first `count` tokens, [rows, kv heads, count, dim], where they are; [1, ...] where rows share them."""
        array = self._pool.slabs[run.slab].layers[layer][part]
        if run.stride == 0:
            tokens = array[None, :, run.slot : run.slot + count]
        else:
            heads, _, dim = array.shape
            rows = run.rows.stop - run.rows.start
            strides = array[:, run.slot : run.slot + rows * run.stride].reshape(heads, rows, run.stride, dim)
            tokens = strides[:, :, :count].transpose(1, 0, 2, 3)
        return Block(run.rows, run.column * self._pool.page_size, tokens)

    def _discard_appended(self) -> None:
        self._appended = [0] * self._spec.layers
