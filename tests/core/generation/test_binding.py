"""Binding a decoder's inputs and outputs, whatever its exporter called them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from miniort.errors import BindingError
from miniort.generation import DecoderBinding, bind_decoder
from miniort.generation.binding import FIXED_FEEDS
from miniort.generation.cache_axes import CacheAxes
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
    sizes: Sequence[int | str] | None = None,
    totals: Sequence[int | str] | None = None,
    axis: int = 2,
    new: Sequence[int] | None = None,
    rows: int = 3,
) -> ir.Graph:
    """A graph with the inputs and outputs of a decoder; what it computes is not the point."""
    inputs = [helper.make_tensor_value_info(ids, TensorProto.INT64, ["batch", "sequence"]), *more_inputs]
    outputs = [helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["batch", "sequence", 50])]
    nodes = [
        helper.make_node("Gather", ["table", ids], [logits]),
        helper.make_node("RandomNormal", [], ["new"], shape=new or [1, heads, 1, 16], dtype=dtype),
    ]
    past_sizes, present_sizes = sizes or ["batch", heads, "past", dim], totals or ["batch", heads, "total", dim]
    pairs = [(layer, kind) for layer in range(layers) for kind in ("key", "value")]
    if order == ("all keys", "all values"):
        pairs.sort(key=lambda pair: pair[1])
    for layer, kind in pairs:
        outputs.append(helper.make_tensor_value_info(present(layer, kind), dtype, present_sizes))
        if past is None:
            nodes.append(helper.make_node("Identity", ["new"], [present(layer, kind)]))
            continue
        inputs.append(helper.make_tensor_value_info(past(layer, kind), dtype, past_sizes))
        attributes: dict[str, Any] = {"axis": axis} if join == "Concat" else {}
        given = [past(layer, kind), "new"] if join != "Identity" else ["new"]
        nodes.append(helper.make_node(join, given, [present(layer, kind)], **attributes))
    table = helper.make_tensor("table", TensorProto.FLOAT, [rows, 50], [0.0] * (50 * rows))
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
    "counted from one": (lambda layer, kind: f"kcache.{kind[0]}.{layer + 1}", lambda layer, kind: f"kcache_out.{kind[0]}.{layer + 1}"),
    "present layer": (lambda layer, kind: f"past_layer_{layer}_{kind[0]}_self", lambda layer, kind: f"present_layer_{layer}_{kind[0]}"),
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
    with pytest.raises(BindingError, match=r"layer 0: graphs disagree about the kv heads: \[4, 8\]"):
        bind(graph(None, present, heads=8), graph(past, present))


def test_prefill_and_decode_of_different_vocabularies() -> None:
    past, present = NAMINGS["optimum"]
    with pytest.raises(BindingError, match="their vocabularies have 3 and 7 ids"):
        bind(graph(None, present), graph(past, present, rows=7))


def test_prefill_and_decode_of_different_element_types() -> None:
    past, present = NAMINGS["optimum"]
    with pytest.raises(BindingError, match=r"several element types: tensor\(float\).*tensor\(float16\)"):
        bind(graph(None, present), graph(past, present, dtype=TensorProto.FLOAT16))


def test_half_a_pair() -> None:
    with pytest.raises(BindingError, match=r"takes no past, though it gives a cache of 2 layers.*'input_ids' tensor\(int64\)\[batch, seq"):
        bind(graph(None, NAMINGS["optimum"][1]))


def test_a_graph_without_any_cache() -> None:
    with pytest.raises(BindingError, match=r"takes no past and gives no cache.*export it with a cache"):
        bind(graph(None, NAMINGS["optimum"][1], layers=0))


def test_a_past_of_a_fixed_length() -> None:
    with pytest.raises(BindingError, match=r"'past_key_values.0.key' tensor\(float\)\[batch, 4, 64, 16\] has room for 64 tokens"):
        bind(graph(*NAMINGS["optimum"], sizes=["batch", 4, 64, 16], totals=["batch", 4, 65, 16]))


def test_the_head_size_is_taken_from_what_is_computed_where_the_past_does_not_say() -> None:
    assert bind(graph(*NAMINGS["optimum"], dim="head")).head_dim == 16


def test_unknown_head_size() -> None:
    with pytest.raises(
        BindingError, match=r"nothing says the size of axis 3, the head dim: 'past_key_values.0.key' \['batch', 4, 'past', 'head'"
    ):
        bind(graph(*NAMINGS["optimum"], dim="head", join="Identity"))


ORDERS: dict[str, tuple[list[int | str], list[int | str], tuple[int, int, int, int]]] = {
    "time second": (["batch", "past", 4, 16], ["batch", "total", 4, 16], (0, 2, 1, 3)),
    "time last": (["batch", 4, 16, "past"], ["batch", 4, 16, "total"], (0, 1, 3, 2)),
    "time first": (["past", "batch", 4, 16], ["total", "batch", 4, 16], (1, 2, 0, 3)),
    "time called the same twice": (["batch", "cached_len", 4, 16], ["batch", "cached_len", 4, 16], (0, 2, 1, 3)),
    "batch of one row": ([1, 4, "past_sequence", 16], [1, 4, "total_sequence", 16], (0, 1, 2, 3)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_axes(order: str) -> None:
    sizes, totals, axes = ORDERS[order]
    binding = bind(graph(*NAMINGS["optimum"], sizes=sizes, totals=totals, join="Identity"))
    assert binding.decode.axes == CacheAxes(axes, axes)
    assert (binding.kv_heads, binding.head_dim) == (4, 16)


def test_axes_by_what_the_past_is_joined_along() -> None:
    binding = bind(graph(*NAMINGS["optimum"], sizes=["a", "b", "c", 16], totals=["a", "d", "c", 16], axis=1, new=(1, 1, 4, 16)))
    assert binding.decode.axes.key == (0, 2, 1, 3)
    assert binding.kv_heads == 4


def test_vocabulary_size() -> None:
    assert bind(graph(*NAMINGS["optimum"], rows=7)).vocabulary_size == 7


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


@pytest.mark.parametrize("name", FIXED_FEEDS)
@pytest.mark.parametrize("dtype", [TensorProto.INT32, TensorProto.INT64])
def test_inputs_that_are_fed_what_a_step_implies(name: str, dtype: int) -> None:
    binding = bind(graph(*NAMINGS["optimum"], more_inputs=[MASK, helper.make_tensor_value_info(name, dtype, [1])]))
    assert binding.decode.extra == {name: name}
    assert binding.decode.tokens == "input_ids"


def test_a_weight_that_is_listed_among_the_inputs_is_no_input() -> None:
    table = helper.make_tensor_value_info("table", TensorProto.FLOAT, [3, 50])
    assert bind(graph(*NAMINGS["optimum"], more_inputs=[table])).decode.extra == {}


def test_a_picture_is_no_cache() -> None:
    picture = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 3, 224, 224])
    with pytest.raises(BindingError, match=r"input 'pixel_values' tensor\(float\)\[batch, 3, 224, 224\] is unknown to a decoder"):
        bind(graph(*NAMINGS["optimum"], more_inputs=[picture]))


def test_embeddings_in_the_place_of_tokens() -> None:
    past, present = NAMINGS["optimum"]
    made = graph(past, present, more_inputs=[helper.make_tensor_value_info("inputs_embeds", TensorProto.FLOAT, ["batch", "sequence", 64])])
    made.inputs.remove(next(value for value in made.inputs if value.name == "input_ids"))
    with pytest.raises(BindingError, match=r"takes embeddings, 'inputs_embeds'.*, and no token ids; export it with input_ids"):
        bind(made)


def test_a_cache_whose_names_say_nothing_is_bound_by_its_places() -> None:
    """Nothing but the user can know it."""
    names = [["d", "c"], ["b", "a"]]
    made = graph(
        lambda layer, kind: names[layer][kind == "value"], lambda layer, kind: f"out_{names[layer][kind == 'value']}", join="Identity"
    )
    with pytest.raises(
        BindingError, match=r"past 'd' is called neither key nor value; seen: d, c, b, a. Name each: --bind past.0.key=NAME"
    ):
        bind(made)
    places = {f"past.{layer}.{kind}": names[layer][kind == "value"] for layer in (0, 1) for kind in ("key", "value")}
    presents = {role.replace("past", "present"): f"out_{name}" for role, name in places.items()}
    binding = bind_decoder([made], {**places, **presents})
    assert [(layer.key, layer.value) for layer in binding.decode.past] == [("d", "c"), ("b", "a")]
    assert [(layer.key, layer.value) for layer in binding.decode.present] == [("out_d", "out_c"), ("out_b", "out_a")]


def test_an_unknown_input_is_given_a_role() -> None:
    strange = helper.make_tensor_value_info("n_keep", TensorProto.INT64, [])
    assert bind(graph(*NAMINGS["optimum"], more_inputs=[strange]), num_logits_to_keep="n_keep").decode.extra == {
        "n_keep": "num_logits_to_keep"
    }


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
