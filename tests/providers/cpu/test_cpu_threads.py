"""Threads of the CPU provider: who does which range, errors, BLAS's own number, and sessions that run at the same time."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]

from miniort import InferenceSession, SessionOptions
from miniort.errors import ProviderError
from miniort.providers import default_threads
from miniort_cpu.kernels.matrix import matrix_product, product_into
from miniort_cpu.threads import (
    FIRST_RETREAT,
    LONGEST_RETREAT,
    RANGES_PER_THREAD,
    STALLS,
    STALLS_WITHIN,
    Retreat,
    Threads,
    blas_threads,
)


def found_blas_threads() -> list[int]:
    return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize(("size", "smallest"), [(0, 1), (1, 1), (7, 3), (1000, 1), (1000, 999), (1000, 300)])
def test_ranges_cover_the_work_once(number: int, size: int, smallest: int) -> None:
    threads, done, ranges = Threads(number), np.zeros(size, int), []

    def compute(start: int, end: int) -> None:
        done[start:end] += 1
        ranges.append((start, end))

    threads.split(size, smallest, compute)
    threads.close()
    assert (done == 1).all()
    assert len(ranges) <= number * RANGES_PER_THREAD
    assert len(ranges) == 1 or min(end - start for start, end in ranges) >= smallest


def test_ranges_are_done_side_by_side() -> None:
    threads, meeting = Threads(2), threading.Barrier(2)
    threads.split(2, 1, lambda start, end: meeting.wait(timeout=30))  # a single thread would wait for itself
    threads.close()


def test_an_error_reaches_the_caller_and_the_threads_go_on() -> None:
    threads = Threads(2)

    def fail(start: int, end: int) -> None:
        raise ValueError(f"range from {start}")

    for _ in range(3):
        with pytest.raises(ValueError, match="range from"):
            threads.split(100, 1, fail)
    total: list[int] = []
    threads.split(100, 1, lambda start, end: total.append(end - start))
    assert sum(total) == 100
    threads.close()


def test_products_are_divided_only_where_blas_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, calls = Threads(2), []
    threads.split_products(100, 1, lambda start, end: calls.append((start, end)))
    assert calls == [(0, 100)]
    monkeypatch.setattr(threads, "divides_products", lambda: True)
    calls.clear()
    threads.split_products(100, 1, lambda start, end: calls.append((start, end)))
    threads.close()
    assert len(calls) == 2 * RANGES_PER_THREAD
    assert sum(end - start for start, end in calls) == 100


def test_work_within_work_does_not_wait_for_a_free_thread() -> None:
    threads, done = Threads(2), []

    def outer(start: int, end: int) -> None:
        threads.split(64, 1, lambda first, last: done.append(last - first))

    threads.split(8, 1, outer)
    threads.close()
    assert sum(done) == 64 * 2 * RANGES_PER_THREAD


def test_helpers_end_with_their_owner() -> None:
    before = set(threading.enumerate())
    threads = Threads(3)
    threads.split(100, 1, lambda start, end: None)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del threads
    gc.collect()
    for each in helpers:
        each.join(timeout=10)
        assert not each.is_alive()


def test_helpers_raise_no_floating_point_warnings() -> None:
    threads, zeros = Threads(2), np.zeros(10)
    with np.errstate(all="ignore"):  # as around a plan
        threads.split(10, 1, lambda start, end: np.divide(1.0, zeros[start:end]))
    threads.close()


def test_the_default_is_bounded_by_the_users_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    cores = default_threads()
    assert cores >= 1
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert default_threads() == 1
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "100000")
    assert default_threads() == cores
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "all")
    assert default_threads() == cores


def test_blas_gets_its_own_number_back() -> None:
    with threadpool_limits(2, "blas"):
        before, blas = found_blas_threads(), blas_threads()
        blas.enter(1)
        assert set(found_blas_threads()) <= {1}
        blas.enter(2)  # a second session at the same time: one thread for each
        assert set(found_blas_threads()) <= {1}
        blas.leave()
        blas.leave()
        blas.enter(3)
        assert set(found_blas_threads()) <= {3}
        with blas.divided():
            assert set(found_blas_threads()) <= {1}
        assert set(found_blas_threads()) <= {3}
        blas.retreat()
        assert set(found_blas_threads()) <= {1}
        blas.leave()
        assert found_blas_threads() == before


def test_stalled_products_make_blas_retreat_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("miniort_cpu.threads.time.monotonic", lambda: now[0])
    retreat = Retreat()

    def stall(times: int = STALLS) -> None:
        for _ in range(times):
            retreat.note("row", 10_000_000, 0.012)

    retreat.note("row", 10_000_000, 0.001)
    retreat.note("row", 100_000_000, 0.021)  # long, but no longer than its size explains
    retreat.note("matrix", 1_000, 0.1)  # another kind
    retreat.note("row", 1_000, 0.001)  # slow for its size, but nothing to speak of
    stall(STALLS - 1)
    now[0] += STALLS_WITHIN
    stall(STALLS - 1)  # no more than that within the time
    assert not retreat.is_on()
    stall(1)
    assert retreat.is_on()
    now[0] += FIRST_RETREAT
    assert not retreat.is_on()
    stall()  # again at once, so it stays away longer
    now[0] += 1.5 * FIRST_RETREAT
    assert retreat.is_on()
    for _ in range(10):
        now[0] += LONGEST_RETREAT
        assert not retreat.is_on()
        stall()
    now[0] += 100
    stall()
    now[0] += FIRST_RETREAT
    assert not retreat.is_on()


def product_model(rows: int | str, inner: int, columns: int, seed: int = 0) -> tuple[onnx.ModelProto, np.ndarray]:
    weight = np.random.default_rng(seed).standard_normal((inner, columns), dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, inner])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, columns])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), weight


@pytest.mark.parametrize("rows", [1, 2, 40, 300])
def test_the_number_of_threads_changes_nothing_but_last_bits(rows: int) -> None:
    model, weight = product_model(rows, 768, 1024)
    x = np.random.default_rng(1).standard_normal((rows, 768), dtype=np.float32)
    for number in (1, 2, 3, None):
        session = InferenceSession(model, SessionOptions(intra_op_num_threads=number))
        first, second = (session.run(None, {"x": x})[0] for _ in range(2))
        np.testing.assert_array_equal(first, second)  # who does a range doesn't change how it's done
        np.testing.assert_allclose(first, x.astype(np.float64) @ weight, atol=2e-4)
        session.close()


@pytest.mark.parametrize("stored", ["by row", "by column"])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 768, 3072), (1, 3000, 500), (3, 512, 2048), (300, 256, 320), (1, 5, 300_000)])
def test_divided_products_are_right(monkeypatch: pytest.MonkeyPatch, stored: str, rows: int, inner: int, columns: int) -> None:
    threads = Threads(3)
    monkeypatch.setattr(threads, "divides_products", lambda: True)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((rows, inner)), rng.standard_normal((inner, columns))
    b = np.asfortranarray(b) if stored == "by column" else b
    out = np.full((rows, columns), np.nan)
    product_into(threads, a, b, out)
    threads.close()
    np.testing.assert_allclose(out, a @ b, atol=1e-10)


@pytest.mark.parametrize("batch", [((8,), (8,)), ((2, 6), (6,)), ((3, 1), (1, 4))])
def test_divided_batches_are_right(monkeypatch: pytest.MonkeyPatch, batch: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    threads = Threads(2)
    monkeypatch.setattr(threads, "divides_products", lambda: True)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((*batch[0], 90, 70)), rng.standard_normal((*batch[1], 70, 110))
    found = matrix_product(np.empty, a, b, threads)
    threads.close()
    np.testing.assert_allclose(found, a @ b, atol=1e-10)


def test_sessions_in_several_threads_give_the_right_results() -> None:
    models = [product_model("n", 512, 1024, seed) for seed in range(3)]
    sessions = [InferenceSession(model, SessionOptions(intra_op_num_threads=2)) for model, _ in models]
    before = found_blas_threads()

    def work(index: int) -> None:
        session, weight = sessions[index % 3], models[index % 3][1]
        x = np.random.default_rng(index).standard_normal((1 + index % 4 * 30, 512), dtype=np.float32)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ weight, atol=1e-3)

    with ThreadPoolExecutor(6) as executor:
        for finished in [executor.submit(work, index) for index in range(60)]:
            finished.result(timeout=60)
    assert found_blas_threads() == before
    for session in sessions:
        session.close()


def test_a_negative_number_is_an_error() -> None:
    with pytest.raises(ProviderError, match="must not be negative, found -2"):
        InferenceSession(product_model(1, 2, 3)[0], SessionOptions(intra_op_num_threads=-2))
