"""Joining a cache to a graph: an append inside of the graph where that's possible, views and presents where it isn't."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from miniort.generation import Decoder, DecoderSource, Generator, generate
from miniort.plugins import PluginManager

HEADS, DIM, VOCABULARY = 2, 8, 40


def attention_decoder(style: str) -> onnx.ModelProto:
    """One layer of attention with an embedding and a head; `style` says how its past is written. Every style computes the same."""
    rng = np.random.default_rng(3)
    width = HEADS * DIM

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    packed = style == "packed"
    initializers = [
        weight("table", VOCABULARY, width),
        weight("wq", width, width),
        weight("wk", width, width),
        weight("wv", width, width),
        weight("head", width, VOCABULARY),
        *(
            numpy_helper.from_array(np.array(value), name)
            for name, value in {
                "split_heads": [0, 0, HEADS, DIM],
                "merge_heads": [0, 0, width],
                "zero": 0,
                "one": 1,
                "two": 2,
                "axis1": [1],
            }.items()
        ),
    ]
    node = helper.make_node
    nodes = [node("Gather", ["table", "input_ids"], ["x"])]
    for name in "qkv":
        nodes += [
            node("MatMul", ["x", f"w{name}"], [f"{name}_flat"]),
            node("Reshape", [f"{name}_flat", "split_heads"], [f"{name}_split"]),
            node("Transpose", [f"{name}_split"], [name], perm=[0, 2, 1, 3]),
        ]
    cache_shape = ["batch", HEADS, "past", DIM]
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])]
    if packed:
        inputs.append(helper.make_tensor_value_info("past_0", TensorProto.FLOAT, [2, *cache_shape]))
        nodes += [
            node("Gather", ["past_0", "zero"], ["past_key_values.0.key"], axis=0),
            node("Gather", ["past_0", "one"], ["past_key_values.0.value"], axis=0),
        ]
        outputs = [helper.make_tensor_value_info("present_0", TensorProto.FLOAT, [2, "batch", HEADS, "total", DIM])]
    else:
        inputs += [helper.make_tensor_value_info(f"past_key_values.0.{kind}", TensorProto.FLOAT, cache_shape) for kind in ("key", "value")]
        outputs = [
            helper.make_tensor_value_info(f"present.0.{kind}", TensorProto.FLOAT, ["batch", HEADS, "total", DIM])
            for kind in ("key", "value")
        ]
    # Query i sees keys 0 … past + i.
    past_length = [node("Shape", ["past_key_values.0.key"], ["past_length_1"], start=2, end=3)]
    if style == "whole shape":
        past_length = [
            node("Shape", ["past_key_values.0.key"], ["past_shape"]),
            node("Slice", ["past_shape", "slice_start", "slice_end"], ["past_length_1"]),
        ]
        initializers += [numpy_helper.from_array(np.array([2]), "slice_start"), numpy_helper.from_array(np.array([3]), "slice_end")]
    nodes += [
        *past_length,
        node("Squeeze", ["past_length_1"], ["past_length"]),
        node("Shape", ["input_ids"], ["new_1"], start=1, end=2),
        node("Squeeze", ["new_1"], ["new"]),
        node("Add", ["past_length", "new"], ["total"]),
        node("Range", ["past_length", "total", "one"], ["query_positions"]),
        node("Range", ["zero", "total", "one"], ["key_positions"]),
        node("Unsqueeze", ["query_positions", "axis1"], ["query_column"]),
        node("LessOrEqual", ["key_positions", "query_column"], ["mask"]),
    ]
    if style == "attention":
        nodes.append(
            node(
                "Attention",
                ["q", "k", "v", "mask", "past_key_values.0.key", "past_key_values.0.value"],
                ["mixed", "present.0.key", "present.0.value"],
            )
        )
    elif style == "causal attention":
        nodes.append(
            node(
                "Attention",
                ["q", "k", "v", "", "past_key_values.0.key", "past_key_values.0.value"],
                ["mixed", "present.0.key", "present.0.value"],
                is_causal=1,
            )
        )
    else:
        axis = -2 if style == "negative axis" else 2
        nodes += [
            node("Concat", ["past_key_values.0.key", "k"], ["present.0.key"], axis=axis),
            node("Concat", ["past_key_values.0.value", "v"], ["present.0.value"], axis=axis),
            node("Attention", ["q", "present.0.key", "present.0.value", "mask"], ["mixed"]),
        ]
        if packed:
            nodes += [
                node("Unsqueeze", ["present.0.key", "axis0"], ["packed_key"]),
                node("Unsqueeze", ["present.0.value", "axis0"], ["packed_value"]),
                node("Concat", ["packed_key", "packed_value"], ["present_0"], axis=0),
            ]
            initializers.append(numpy_helper.from_array(np.array([0]), "axis0"))
        if style == "past read twice":
            nodes += [node("ReduceSum", ["past_key_values.0.key"], ["history"], keepdims=0)]
    nodes += [
        node("Transpose", ["mixed"], ["mixed_split"], perm=[0, 2, 1, 3]),
        node("Reshape", ["mixed_split", "merge_heads"], ["merged"]),
    ]
    if style == "past read twice":
        nodes += [node("Mul", ["history", "nothing"], ["added"]), node("Add", ["merged", "added"], ["sum"])]
        initializers.append(numpy_helper.from_array(np.array(0, np.float32), "nothing"))
    nodes.append(node("MatMul", ["sum" if style == "past read twice" else "merged", "head"], ["logits"]))
    outputs.insert(0, helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY]))
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


JOINED = {
    "concat": "Concat replaced by an append to the cache",
    "negative axis": "Concat replaced by an append to the cache",
    "whole shape": "Concat replaced by an append to the cache",
    "attention": "Attention's past replaced by an append to the cache",
}
NOT_JOINED = {
    "causal attention": "causal by attribute",
    "packed": "packed",
    "past read twice": "read in several places",
}


@pytest.mark.parametrize("style", [*JOINED, *NOT_JOINED])
def test_every_way_computes_the_same(style: str, tmp_path: Path, plugins: PluginManager) -> None:
    onnx.save(attention_decoder(style), tmp_path / "model.onnx")
    decoder = Decoder(DecoderSource("test", (tmp_path / "model.onnx",)), plugins=plugins)
    join = decoder.joins["decoder"]
    if style in JOINED:
        assert (join.appends, join.reason) == (True, JOINED[style])
        assert [each.name for each in decoder.sessions["decoder"].get_outputs()] == ["logits"], "nothing is left to be copied out"
    else:
        assert not join.appends
        assert NOT_JOINED[style] in join.reason
    uncached = Generator(decoder, None, decoder.new_sampler(), end_tokens=())
    uncached.append_tokens([3, 1, 4, 1, 5])
    expected = list(generate(uncached, 12))
    generator = Generator(decoder, decoder.new_cache(), decoder.new_sampler(), end_tokens=(), prefill_chunk=2)
    generator.append_tokens([3, 1, 4, 1, 5])
    found = list(generate(generator, 12))
    assert [step.ids.tolist() for step in found] == [step.ids.tolist() for step in expected]
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left.logits, right.logits, atol=1e-4, rtol=0)


def test_all_styles_are_one_model(tmp_path: Path, plugins: PluginManager) -> None:
    first = []
    for style in [*JOINED, *NOT_JOINED]:
        path = tmp_path / f"{style}.onnx"
        onnx.save(attention_decoder(style), path)
        decoder = Decoder(DecoderSource("test", (path,)), plugins=plugins)
        tokens = np.array([[3, 1, 4, 1, 5]])
        first.append(decoder.forward(tokens, np.ones_like(tokens), decoder.new_cache()))
    for each in first[1:]:
        np.testing.assert_allclose(each, first[0], atol=1e-4, rtol=0)
