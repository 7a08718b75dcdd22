"""Threads that share the work of one kernel, and how many BLAS has.

NumPy lets go of Python's lock while it computes, so plain threads run its functions side by side. The work is cut into ranges that whoever
is free takes next: a helper that the system doesn't let run costs nothing, as the caller then does its ranges.

To wake a thread that sleeps takes 50 to 100 µs, to wait for its end as long again, and it begins with a cold cache: a pool of 1.3 ms takes
1.7 ms if it's divided. So kernels divide only what takes some milliseconds. BLAS's own threads are faster, as they wait for work in a
loop; but where another process wants their core, they wait for each other, and a product of 1 ms takes 10. So products are left to BLAS's
threads, and when they take far too long, BLAS is held to one thread for a while and products are divided over ours.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from miniort.kernels import UFUNC_BUFFER

Compute: TypeAlias = Callable[[int, int], object]
"""compute(start, end) does the part of the work from `start` to before `end`; what it returns is dropped."""

RANGES_PER_THREAD = 2
"""More ranges than threads, so that a thread that is slower than the others takes fewer of them."""

ALIGNMENT = 16
"""Long ranges begin at multiples of this: BLAS rounds the last few rows or columns of a product otherwise than the rest, and so a product
gives the same numbers however many threads share it."""

STALL = 2e-3
"""Seconds that a product may take longer than is usual for its size before that means that a thread of BLAS couldn't run."""

SLOWEST = 2.5
"""How many times as long as the fastest one a product of the same work may take as a matter of course."""

STALLS, STALLS_WITHIN = 3, 0.25
"""So many stalls within so many seconds mean that another process wants the core. A single one may be the first reading of memory, or a
processor that slept; to retreat for it cost a third of the speed of the steps that followed."""

FIRST_RETREAT, LONGEST_RETREAT = 0.25, 4.0
"""Seconds for which BLAS is held to one thread after such stalls: twice as long after each that follows soon, up to the longest."""


class Threads:
    """A number of threads, the caller's own included, that share ranges of work. Helpers start when they're first needed.

    May be used from several threads at once, and from within shared work.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.blas_retreat = Retreat()
        self._helpers: _Helpers | None = None
        self._lock = threading.Lock()

    def ranges(self, size: int, smallest: int) -> int:
        """How many ranges `split` makes of that much work; 1 where it isn't worth it."""
        return max(1, min(self.number * RANGES_PER_THREAD, size // smallest)) if self.number > 1 else 1

    def split(self, size: int, smallest: int, compute: Compute) -> None:
        """Call `compute(start, end)` for ranges that cover 0 … size, some of them at the same time, and return when all are done.

        BLAS has one thread meanwhile, so that a call of it within a range stays in its own thread.
        Ranges hold at least `smallest`: choose it so that the work of one takes some 500 µs, or little will be won. What a call raises is
        raised here.
        """
        number = self.ranges(size, smallest)
        if number < 2:
            compute(0, size)
            return
        unit = ALIGNMENT if size >= 4 * ALIGNMENT * number else 1
        job = _Job(compute, [*(size * index // number // unit * unit for index in range(number)), size])
        helpers = self._helpers
        if helpers is None or helpers.process != os.getpid():  # a fork has no threads but the one that made it
            helpers = self._start()
        with blas_threads().divided():
            for _ in range(min(self.number, number) - 1):
                helpers.jobs.put(job)
            job.work()
            job.done.acquire()
        if job.error is not None:
            raise job.error

    def _start(self) -> _Helpers:
        with self._lock:
            if self._helpers is None or self._helpers.process != os.getpid():
                self._helpers = _Helpers(self.number - 1)
                weakref.finalize(self, self._helpers.stop)
            return self._helpers

    def divides_products(self) -> bool:
        """Whether a product of matrices is to be divided over these threads, as BLAS has only one now."""
        return self.number > 1 and (self.blas_retreat.is_on() or not blas_threads().is_alone)

    def split_products(self, size: int, smallest: int, compute: Compute) -> None:
        """`split` where BLAS has one thread only; else one call, in which BLAS divides each product.

        While BLAS's threads wait for the next product, they take the cores that ours would run on.
        """
        if self.divides_products():
            self.split(size, smallest, compute)
        else:
            compute(0, size)

    def close(self) -> None:
        """End the helpers. They start again if there's more work."""
        with self._lock:
            if self._helpers is not None:
                self._helpers.stop()
                self._helpers = None


class _Job:
    """One split: whoever takes the last range off, or ends it, needn't be who started it."""

    __slots__ = ("bounds", "compute", "done", "error", "finished", "taken")

    def __init__(self, compute: Compute, bounds: list[int]) -> None:
        self.compute = compute
        self.bounds = bounds
        self.taken = count()  # `next` of it is one step of the interpreter, so no two threads get the same number
        self.finished = count(1)
        self.done = threading.Lock()
        self.done.acquire()
        self.error: BaseException | None = None

    def work(self) -> None:
        bounds, number = self.bounds, len(self.bounds) - 1
        while (index := next(self.taken)) < number:
            try:
                self.compute(bounds[index], bounds[index + 1])
            except BaseException as error:  # it's raised again by `split`, in the caller's thread
                self.error = error
            if next(self.finished) == number:
                self.done.release()


class _Helpers:
    """Threads that take jobs from a queue until they're given None."""

    def __init__(self, number: int) -> None:
        self.process = os.getpid()
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._number = number
        for index in range(number):
            threading.Thread(target=_help, args=(self.jobs,), name=f"miniort-cpu-{index + 1}", daemon=True).start()

    def stop(self) -> None:
        if self.process == os.getpid():
            for _ in range(self._number):
                self.jobs.put(None)


def _help(jobs: SimpleQueue[_Job | None]) -> None:
    with np.errstate(all="ignore"):  # as in the thread that runs the plan: these are each thread's own settings
        np.setbufsize(UFUNC_BUFFER)
        while (job := jobs.get()) is not None:
            job.work()
            del job  # or its arrays would live until the next one


class Retreat:
    """Whether products are better divided over our threads than over BLAS's for now, by how long the last ones took."""

    def __init__(self) -> None:
        self._best_rates: dict[str, float] = {}  # work per second of the fastest product of each kind so far
        self._stalls: list[float] = []  # when the last ones were
        self._until = 0.0
        self._pause = FIRST_RETREAT

    def is_on(self) -> bool:
        """Whether BLAS is to have one thread."""
        return self._until > 0 and time.monotonic() < self._until

    def note(self, kind: str, work: int, seconds: float) -> None:
        """A product by BLAS's threads took that long for that much work. Begins a retreat if several were far too long.

        kind: products of one kind take time in proportion to their work, more or less.
        """
        rate, best = work / max(seconds, 1e-9), self._best_rates.get(kind, 0.0)
        if rate >= best:
            self._best_rates[kind] = rate
        elif seconds > STALL + SLOWEST * work / best:
            now = time.monotonic()
            self._stalls = [*(each for each in self._stalls if now - each < STALLS_WITHIN), now]
            if len(self._stalls) < STALLS:
                return
            self._stalls.clear()
            soon = now - self._until < 2 * self._pause
            self._pause = min(2 * self._pause, LONGEST_RETREAT) if soon else FIRST_RETREAT
            self._until = now + self._pause
            blas_threads().retreat()


class BLASThreads:
    """The number of threads that BLAS has. It's the whole process's, so this is one object for all, see `blas_threads`.

    While sessions run, it's what they ask for: one alone gets the number that it wants, several at once get one each, and use ours.
    Afterwards BLAS has as many as before.
    """

    def __init__(self) -> None:
        from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

        self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        self._lock = threading.Lock()
        self._sessions = 0
        self._divided = 0
        self._wanted = 1
        self._before: list[int] = []
        self._now = 0

    def enter(self, number: int) -> None:
        """A session begins to run, and wants that many."""
        with self._lock:
            self._sessions += 1
            if self._sessions == 1:
                self._before = [library.get_num_threads() for library in self._libraries]
                self._now = max(self._before, default=1)
                self._wanted = number
            self._set()

    def leave(self) -> None:
        """A session has run."""
        with self._lock:
            self._sessions -= 1
            if self._sessions == 0:
                for library, number in zip(self._libraries, self._before, strict=True):
                    if number != self._now:
                        _set_threads(library, number)
            else:
                self._set()

    def retreat(self) -> None:
        """BLAS has one thread, until the sessions that are running have run."""
        with self._lock:
            self._wanted = 1
            if self._sessions:
                self._set()

    @contextmanager
    def divided(self) -> Iterator[None]:
        """Inside, BLAS has one thread, as each of ours calls it."""
        with self._lock:
            self._divided += 1
            if self._sessions:
                self._set()
        try:
            yield
        finally:
            with self._lock:
                self._divided -= 1
                if self._sessions:
                    self._set()

    @property
    def is_alone(self) -> bool:
        """Whether a single session is running, and isn't in work that is divided over our threads."""
        return self._sessions < 2 and not self._divided

    def _set(self) -> None:
        number = self._wanted if self.is_alone else 1
        if number != self._now:
            for library in self._libraries:
                _set_threads(library, number)
            self._now = number


def _set_threads(library: Any, number: int) -> None:
    """Give a library that many threads, from whichever thread.

    From threadpoolctl 3.8 on only the first thread that did so may set OpenBLAS's number, and calls of others do nothing, until it's told
    that this thread is done with it. `BLASThreads` has a lock of its own for that.
    """
    release = getattr(library, "clear_controlling_thread", None)
    if release is not None:
        release(force=True)
    library.set_num_threads(number)
    if release is not None:
        release(force=True)


@cache
def blas_threads() -> BLASThreads:
    """The process's one `BLASThreads`."""
    return BLASThreads()


class Running:
    """Entered around each run of a session: BLAS has the session's number of threads in it, or one where that's better."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._blas = blas_threads()

    def __enter__(self) -> None:
        self._blas.enter(1 if self._threads.blas_retreat.is_on() else self._threads.number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._blas.leave()


ALONE = Threads(1)
"""For kernels that are given a provider without threads."""


def threads_of(provider: Any) -> Threads:
    """The threads that kernels of a provider may share their work with."""
    threads: Threads = getattr(provider, "threads", ALONE)
    return threads
