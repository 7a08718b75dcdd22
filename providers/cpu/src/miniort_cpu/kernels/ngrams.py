"""Counting n-grams: TfIdfVectorizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, IntArray

kernels = KernelTable("cpu")

UNKNOWN = -1


@dataclass(frozen=True)
class NGramTable:
    """The n-grams of one length n, as a search through their prefixes.

    An n-gram's first token is its first prefix; `prefixes[k]` holds, sorted, prefix · vocabulary + token for the prefixes of length k + 2,
    and a prefix's place there is its number in the next step. `numbers[place]` is the n-gram's number in the pool.
    """

    vocabulary: int
    prefixes: tuple[IntArray, ...]
    numbers: IntArray

    def find(self, tokens: IntArray) -> IntArray:
        """The number of each n-gram, UNKNOWN for one that isn't in the pool. tokens: [..., n] -> [...]."""
        found = tokens[..., 0]
        for step, known in enumerate(self.prefixes, 1):
            token = tokens[..., step]
            key = np.where((found >= 0) & (token >= 0), found * self.vocabulary + token, UNKNOWN)
            place = np.minimum(np.searchsorted(known, key), known.size - 1)
            found = np.where(known[place] == key, place, UNKNOWN)
        return np.where(found >= 0, self.numbers[found], UNKNOWN)


def ngram_table(tokens: IntArray, first_number: int, vocabulary: int) -> NGramTable:
    """The table of a pool's n-grams of one length. tokens: [count, n], n-gram i having the number first_number + i."""
    found, prefixes = tokens[:, 0], []
    size = vocabulary
    for step in range(1, tokens.shape[1]):
        known, found = np.unique(found * vocabulary + tokens[:, step], return_inverse=True)
        prefixes.append(known)
        size = known.size
    numbers = np.full(size, UNKNOWN)
    numbers[found] = first_number + np.arange(len(tokens))
    return NGramTable(vocabulary, tuple(prefixes), numbers)


@kernels.register("TfIdfVectorizer", versions=(9, None))
def tf_idf_vectorizer(node: NodeContext) -> Run:
    """How often each n-gram of a pool occurs in a row, its tokens next to each other or with up to `max_skip_count` others between any two.

    x: [C] or [rows, C] of integers or text -> [largest of ngram_indexes + 1], or [rows, ...], float32
    """
    pool: Sequence[object] = node.attribute("pool_strings", None) or node.attribute("pool_int64s", ())
    coordinates = np.array(node.attribute("ngram_indexes"), np.int64)
    shortest, longest, skips = node.attribute("min_gram_length"), node.attribute("max_gram_length"), node.attribute("max_skip_count")
    mode = node.attribute("mode")
    if mode not in ("TF", "IDF", "TFIDF"):
        raise KernelError(f"node {node.name!r} (TfIdfVectorizer): its mode must be TF, IDF or TFIDF, found {mode!r}")
    weights = np.array(node.attribute("weights", None) or np.ones(coordinates.size), np.float32)
    if mode == "TF":
        weights = np.ones(coordinates.size, np.float32)
    codes = {token: code for code, token in enumerate(dict.fromkeys(pool))}
    tokens = np.array([codes[token] for token in pool], np.int64)
    tables = _tables(tokens, node.attribute("ngram_counts"), len(codes), range(shortest, longest + 1))
    width = int(coordinates.max(initial=-1)) + 1

    def run(x: Array) -> Array:
        rows = x.reshape(1, -1) if x.ndim < 2 else x
        kinds, places = np.unique(rows, return_inverse=True)
        known = np.array([codes.get(kind, UNKNOWN) for kind in kinds.tolist()], np.int64)
        encoded = known[places.reshape(rows.shape)] if rows.size else np.zeros(rows.shape, np.int64)
        counts = np.zeros((len(rows), coordinates.size), np.int64)
        for length, table in tables.items():
            for distance in range(1, 2 if length == 1 else skips + 2):
                _count(counts, table.find(_windows(encoded, length, distance)))
        if mode == "IDF":
            counts = np.minimum(counts, 1)
        y = np.zeros((len(rows), width), np.float32)
        np.add.at(y.T, coordinates, (counts * weights).T)
        return y.reshape((*x.shape[:-1], width))

    return run


def _tables(tokens: IntArray, starts: Sequence[int], vocabulary: int, lengths: Sequence[int]) -> dict[int, NGramTable]:
    """Length -> its n-grams. starts: where those of length 1, 2, ... begin in the pool, whose n-grams are numbered in order."""
    tables, number = {}, 0
    for length, (start, end) in enumerate(zip(starts, (*starts[1:], tokens.size), strict=True), 1):
        grams = tokens[start:end][: (end - start) // length * length].reshape(-1, length)
        if len(grams) and length in lengths:
            tables[length] = ngram_table(grams, number, vocabulary)
        number += len(grams)
    return tables


def _windows(tokens: IntArray, length: int, distance: int) -> IntArray:
    """The n-grams whose tokens lie `distance` apart. tokens: [rows, C] -> [rows, number of them, length], a view."""
    span = (length - 1) * distance + 1
    if span > tokens.shape[1]:
        return np.zeros((len(tokens), 0, length), np.int64)
    return np.lib.stride_tricks.sliding_window_view(tokens, span, 1)[..., ::distance]


def _count(counts: IntArray, found: IntArray) -> None:
    """Add to counts [rows, n-grams] how often each was found [rows, places]."""
    rows, places = np.nonzero(found != UNKNOWN)
    np.add.at(counts, (rows, found[rows, places]), 1)
