"""Keys and values as 8-bit integers with a scale for each head and each block of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from miniort.generation.cache import Block, BlockedView, CacheSpec, View
from miniort.types import Array, FloatArray, IntArray
from miniort_cache_layouts.arguments import check_append, check_commit, check_crop, checked_rows, require_positive

LARGEST = 127
"""Codes run from -127 to 127, so that they're as many below zero as above."""

READ_AT_ONCE = 128
"""Tokens that are decoded at a time: few enough to stay in a processor's cache until attention has read them."""


class _Coded:
    """Quantised keys or values of one layer. codes: [batch, kv heads, time, dim] int8; scales: [batch, kv heads, blocks] float32.

    Block b's tokens are codes times scale b. Which block a token is in, the cache knows, for that's the same in all layers.
    """

    def __init__(self, codes: Array, scales: FloatArray) -> None:
        self.codes = codes
        self.scales = scales

    def select(self, rows: IntArray) -> _Coded:
        return _Coded(self.codes[rows], self.scales[rows])

    def append(self, tokens: Array, block: int, time: int, blocks: int) -> None:
        """Quantise `tokens` [batch, kv heads, n · block, dim], behind the first `time` tokens and `blocks` blocks."""
        batch, heads, count, dim = tokens.shape
        grouped = tokens.astype(np.float32).reshape(batch, heads, count // block, block, dim)
        scales = np.abs(grouped).max(axis=(3, 4)) / np.float32(LARGEST)
        divisors = np.where(scales == 0, np.float32(1), scales)[..., None, None]
        codes = np.clip(np.rint(grouped / divisors), -LARGEST, LARGEST).astype(np.int8).reshape(tokens.shape)
        self.codes = _with_room(self.codes, time, time + count)
        self.scales = _with_room(self.scales, blocks, blocks + count // block)
        self.codes[:, :, time : time + count] = codes
        self.scales[:, :, blocks : blocks + count // block] = scales


def _with_room(array: Array, used: int, wanted: int) -> Array:
    """An array with `wanted` places along axis 2, the first `used` of which are kept: the same one, or a larger one."""
    if wanted <= array.shape[2]:
        return array
    larger = np.empty((*array.shape[:2], wanted + wanted // 4, *array.shape[3:]), array.dtype)
    larger[:, :, :used] = array[:, :, :used]
    return larger


class _Blocks:
    """Blocks that are decoded while they're read, then the tokens that aren't quantised yet."""

    def __init__(self, coded: _Coded, block_of: IntArray, recent: Array) -> None:
        self.coded = coded
        self.block_of = block_of
        self.recent = recent

    def __iter__(self) -> Iterator[Block]:
        rows = slice(0, len(self.recent))
        time = len(self.block_of)
        for start in range(0, time, READ_AT_ONCE):
            end = min(time, start + READ_AT_ONCE)
            tokens = self.coded.codes[:, :, start:end].astype(np.float32)
            tokens *= self.coded.scales[:, :, self.block_of[start:end], None]
            yield Block(rows, start, tokens.astype(self.recent.dtype, copy=False))
        yield Block(rows, time, self.recent)


class Int8Cache:
    """Keys and values in 8 bits. Each head of each row has one scale for `block` tokens: their largest magnitude / 127.

    Error: a number differs by half a scale at most, 1/254 of the largest magnitude among its head's tokens in the block when that was
    quantised, and by the rounding of the cache's dtype. It's quantised once, whatever is rewound later. Numbers must be finite.

    The newest tokens, fewer than `block` committed ones and all that isn't committed, are kept as they are: a block is quantised when it's
    full. A crop may cut a block; the tokens that follow begin another.
    """

    min_length = 0

    def __init__(self, spec: CacheSpec, block: int = 16) -> None:
        require_positive("int8", block=block)
        self.length = 0
        self._spec = spec
        self._block = block
        self._block_of: IntArray = np.zeros(0, np.int64)  # of each quantised token
        shapes = [(spec.batch, spec.kv_heads, 0, dim) for dim in (spec.head_dim, spec.value_head_dim)]
        self._coded = [[_Coded(np.empty(shape, np.int8), np.empty(shape[:3], np.float32)) for shape in shapes] for _ in range(spec.layers)]
        self._recent = [[np.empty(shape, spec.dtype) for shape in shapes] for _ in range(spec.layers)]
        self._discard_appended()

    def append(self, layer: int, key: Array, value: Array) -> tuple[View, View]:
        """Put new tokens, key [batch, kv heads, new, dim], behind the old ones, and give blocks that are decoded when they're read."""
        check_append(self._spec, self._batch, self._spec.capacity, self.length, layer, key, value)
        pair = [np.concatenate(both, axis=2) for both in zip(self._recent[layer], (key, value), strict=True)]
        self._appended[layer] = pair
        keys, values = (self._view(coded, recent) for coded, recent in zip(self._coded[layer], pair, strict=True))
        return keys, values

    def commit(self, count: int) -> None:
        """Keep the first `count` of the appended tokens, and quantise what fills a block. CacheError if some layer was appended fewer."""
        quantised = len(self._block_of)
        unquantised = self.length - quantised
        check_commit(count, [0 if pair is None else pair[0].shape[2] - unquantised for pair in self._appended])
        if count:
            kept = unquantised + count
            full = kept // self._block * self._block
            blocks = self._blocks
            for layer, pair in enumerate(self._appended):
                assert pair is not None
                for coded, tokens in zip(self._coded[layer], pair, strict=True):
                    if full:
                        coded.append(tokens[:, :, :full], self._block, quantised, blocks)
                # A copy, because a view would keep all that was appended alive.
                self._recent[layer] = [tokens[:, :, full:kept].copy() if full else tokens[:, :, :kept] for tokens in pair]
            self._block_of = np.concatenate([self._block_of, blocks + np.arange(full) // self._block])
            self.length += count
        self._discard_appended()

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens. Those that are quantised stay so."""
        check_crop(length, 0, self.length)
        self._block_of = self._block_of[:length]
        self._cut_recent(length - len(self._block_of))
        self.length = length
        self._discard_appended()

    def reorder(self, rows: IntArray) -> None:
        """Make row i what row `rows[i]` was."""
        rows = checked_rows(rows, self._batch)
        self._coded = [[coded.select(rows) for coded in pair] for pair in self._coded]
        self._recent = [[tokens[rows] for tokens in pair] for pair in self._recent]
        self._discard_appended()

    def fork(self) -> Int8Cache:
        """A second cache with a copy of the committed tokens."""
        other = object.__new__(Int8Cache)
        other.__dict__.update(self.__dict__)
        other.reorder(np.arange(self._batch))
        return other

    def positions(self) -> IntArray:
        """0 … length-1: no token is ever let go."""
        return np.arange(self.length, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, and the tokens that aren't quantised yet."""
        spec, quantised = self._spec, len(self._block_of)
        per_head = quantised * (spec.head_dim + spec.value_head_dim) + self._blocks * 2 * np.dtype(np.float32).itemsize
        recent = (self.length - quantised) * spec.bytes_per_token() // spec.batch * self._batch
        return spec.layers * self._batch * spec.kv_heads * per_head + recent

    def unused(self) -> Iterator[Array]:
        """The places for codes and scales that no committed token needs."""
        for pair in self._coded:
            for coded in pair:
                yield from (coded.codes[:, :, len(self._block_of) :], coded.scales[:, :, self._blocks :])

    @property
    def _batch(self) -> int:
        return len(self._recent[0][0])

    @property
    def _blocks(self) -> int:
        return int(self._block_of[-1]) + 1 if len(self._block_of) else 0

    def _view(self, coded: _Coded, recent: Array) -> View:
        if not len(self._block_of):
            return recent
        batch, heads, count, dim = recent.shape
        return BlockedView((batch, heads, len(self._block_of) + count, dim), recent.dtype, _Blocks(coded, self._block_of, recent))

    def _cut_recent(self, count: int) -> None:
        self._recent = [[tokens[:, :, :count] for tokens in pair] for pair in self._recent]

    def _discard_appended(self) -> None:
        self._appended: list[list[Array] | None] = [None] * self._spec.layers
