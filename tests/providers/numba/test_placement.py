"""Helpers are kept off the core of whoever wakes them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from miniort_numba.compiled import products
from miniort_numba.placement import Placement, keep_off_callers_core
from miniort_numba.team import hire


@pytest.fixture
def cores() -> Iterator[set[int]]:
    """All that this thread may use; it may be moved about in a test."""
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system doesn't say which cores a thread may use")
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_threads_go_elsewhere(cores: set[int]) -> None:
    placement, end = Placement(4), threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
        placement.add(thread.native_id or 0)
    try:
        for core in sorted(cores):
            os.sched_setaffinity(0, {core})
            keep_off_callers_core(placement.address)
            for thread in threads:
                assert os.sched_getaffinity(thread.native_id or 0) == (cores - {core} or cores)
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_nothing_to_choose(cores: set[int]) -> None:
    os.sched_setaffinity(0, {min(cores)})
    placement = Placement(1)
    assert placement.address == 0
    keep_off_callers_core(placement.address)


def test_helpers_that_are_woken(cores: set[int]) -> None:
    if len(cores) < 2:
        pytest.skip("there's one core only")
    crew = hire(3)
    core = max(cores)
    os.sched_setaffinity(0, {core})
    time.sleep(0.05)  # all helpers sleep, and wake for this
    a, b, y = np.ones((9, 300), np.float32), np.ones((300, 4000), np.float32), np.empty((9, 4000), np.float32)
    products.multiply_many_rows(crew.board, crew.helpers, products.BY_STRIPS, a, b, 1, 1, 0, 0, y)
    helpers = [thread for thread in threading.enumerate() if thread.name.startswith("miniort-numba-")]
    assert helpers
    for helper in helpers:
        assert core not in os.sched_getaffinity(helper.native_id or 0)
