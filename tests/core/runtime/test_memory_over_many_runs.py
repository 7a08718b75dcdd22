"""Memory stays flat over many runs of many shapes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniort import InferenceSession

Build = Callable[..., InferenceSession]
STATUS = Path("/proc/self/statm")


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    return int(STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATUS.exists(), reason="needs Linux's /proc")
def test_two_thousand_runs_over_random_shapes(build: Build) -> None:
    """Values of up to 1.6 MB, so a leak of one in each run would be a gigabyte."""
    session = build(
        """g (float[N, M] x, int64 trips, bool c) => (float[A, B] y, float[B, A] t) {
            a = Add(x, x)  s = Softmax(a)  b = Neg(s)
            l = Loop(trips, , b) <body = o (int64 i, bool going, float[N, M] v) => (bool still, float[N, M] n)
                { still = Identity(going)  n = Add(v, a) }>
            y = If(c) <then_branch = th () => (float[N, M] p) { p = Mul(l, x) }, else_branch = el () => (float[N, M] q) { q = Exp(b) }>
            t = Transpose(y)
        }"""
    )
    rng = np.random.default_rng(0)

    def run() -> None:
        n, m = (int(size) for size in rng.integers(1, 640, 2))
        feeds: dict[str, Any] = {"x": np.zeros((n, m), np.float32), "trips": np.array(int(rng.integers(0, 3))), "c": np.array(n % 2 == 0)}
        y, t = session.run(None, feeds)
        assert y.shape == t.shape[::-1] == (n, m)

    for _ in range(300):
        run()
    before = resident()
    for _ in range(2000):
        run()
    assert resident() - before < 48 << 20
    pool = session.providers[0].provider.memory()
    assert pool.active == 0
    assert pool.reserved < 64 << 20
