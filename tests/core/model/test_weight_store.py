"""The weight store: one copy of a weight, and of whatever is made from it, for all sessions that share the store."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import parser

from miniort import InferenceSession, WeightStore
from miniort.kernels import ANY_PROVIDER, Kernel, NodeContext, Run
from miniort.types import Array

PREFILL = """<ir_version: 10, opset_import: ["": 18, "test": 1]>
prefill (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2] b = {1, 1}>
{ bias = Mul(b, b)  h = test.Packed(x, w)  y = Add(h, bias) }"""
DECODE = """<ir_version: 10, opset_import: ["": 18, "test": 1]>
decode (float[N, 2] token) => (float[N, 2] y) <float[2, 2] other_name = {1, 2, 3, 4}, float[2] c = {1, 1}>
{ offset = Mul(c, c)  h = test.Packed(token, other_name)  y = Add(h, offset) }"""


class Packed:
    """A matrix product whose weight is packed once."""

    def __init__(self) -> None:
        self.packings: list[Array] = []

    def kernel(self) -> Kernel:
        def compile_packed(node: NodeContext) -> Run:
            packed = node.prepare(1, "transposed", self.pack)
            return lambda x, _: x @ packed.T

        return Kernel(ANY_PROVIDER, "Packed", "test", 1, None, compile_packed)

    def pack(self, weight: Array) -> Array:
        packed = np.ascontiguousarray(weight.T)
        self.packings.append(packed)
        return packed


def constants(session: InferenceSession) -> list[Array]:
    return [value for value in session.plan.initial if isinstance(value, np.ndarray)]


def test_two_sessions_over_one_store_hold_everything_once() -> None:
    store, op = WeightStore(), Packed()
    first = InferenceSession(parser.parse_model(PREFILL), weights=store, kernels=[op.kernel()])
    second = InferenceSession(parser.parse_model(DECODE), weights=store, kernels=[op.kernel()])
    assert len(op.packings) == 1, "packed once"
    x = np.array([[1, 1]], np.float32)
    assert first.run(None, {"x": x})[0].tolist() == second.run(None, {"token": x})[0].tolist() == [[5, 7]]
    assert {id(array) for array in constants(first)} == {id(array) for array in constants(second)}
    folded = [array for array in constants(first) if array.shape == (2,)]
    assert len(folded) == 1, "the folded bias"
    assert all(not array.flags.writeable for array in constants(first))


def test_stores_share_nothing() -> None:
    op = Packed()
    first, second = (InferenceSession(parser.parse_model(PREFILL), kernels=[op.kernel()]) for _ in range(2))
    assert len(op.packings) == 2
    assert not {id(array) for array in constants(first)} & {id(array) for array in constants(second)}


def test_equal_weights_of_one_model_are_held_once() -> None:
    text = PREFILL.replace("float[2] b = {1, 1}>", "float[2] b = {1, 1}, float[2] b2 = {1, 1}>").replace("Mul(b, b)", "Mul(b, b2)")
    store = WeightStore()
    InferenceSession(parser.parse_model(text), weights=store, kernels=[Packed().kernel()])
    assert store.nbytes == 16 + 16 + 8 + 8  # w, w packed, b once, and the folded bias


def test_what_is_not_equal_is_told_apart() -> None:
    store = WeightStore()
    base = np.array([0, 1], np.float32)
    different = [
        base,
        base.reshape(2, 1),
        base.view(np.int32),
        np.array([-0.0, 1], np.float32),
        np.array([0, 1], np.int8),
        np.array([0, 1], np.uint8),
        np.array([0, 1], ml_dtypes.int4),
        np.array([0, 1], bool),
        np.array(["0", "1"], object),
        np.zeros((0,), np.float32),
        np.zeros((0, 2), np.float32),
        np.float32(0)[...],
    ]
    assert len({id(store.intern(array)) for array in different}) == len(different)
    assert store.intern(base.copy()) is store.intern(base)
    assert store.intern(np.array(["0", "1"], object)) is store.intern(different[8])
    assert store.intern(np.asfortranarray(np.eye(3))) is store.intern(np.eye(3))


def test_an_array_of_the_caller_stays_writeable() -> None:
    array = np.ones(3)
    kept = WeightStore().intern(array)
    assert array.flags.writeable
    assert not kept.flags.writeable


def test_made_once_from_many_threads() -> None:
    store, made = WeightStore(), []
    weight = store.intern(np.ones(8))
    start = threading.Barrier(4)
    results: list[Any] = []

    def ask() -> None:
        start.wait()
        results.append(store.derive(weight, "label", lambda array: made.append(1) or object()))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(map(id, results))) == 1


def test_labels_tell_packings_apart() -> None:
    store = WeightStore()
    weight = store.intern(np.ones(8))
    assert store.derive(weight, "double", lambda array: array * 2)[0] == 2
    assert store.derive(weight, "triple", lambda array: array * 3)[0] == 3
    assert store.derive(np.ones(8), "double", lambda array: pytest.fail("made already"))[0] == 2


def test_a_store_that_is_empty_is_still_the_one_that_was_given() -> None:
    store = WeightStore()
    session = InferenceSession(parser.parse_model(PREFILL), weights=store, kernels=[Packed().kernel()])
    assert session.weights is store


def test_a_fold_that_one_session_could_not_make_is_made_by_another() -> None:
    text = """<ir_version: 10, opset_import: ["": 18, "test": 1]>
    g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { v = test.Twice(w)  y = Add(x, v) }"""
    store = WeightStore()
    kernel = Kernel(ANY_PROVIDER, "Twice", "test", 1, None, lambda node: lambda x: x + x)
    proto: onnx.ModelProto = parser.parse_model(text)
    without = InferenceSession(proto, weights=store)
    assert [node.op for node in without.explain().nodes] == ["test.Twice", "Add"]
    session = InferenceSession(proto, weights=store, kernels=[kernel])
    assert [node.op for node in session.explain().nodes] == ["Add"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells how much of a process's memory is of files")
def test_a_mapped_weight_that_is_released_takes_no_memory(tmp_path: Path) -> None:
    def of_files() -> int:
        found = re.search(r"^RssFile:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10

    path, shape = tmp_path / "weights.bin", (4 << 20,)
    np.arange(shape[0], dtype=np.float32).tofile(path)
    store = WeightStore()
    weight = store.map_file(path, 0, None, np.dtype(np.float32), shape)
    total, read = weight.sum(dtype=np.float64), of_files()
    store.release(weight)
    assert read - of_files() > 15 << 20
    assert weight.sum(dtype=np.float64) == total, "whoever else uses it still has it"
    assert store.map_file(path, 0, None, np.dtype(np.float32), shape) is weight


def test_places_in_files(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    np.arange(8, dtype=np.float32).tofile(path)
    store = WeightStore()
    mapped = store.map_file(path, 8, None, np.dtype(np.float32), (2, 3))
    other = store.intern(np.ones(3, np.float32))
    assert store.place_in_file(mapped) == (str(path.resolve()), 8)
    assert store.place_in_file(other) is None
    assert store.find(store.key(other)) is other
    assert store.find(("no", "such")) is None
    assert store.place_in_file(np.ones(3, np.float32)) is None
    assert {id(array) for array in store.arrays()} == {id(mapped), id(other)}
