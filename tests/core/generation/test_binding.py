"""Binding a decoder's inputs and outputs, whatever its exporter called them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from miniort.errors import BindingError
from miniort.generation import DecoderBinding, bind_decoder
from miniort.model.loading import load_model

Names = Callable[[int, str], str]


def graph(
    past: Names | None,
    present: Names,
    layers: int = 2,
    *,
    heads: int = 4,
    dim: int | str = 16,
    ids: str = "input_ids",
    more_inputs: Sequence[onnx.ValueInfoProto] = (),
    logits: str = "logits",
    join: str = "Concat",
    dtype: int = TensorProto.FLOAT,
    order: Sequence[str] = ("key", "value"),
) -> ir.Graph:
    """A graph with the inputs and outputs of a decoder; what it computes is not the point."""
    inputs = [helper.make_tensor_value_info(ids, TensorProto.INT64, ["batch", "sequence"]), *more_inputs]
    outputs = [helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["batch", "sequence", 50])]
    nodes = [
        helper.make_node("Gather", ["table", ids], [logits]),
        helper.make_node("RandomNormal", [], ["new"], shape=[1, heads, 1, 16], dtype=dtype),
    ]
    pairs = [(layer, kind) for layer in range(layers) for kind in ("key", "value")]
    if order == ("all keys", "all values"):
        pairs.sort(key=lambda pair: pair[1])
    for layer, kind in pairs:
        outputs.append(helper.make_tensor_value_info(present(layer, kind), dtype, ["batch", heads, "total", dim]))
        if past is None:
            nodes.append(helper.make_node("Identity", ["new"], [present(layer, kind)]))
            continue
        inputs.append(helper.make_tensor_value_info(past(layer, kind), dtype, ["batch", heads, "past", dim]))
        axis = {"axis": 2} if join == "Concat" else {}
        given = [past(layer, kind), "new"] if join != "Identity" else ["new"]
        nodes.append(helper.make_node(join, given, [present(layer, kind)], **axis))
    table = helper.make_tensor("table", TensorProto.FLOAT, [3, 50], [0.0] * 150)
    model = helper.make_model(helper.make_graph(nodes, "decoder", inputs, outputs, [table]), opset_imports=[helper.make_opsetid("", 18)])
    return load_model(model).graph


def bind(*graphs: ir.Graph, **overrides: str) -> DecoderBinding:
    return bind_decoder(graphs, overrides)


NAMINGS: dict[str, tuple[Names, Names]] = {
    "optimum": (lambda layer, kind: f"past_key_values.{layer}.{kind}", lambda layer, kind: f"present.{layer}.{kind}"),
    "short": (lambda layer, kind: f"past.{layer}.{kind[0]}", lambda layer, kind: f"present.{layer}.{kind[0]}"),
    "state": (lambda layer, kind: f"layer_cache.{layer}.{kind}_state", lambda layer, kind: f"new_layer_cache.{layer}.{kind}_state"),
    "underscores": (lambda layer, kind: f"past_layer_{layer}_{kind[0]}", lambda layer, kind: f"present_layer_{layer}_{kind[0]}"),
    "run together": (lambda layer, kind: f"layer{layer}_{kind}", lambda layer, kind: f"layer{layer}_{kind}_out"),
    "digits in the model's name": (
        lambda layer, kind: f"qwen2_5.layers.{layer}.{kind}",
        lambda layer, kind: f"qwen2_5.layers.{layer}.{kind}.present",
    ),
    "pytree": (lambda layer, kind: f"past_key_values_{kind}_cache_{layer}", lambda layer, kind: f"cat_{2 * layer + (kind == 'value')}"),
}


@pytest.mark.parametrize("join", ["Concat", "Identity"])
@pytest.mark.parametrize("order", [("key", "value"), ("all keys", "all values")])
@pytest.mark.parametrize("naming", NAMINGS)
def test_namings(naming: str, order: Sequence[str], join: str) -> None:
    past, present = NAMINGS[naming]
    layers = 11  # two digits, so that an order by text would be wrong
    binding = bind(graph(past, present, layers, order=order, join=join))
    assert [(each.key, each.value) for each in binding.decode.past] == [(past(i, "key"), past(i, "value")) for i in range(layers)]
    assert [(each.key, each.value) for each in binding.decode.present] == [(present(i, "key"), present(i, "value")) for i in range(layers)]
    assert (binding.layers, binding.kv_heads, binding.head_dim, binding.value_head_dim) == (layers, 4, 16, 16)
    assert binding.prefill is None
    assert binding.decode.tokens == "input_ids"
    assert binding.decode.logits == "logits"


def test_one_layer_of_a_model_with_digits_in_its_name() -> None:
    binding = bind(graph(*NAMINGS["digits in the model's name"], layers=1))
    assert binding.decode.past[0].key == "qwen2_5.layers.0.key"


def test_outputs_that_only_the_flow_of_data_tells_apart() -> None:
    """The present's names count backwards: only what each past flows into is right."""
    past, _ = NAMINGS["optimum"]
    binding = bind(graph(past, lambda layer, kind: f"cat_{9 - 2 * layer - (kind == 'value')}"))
    assert [(each.key, each.value) for each in binding.decode.present] == [("cat_9", "cat_8"), ("cat_7", "cat_6")]


def test_packed_cache() -> None:
    cache = [helper.make_tensor_value_info(f"past_{i}", TensorProto.FLOAT, [2, "batch", 4, "past", 16]) for i in range(2)]
    outputs = [helper.make_tensor_value_info(f"present_{i}", TensorProto.FLOAT, [2, "batch", 4, "total", 16]) for i in range(2)]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["batch", "sequence"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", 50])
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["logits"])]
    nodes += [helper.make_node("Concat", [f"past_{i}", f"past_{i}"], [f"present_{i}"], axis=3) for i in range(2)]
    table = helper.make_tensor("table", TensorProto.FLOAT, [3, 50], [0.0] * 150)
    made = helper.make_graph(nodes, "decoder", [ids, *cache], [logits, *outputs], [table])
    binding = bind(load_model(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)])).graph)
    assert all(layer.packed for layer in binding.decode.past)
    assert [layer.key for layer in binding.decode.present] == ["present_0", "present_1"]
    assert (binding.kv_heads, binding.head_dim) == (4, 16)


def test_two_graphs() -> None:
    past, present = NAMINGS["optimum"]
    binding = bind(graph(None, present), graph(past, present))
    assert binding.prefill is not None
    assert binding.prefill.past == ()
    assert binding.prefill.present == binding.decode.present


def test_prefill_and_decode_of_different_depth() -> None:
    past, present = NAMINGS["optimum"]
    with pytest.raises(BindingError, match="prefill gives a cache of 2 layers, decode takes one of 3"):
        bind(graph(None, present, 2), graph(past, present, 3))


def test_prefill_and_decode_of_different_heads() -> None:
    past, present = NAMINGS["optimum"]
    with pytest.raises(BindingError, match=r"layer 0: graphs disagree about the size of axis 1 of the key: \[4, 8\]"):
        bind(graph(None, present, heads=8), graph(past, present))


def test_no_past() -> None:
    with pytest.raises(BindingError, match=r"takes no past.*'input_ids' tensor\(int64\)\[batch, sequence\]"):
        bind(graph(None, NAMINGS["optimum"][1]))


def test_unknown_head_size() -> None:
    with pytest.raises(BindingError, match=r"nothing says the size of axis 3 of the key.*\[batch, 4, past, head\]"):
        bind(graph(*NAMINGS["optimum"], dim="head"))


def test_past_without_kind() -> None:
    with pytest.raises(BindingError, match=r"'state\.0\.a' is called neither key nor value"):
        bind(graph(lambda layer, kind: f"state.{layer}.{'ab'[kind == 'value']}", NAMINGS["optimum"][1]))


def test_missing_layer() -> None:
    with pytest.raises(BindingError, match="layer"):
        bind(graph(lambda layer, kind: f"past.layer.{2 * layer}.{kind}", NAMINGS["optimum"][1]))


MASK = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"])
POSITIONS = helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch", "sequence"])


def test_mask_and_positions() -> None:
    binding = bind(graph(*NAMINGS["optimum"], more_inputs=[MASK, POSITIONS]))
    assert (binding.decode.mask, binding.decode.positions) == ("attention_mask", "position_ids")


def test_an_unknown_input_is_named() -> None:
    strange = helper.make_tensor_value_info("temperature", TensorProto.FLOAT, [1])
    with pytest.raises(BindingError, match=r"input 'temperature' tensor\(float\)\[1\] is unknown"):
        bind(graph(*NAMINGS["optimum"], more_inputs=[strange]))


def test_ambiguity_is_an_error_that_an_override_settles() -> None:
    other = helper.make_tensor_value_info("more_words", TensorProto.INT64, ["batch", "sequence"])
    ambiguous = graph(*NAMINGS["optimum"], ids="words", more_inputs=[other])
    with pytest.raises(BindingError, match=r"several could be the tokens: 'words' .*'more_words' .*--bind tokens=NAME"):
        bind(ambiguous)
    two_masks = [MASK, helper.make_tensor_value_info("mask", TensorProto.INT64, ["batch", "total"])]
    with pytest.raises(BindingError, match="input 'mask'"):
        bind(graph(*NAMINGS["optimum"], more_inputs=two_masks))
    renamed = graph(*NAMINGS["optimum"], ids="x", logits="y")
    binding = bind(renamed, tokens="x", logits="y")
    assert (binding.decode.tokens, binding.decode.logits) == ("x", "y")


@pytest.mark.parametrize(("overrides", "message"), [({"tokens": "nothing"}, "no such name"), ({"heads": "4"}, "no role 'heads'")])
def test_wrong_overrides(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(BindingError, match=message):
        bind(graph(*NAMINGS["optimum"]), **overrides)
