"""Attention over keys and values in blocks gives what it gives over one array; who can't read blocks is handed one array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from miniort import InferenceSession
from miniort.generation.cache import Block, BlockedView
from miniort.kernels import ANY_PROVIDER, Kernel, NodeContext, Run
from miniort.types import Array

BATCH, KV_HEADS, GROUP, DIM, VALUE_DIM = 3, 2, 2, 5, 4


def split(array: Array, cuts: Sequence[int], by_row: bool) -> BlockedView:
    """An array cut along time; where `by_row`, rows are blocks of their own, and equal rows share one."""
    borders = [0, *sorted({cut for cut in cuts if 0 < cut < array.shape[2]}), array.shape[2]]
    blocks = []
    for start, end in pairwise(borders):
        part = array[:, :, start:end]
        if not by_row:
            blocks.append(Block(slice(0, len(array)), start, part))
        elif (part == part[:1]).all():
            blocks.append(Block(slice(0, len(array)), start, part[:1]))
        else:
            blocks += [Block(slice(row, row + 1), start, part[row : row + 1]) for row in range(len(array))]
    return BlockedView(array.shape, array.dtype, blocks)


class Blocker:
    """An op `test.Blocks(x) -> x`, in blocks where all readers take them; what was handed on is kept."""

    def __init__(self, cuts: Sequence[int], by_row: bool) -> None:
        self.cuts, self.by_row = cuts, by_row
        self.handed_on: list[Any] = []

    @property
    def kernel(self) -> Kernel:
        def compile_blocks(node: NodeContext) -> Run:
            def run(x: Array) -> Array | BlockedView:
                view = split(x, self.cuts, self.by_row)
                self.handed_on.append(view if 0 in node.block_outputs else np.asarray(view))
                return self.handed_on[-1]

            return run

        return Kernel(ANY_PROVIDER, "Blocks", "test", 1, 1, compile_blocks)


def attention_session(
    blocker: Blocker | None, dtype: int, inputs: Sequence[str], attributes: Mapping[str, Any], also_read: bool = False
) -> InferenceSession:
    types = {"mask": attributes.get("mask_type", dtype), "valid": TensorProto.INT64}
    infos = [helper.make_tensor_value_info(name, types.get(name, dtype), None) for name in inputs if name]
    names = {"k": "k", "v": "v"} if blocker is None else {"k": "kb", "v": "vb"}
    nodes = [] if blocker is None else [helper.make_node("Blocks", [name], [names[name]], domain="test") for name in "kv"]
    given_attributes = {name: value for name, value in attributes.items() if name != "mask_type"}
    nodes.append(helper.make_node("Attention", [names.get(name, name) for name in inputs], ["y"], **given_attributes))
    outputs = [helper.make_tensor_value_info("y", dtype, None)]
    if also_read:
        nodes.append(helper.make_node("Neg", [names["k"]], ["negative"]))
        outputs.append(helper.make_tensor_value_info("negative", dtype, None))
    graph = helper.make_graph(nodes, "attention", infos, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid("test", 1)], ir_version=10)
    return InferenceSession(model, providers=["cpu"], kernels=[] if blocker is None else [blocker.kernel])


def random_feeds(rng: np.random.Generator, queries: int, time: int, dtype: Any) -> dict[str, Array]:
    shapes = {"q": (KV_HEADS * GROUP, queries, DIM), "k": (KV_HEADS, time, DIM), "v": (KV_HEADS, time, VALUE_DIM)}
    feeds = {name: rng.standard_normal((BATCH, *shape)).astype(dtype) for name, shape in shapes.items()}
    shared = time // 2
    for name in "kv":
        feeds[name][:, :, :shared] = feeds[name][:1, :, :shared]  # a common prompt
    return feeds


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    queries=st.integers(1, 4),
    time=st.integers(1, 12),
    cuts=st.lists(st.integers(1, 11), max_size=4),
    by_row=st.booleans(),
    mask=st.sampled_from(["none", "bool", "float"]),
    causal=st.booleans(),
    softcap=st.sampled_from([0.0, 1.5]),
    valid=st.booleans(),
)
def test_blocks_are_the_array_that_they_stand_for(
    seed: int, queries: int, time: int, cuts: list[int], by_row: bool, mask: str, causal: bool, softcap: float, valid: bool
) -> None:
    rng = np.random.default_rng(seed)
    feeds = random_feeds(rng, queries, time, np.float32)
    inputs = ["q", "k", "v"]
    attributes: dict[str, Any] = {"is_causal": int(causal), "softcap": softcap}
    if mask != "none":
        seen = rng.random((BATCH, 1, queries, time)) < 0.7
        feeds["mask"] = seen if mask == "bool" else np.where(seen, rng.standard_normal(seen.shape), -np.inf).astype(np.float32)
        attributes["mask_type"] = TensorProto.BOOL if mask == "bool" else TensorProto.FLOAT
        inputs.append("mask")
    if valid:
        feeds["valid"] = rng.integers(1, time + 1, BATCH)
        inputs += [""] * (6 - len(inputs)) + ["valid"]
    [wanted] = attention_session(None, TensorProto.FLOAT, inputs, attributes).run(None, feeds)
    blocker = Blocker(cuts, by_row)
    [found] = attention_session(blocker, TensorProto.FLOAT, inputs, attributes).run(None, feeds)
    assert all(isinstance(each, BlockedView) for each in blocker.handed_on)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "number"), [(np.float16, TensorProto.FLOAT16), (ml_dtypes.bfloat16, TensorProto.BFLOAT16)])
def test_narrow_floats_in_blocks(dtype: Any, number: int) -> None:
    feeds = random_feeds(np.random.default_rng(1), 2, 9, dtype)
    [wanted] = attention_session(None, number, ["q", "k", "v"], {}).run(None, feeds)
    [found] = attention_session(Blocker([4, 7], by_row=True), number, ["q", "k", "v"], {}).run(None, feeds)
    assert found.dtype == wanted.dtype == dtype
    np.testing.assert_allclose(found.astype(np.float32), wanted.astype(np.float32), rtol=1e-2, atol=1e-2)


def test_blocks_for_the_many_queries_of_a_prompt() -> None:
    feeds = random_feeds(np.random.default_rng(3), 150, 150, np.float32)
    [wanted] = attention_session(None, TensorProto.FLOAT, ["q", "k", "v"], {"is_causal": 1}).run(None, feeds)
    [found] = attention_session(Blocker([64, 128], by_row=True), TensorProto.FLOAT, ["q", "k", "v"], {"is_causal": 1}).run(None, feeds)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_no_blocks_where_somebody_else_reads_them_too() -> None:
    feeds = random_feeds(np.random.default_rng(2), 1, 6, np.float32)
    blocker = Blocker([3], by_row=False)
    session = attention_session(blocker, TensorProto.FLOAT, ["q", "k", "v"], {}, also_read=True)
    _, negative = session.run(None, feeds)
    assert [type(each) for each in blocker.handed_on] == [np.ndarray, BlockedView]
    assert np.array_equal(negative, -feeds["k"])


def test_a_view_in_blocks_makes_an_array() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 1, 6, 2)
    view = split(array, [1, 4], by_row=True)
    assert (view.shape, view.ndim, view.dtype, view.nbytes) == (array.shape, 4, array.dtype, array.nbytes)
    assert np.array_equal(np.asarray(view), array)
    assert np.asarray(view, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="can't be one array without a copy"):
        np.asarray(view, copy=False)
