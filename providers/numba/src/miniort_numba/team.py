"""Threads that share the work of one kernel, from within compiled code.

A kernel's work is a range of units, cut into chunks. Whoever is free takes the next chunk: the caller, or a helper. A helper that the
system doesn't let run costs nothing, as the caller then does all chunks itself and waits only for those that a helper has begun. Helpers
wait for more work in a loop for some 100 µs, and then sleep in a read from a pipe; neither needs Python's lock.

There is one crew for the whole process. If two threads have work at the same time, the second does its own alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from miniort.types import Array
from miniort_numba.atomics import add_to_word, call_part, call_read_or_write, load_word, relax, replace_word, store_word
from miniort_numba.options import PLAIN
from miniort_numba.placement import Placement, keep_off_callers_core

LINE = 64
"""Bytes between two words, so that each has a line of the cache of its own."""

TURN, DONE, BUSY, ASLEEP, FUNCTION, ARGUMENTS, CHUNK, SIZE, READ, WRITE, READ_END, WRITE_END, BYTE, PLACEMENT = (
    LINE * index for index in range(14)
)
"""Where the words of the board are. TURN: number of the job, how many helpers may join it, and how many of its chunks nobody has taken."""

CHUNK_BITS, HELPER_BITS = 20, 11
MOST_CHUNKS, MOST_HELPERS = (1 << CHUNK_BITS) - 1, (1 << HELPER_BITS) - 1

PATIENCE = 4_000
"""Turns of the loop in which a helper waits for work before it sleeps: some 100 µs."""


@dataclass(frozen=True)
class Crew:
    """What compiled code is told of its threads: the address of the board, and how many helpers may join. 0: the caller is alone."""

    board: int
    helpers: int


@njit(**PLAIN)
def take_chunk(board: int, turn: int) -> None:
    """Do the last chunk that nobody has taken, unless somebody else was faster. turn: the word TURN, by which there is one."""
    if replace_word(board + TURN, turn, turn - 1):
        # The job can't end before this chunk has, so what the board says of it stays.
        chunk = load_word(board + CHUNK)
        begin = ((turn & MOST_CHUNKS) - 1) * chunk
        end = min(begin + chunk, load_word(board + SIZE))
        call_part(load_word(board + FUNCTION), load_word(board + ARGUMENTS), begin, end)
        add_to_word(board + DONE, 1)


@njit(**PLAIN)
def help_out(board: int, index: int) -> None:
    """Take chunks of whatever job is on the board, for ever. `index`: which helper this is, from 0."""
    idle = 0
    while True:
        turn = load_word(board + TURN)
        if turn & MOST_CHUNKS > 0 and index < ((turn >> CHUNK_BITS) & MOST_HELPERS):
            take_chunk(board, turn)
            idle = 0
            continue
        relax()
        idle += 1
        if idle > PATIENCE:
            # One that asks for help after this wakes us; one that asked before, we see.
            add_to_word(board + ASLEEP, 1)
            if load_word(board + TURN) & MOST_CHUNKS == 0:
                call_read_or_write(load_word(board + READ), load_word(board + READ_END), load_word(board + BYTE), 1)
            add_to_word(board + ASLEEP, -1)
            idle = 0


@njit(**PLAIN)
def share(board: int, helpers: int, function: int, arguments: int, size: int, chunk: int) -> None:
    """Call ``function(arguments, begin, end)`` for chunks that cover 0 … size, and return when all are done.

    function: the address of a compiled function, see `PART`; arguments: the address of its arguments; chunk: how many units one call does.
    """
    count = (size + chunk - 1) // chunk
    if count > MOST_CHUNKS:
        chunk = (size + MOST_CHUNKS - 1) // MOST_CHUNKS
        count = (size + chunk - 1) // chunk
    if count < 2 or helpers == 0 or not replace_word(board + BUSY, 0, 1):
        for begin in range(0, size, chunk):
            call_part(function, arguments, begin, min(begin + chunk, size))
        return
    store_word(board + FUNCTION, function)
    store_word(board + ARGUMENTS, arguments)
    store_word(board + CHUNK, chunk)
    store_word(board + SIZE, size)
    store_word(board + DONE, 0)
    job = ((load_word(board + TURN) >> (CHUNK_BITS + HELPER_BITS)) + 1) & 0xFFFFFFFF
    store_word(board + TURN, (job << (CHUNK_BITS + HELPER_BITS)) | (helpers << CHUNK_BITS) | count)
    sleeping = min(add_to_word(board + ASLEEP, 0), helpers)  # not a plain load: it must not be done before the store above
    if sleeping > 0:
        keep_off_callers_core(load_word(board + PLACEMENT))
        call_read_or_write(load_word(board + WRITE), load_word(board + WRITE_END), load_word(board + BYTE), sleeping)
    while True:
        turn = load_word(board + TURN)
        if turn & MOST_CHUNKS == 0:
            break
        take_chunk(board, turn)
    while load_word(board + DONE) < count:
        relax()
    store_word(board + BUSY, 0)


@njit(**PLAIN)
def keep(array: Array) -> None:
    """Nothing: but an array whose address was taken lives until here."""


PART = types.void(types.intp, types.intp, types.intp)
"""The type of what `share` calls: ``part(arguments, begin, end)`` does the units from `begin` to before `end`."""


def address_of(part: Any) -> int:
    """Where a compiled function of type `PART` begins. Hand it to compiled code as an argument: as a constant it would be kept on disk."""
    return int(part.address)


class _Board:
    """The words that the crew shares, and its helpers, which start when a session first wants them."""

    def __init__(self) -> None:
        self._memory = np.zeros(15 * LINE, np.uint8)
        self.address = -(-self._memory.ctypes.data // LINE) * LINE
        self._bytes = np.zeros(MOST_HELPERS, np.uint8)
        self._lock = threading.Lock()
        self._helpers = 0
        self._placement = Placement(MOST_HELPERS)
        self._ends: tuple[int, int] = (0, 0)

    def ensure(self, helpers: int) -> None:
        """Have at least that many helpers."""
        with self._lock:
            if not self._helpers:
                self._prepare()
            for index in range(self._helpers, helpers):
                thread = threading.Thread(target=help_out, args=(self.address, index), name=f"miniort-numba-{index + 1}", daemon=True)
                thread.start()
                self._placement.add(thread.native_id or 0)
            self._helpers = max(self._helpers, helpers)

    def _prepare(self) -> None:
        self._ends = os.pipe()
        library: Any = ctypes.CDLL(None)
        words = {
            READ: ctypes.cast(library.read, ctypes.c_void_p).value or 0,
            WRITE: ctypes.cast(library.write, ctypes.c_void_p).value or 0,
            READ_END: self._ends[0],
            WRITE_END: self._ends[1],
            BYTE: self._bytes.ctypes.data,
            PLACEMENT: self._placement.address,
        }
        for offset, value in words.items():
            ctypes.c_int64.from_address(self.address + offset).value = value
        help_out.compile((types.intp, types.intp))


@cache
def _board(process: int) -> _Board:
    """The board of a process; a fork has no threads but the one that made it, and gets one of its own."""
    return _Board()


def hire(threads: int) -> Crew:
    """A crew of that many threads, the caller's own included. On Windows it's the caller alone."""
    helpers = 0 if sys.platform == "win32" else min(threads - 1, MOST_HELPERS)
    board = _board(os.getpid())
    if helpers:
        board.ensure(helpers)
    return Crew(board.address, helpers)
