"""Which cores the crew's helpers may run on: all that the process may use, but the one on which the caller is.

Left to itself, Linux often wakes a helper on the core of its caller, above all where there are few, and there the two take turns for 10 ms
and more while another core is idle. So before helpers are woken they're told to keep off it, if it's another than the last time.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
from numba import carray, njit

from miniort_numba.atomics import call_for_number, call_for_thread, words_at
from miniort_numba.options import PLAIN

_GET_CORE, _SET_CORES, _LAST, _CORES, _MASKS, _MASK_BYTES, _THREADS, _COUNT, _WORDS = range(9)


@njit(**PLAIN)
def keep_off_callers_core(placement: int) -> None:
    """Allow all helpers the other cores only. placement: `Placement.address`; 0 does nothing."""
    if placement == 0:
        return
    words = carray(words_at(placement), _WORDS)
    core = call_for_number(words[_GET_CORE])
    if core == words[_LAST] or core < 0 or core >= words[_CORES]:
        return
    words[_LAST] = core
    threads, mask = carray(words_at(words[_THREADS]), words[_COUNT]), words[_MASKS] + core * words[_MASK_BYTES]
    for index in range(threads.size):
        call_for_thread(words[_SET_CORES], threads[index], words[_MASK_BYTES], mask)


class Placement:
    """The helpers' threads, and the cores that they may use.

    `address`: where compiled code finds them; 0 where there's nothing to choose, or the system doesn't let us.
    """

    def __init__(self, most_helpers: int) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        library: Any = ctypes.CDLL(None) if len(cores) > 1 else None
        self._threads = np.zeros(most_helpers, np.int64)
        self._words = np.zeros(_WORDS, np.int64)
        self.address = 0
        if library is None or not hasattr(library, "sched_getcpu"):
            return
        count = cores[-1] + 1
        allowed = np.zeros((count, -(-count // 64) * 64), np.uint8)
        allowed[:, cores] = 1
        np.fill_diagonal(allowed, 0)
        self._masks = np.packbits(allowed, axis=1, bitorder="little")
        functions = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in (library.sched_getcpu, library.sched_setaffinity))
        self._words[:] = (*functions, -1, count, self._masks.ctypes.data, self._masks.shape[1], self._threads.ctypes.data, 0)
        self.address = self._words.ctypes.data

    def add(self, thread: int) -> None:
        """Look after one more thread, by the number that the system gave it."""
        self._threads[self._words[_COUNT]] = thread
        self._words[_COUNT] += 1
        self._words[_LAST] = -1
