"""Inputs that are made up for a graph: any graph's by its declared types and shapes, a decoder's so that they mean something."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from miniort import InferenceSession
from miniort.errors import InputError
from miniort.generation.decoder_feeds import StepSizes, decoder_feeds, decoder_sizes
from miniort.model.loading import load_model
from miniort.plugins import PluginManager
from miniort.runtime.random_feeds import random_feeds, with_given


def graph_of(*inputs: onnx.ValueInfoProto) -> onnx.ModelProto:
    nodes = [helper.make_node("Identity", [inputs[0].name], ["y"])]
    graph = helper.make_graph(nodes, "g", list(inputs), [onnx.ValueInfoProto(name="y")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_sizes_types_and_seed() -> None:
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["batch", 3, None]),
        helper.make_tensor_value_info("ids", TensorProto.INT32, ["batch", "time"]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
    ]
    graph = load_model(graph_of(*inputs)).graph
    feeds = random_feeds(graph, {"batch": 2, "time": 5}, seed=3)
    assert {name: (each.shape, each.dtype.name) for name, each in feeds.items()} == {
        "x": ((2, 3, 1), "float16"),
        "ids": ((2, 5), "int32"),
        "flag": ((), "bool"),
    }
    assert set(np.unique(feeds["ids"])) <= {0, 1}
    again = random_feeds(graph, {"batch": 2, "time": 5}, seed=3)
    assert all(np.array_equal(feeds[name], again[name]) for name in feeds)
    assert with_given(feeds, {"flag": np.array(True)}, graph)["flag"]


def test_what_can_not_be_made_up() -> None:
    text = load_model(graph_of(helper.make_tensor_value_info("t", TensorProto.STRING, [1]))).graph
    with pytest.raises(InputError, match=r"input 't' .* can't be made up; give it as a file"):
        random_feeds(text, {}, seed=0)
    assert random_feeds(text, {}, seed=0, given=["t"]) == {}
    with pytest.raises(InputError, match="the model has no input 'z'; its inputs: t"):
        with_given({}, {"z": 1}, text)


def test_a_decoder_s_feeds_run(data: Path, plugins: PluginManager) -> None:
    path = data / "fixtures" / "llama_optimum" / "model.onnx"
    found = decoder_feeds([load_model(path).graph], StepSizes(batch=2, tokens=3, past=4), seed=0)
    assert found is not None
    (feeds,) = found
    assert feeds["input_ids"].max() > 1, "tokens are of the whole vocabulary"
    assert feeds["attention_mask"].shape == (2, 7)
    assert feeds["position_ids"].tolist() == [[4, 5, 6]] * 2
    logits = InferenceSession(path, plugins=plugins).run(["logits"], feeds)[0]
    assert logits.shape[:2] == (2, 3)
    assert np.isfinite(logits).all()


def test_a_graph_that_is_no_decoder_has_none() -> None:
    assert decoder_feeds([load_model(graph_of(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]))).graph], StepSizes(), 0) is None


@pytest.mark.parametrize(
    ("sizes", "message"), [({"rows": 2}, "its sizes: batch, tokens, past"), ({"batch": 0}, "must be at least 1, found 0")]
)
def test_wrong_sizes_of_a_decoder(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decoder_sizes(sizes)
