"""Recurrent layers: the loop over time, which does what depends on the step before.

What a gate gets from the inputs is there for all steps, and each step adds what it gets from the hidden state in place. The gates' columns
are filled up to whole panels (`miniort_numba.compiled.panels`): an LSTM's all four together, GRU's z and r together and h by itself.
Directions don't wait for each other, so each is a unit of work of its own.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import floats_at, words_at
from miniort_numba.compiled.activations import sigmoid, tanh
from miniort_numba.compiled.integers import round_to_bytes
from miniort_numba.compiled.panel_products import COUNT, MATRIX_WORDS, SCALE, add_products
from miniort_numba.compiled.row_products import WIDTH
from miniort_numba.options import LOOP, PLAIN
from miniort_numba.team import PART, address_of, keep, share

_STEPS, _WAYS, _BATCH, _SIZE, _REVERSE, _LENGTHS, _GATES, _HIDDEN, _CELL, _BIAS, _Y, _BOARD, _HELPERS, _PART, _MATRIX = range(15)


@njit(**PLAIN)
def _add_hidden(words: Array, way: int, y: Array, hidden: Array, first: int, last: int) -> None:
    """y += hidden · recurrent weights, in the columns of panels `first` to `last`. y: [B, columns]; hidden: [B, H]."""
    matrix, factor = words[_MATRIX:], np.float32(1)
    seen = hidden
    if matrix[SCALE]:
        seen = np.empty_like(hidden)
        factor = round_to_bytes(seen.reshape(-1), hidden.reshape(-1))
    panel = way * matrix[COUNT] + first
    add_products(words[_BOARD], words[_HELPERS], words[_PART], y.ctypes.data, seen, factor, matrix, panel, last - first)
    keep(seen)


@njit(**LOOP)
def _next_cell(cell: Array, enter: Array, forget: Array, candidate: Array) -> None:
    """c = f c + i c~. All: [H]."""
    for j in range(cell.size):
        cell[j] = forget[j] * cell[j] + enter[j] * candidate[j]


@njit(**LOOP)
def _multiply(x: Array, factor: Array) -> None:
    """x becomes x · factor. Both: [n]."""
    for j in range(x.size):
        x[j] *= factor[j]


@njit(**LOOP)
def _add(x: Array, term: Array) -> None:
    """x becomes x + term. Both: [n]."""
    for j in range(x.size):
        x[j] += term[j]


@njit(**LOOP)
def _mix(hidden: Array, update: Array, candidate: Array) -> None:
    """h = (1 - z) h~ + z h = h~ + z (h - h~). All: [H]."""
    for j in range(hidden.size):
        hidden[j] = candidate[j] + update[j] * (hidden[j] - candidate[j])


@cfunc(PART, cache=True, error_model="numpy")
def _lstm(arguments: int, begin: int, end: int) -> None:
    """Directions `begin` to `end`: i, o, f = sigmoid(..), c~ = tanh(..), c = f c + i c~, h = o tanh(c)."""
    words = carray(words_at(arguments), _MATRIX + MATRIX_WORDS)
    steps, ways, batch, size = words[_STEPS], words[_WAYS], words[_BATCH], words[_SIZE]
    columns = words[_MATRIX + COUNT] * WIDTH
    lengths = carray(words_at(words[_LENGTHS]), batch)
    for way in range(begin, end):
        hidden = carray(floats_at(words[_HIDDEN] + 4 * way * batch * size), (batch, size))
        cell = carray(floats_at(words[_CELL] + 4 * way * batch * size), (batch, size))
        for step in range(steps):
            time = steps - 1 - step if way == 1 or words[_REVERSE] else step
            gates = carray(floats_at(words[_GATES] + 4 * (way * steps + time) * batch * columns), (batch, columns))
            y = carray(floats_at(words[_Y] + 4 * (time * ways + way) * batch * size), (batch, size))
            _add_hidden(words, way, gates, hidden, 0, words[_MATRIX + COUNT])
            for row in range(batch):
                if time >= lengths[row]:
                    y[row] = 0
                    continue
                gate, h, c = gates[row], hidden[row], cell[row]
                sigmoid(gate[: 3 * size])
                tanh(gate[3 * size : 4 * size])
                _next_cell(c, gate[:size], gate[2 * size : 3 * size], gate[3 * size : 4 * size])
                h[:] = c
                tanh(h)
                _multiply(h, gate[size : 2 * size])
                y[row] = h


@cfunc(PART, cache=True, error_model="numpy")
def _gru(arguments: int, begin: int, end: int) -> None:
    """Directions `begin` to `end`: z, r = sigmoid(..), h~ = tanh(x W + r (h R + b)) or tanh(x W + (r h) R + b), h = (1 - z) h~ + z h."""
    words = carray(words_at(arguments), _MATRIX + MATRIX_WORDS)
    steps, ways, batch, size = words[_STEPS], words[_WAYS], words[_BATCH], words[_SIZE]
    count = words[_MATRIX + COUNT]
    columns, split = count * WIDTH, (2 * size + WIDTH - 1) // WIDTH
    start = split * WIDTH
    lengths = carray(words_at(words[_LENGTHS]), batch)
    past, kept = np.zeros((batch, columns), np.float32), np.empty((batch, size), np.float32)
    for way in range(begin, end):
        hidden = carray(floats_at(words[_HIDDEN] + 4 * way * batch * size), (batch, size))
        for step in range(steps):
            time = steps - 1 - step if way == 1 or words[_REVERSE] else step
            gates = carray(floats_at(words[_GATES] + 4 * (way * steps + time) * batch * columns), (batch, columns))
            y = carray(floats_at(words[_Y] + 4 * (time * ways + way) * batch * size), (batch, size))
            _add_hidden(words, way, gates, hidden, 0, split)
            for row in range(batch):
                sigmoid(gates[row, : 2 * size])
            if words[_BIAS]:
                bias = carray(floats_at(words[_BIAS] + 4 * way * size), size)
                for row in range(batch):
                    past[row, start : start + size] = bias
                _add_hidden(words, way, past, hidden, split, count)
                for row in range(batch):
                    _multiply(past[row, start : start + size], gates[row, size : 2 * size])
                    _add(gates[row, start : start + size], past[row, start : start + size])
            else:
                kept[:] = hidden
                for row in range(batch):
                    _multiply(kept[row], gates[row, size : 2 * size])
                _add_hidden(words, way, gates, kept, split, count)
            for row in range(batch):
                if time >= lengths[row]:
                    y[row] = 0
                    continue
                candidate = gates[row, start : start + size]
                tanh(candidate)
                _mix(hidden[row], gates[row, :size], candidate)
                y[row] = hidden[row]


LSTM, GRU = address_of(_lstm), address_of(_gru)


@njit(**PLAIN)
def unroll(
    board: int,
    helpers: int,
    part: int,
    product: int,
    by_step: bool,
    reverse: bool,
    gates: Array,
    matrix: Array,
    lengths: Array,
    hidden: Array,
    cell: Array,
    bias: Array,
    y: Array,
) -> None:
    """All steps of all directions, one direction for a thread, or, `by_step`, one after the other, each product shared.

    part: LSTM or GRU; product: ADD_PRODUCTS; reverse: whether the first direction goes backward, as the second does; lengths: [B] int64;
    gates: [D, T, B, columns], with the inputs' part, written over; matrix: the recurrent weights, as in `panel_products`;
    hidden, cell: [D, B, H], the first states, which become the last; cell is an LSTM's only, [0, 0, 0] for GRU; bias: [D, H], of the hidden
    state's part of h in GRU with linear_before_reset, else [0, 0]; y: [T, D, B, H].
    """
    words = np.empty(_MATRIX + MATRIX_WORDS, np.int64)
    words[_STEPS], words[_WAYS], words[_BATCH], words[_SIZE] = y.shape
    words[_REVERSE], words[_LENGTHS], words[_GATES] = 1 if reverse else 0, lengths.ctypes.data, gates.ctypes.data
    words[_HIDDEN], words[_CELL], words[_Y] = hidden.ctypes.data, cell.ctypes.data, y.ctypes.data
    words[_BIAS] = bias.ctypes.data if bias.size else 0
    words[_BOARD], words[_HELPERS], words[_PART] = board, helpers if by_step else 0, product
    words[_MATRIX:] = matrix
    share(board, 0 if by_step else helpers, part, words.ctypes.data, y.shape[1], 1)
    keep(words)
