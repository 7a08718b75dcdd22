"""Joining a cache to a graph: an append inside of the graph where that's possible, views and presents where it isn't."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from miniort import InferenceSession
from miniort.errors import GenerationError
from miniort.generation import Decoder, DecoderSource, Generator, generate, generate_with_lookup, pad_left
from miniort.generation.binding import GraphBinding
from miniort.generation.cache_axes import CacheAxes
from miniort.generation.cache_names import LayerNames
from miniort.generation.prompt_store import CACHE_STORE, store_presents
from miniort.plugins import PluginManager

HEADS, DIM, VOCABULARY = 2, 8, 40
PAST_KEY, PAST_VALUE = "past_key_values.0.key", "past_key_values.0.value"
COUNTED = "group query with bias and mask"
TURNED = ("group query turned", "group query turned with bias", "group query partly turned", "group query partly turned with bias")
FUSED = (*TURNED, COUNTED, "group query", "group query with bias", "group query window", "group query window with bias", "multi head")
FOUR_AXES = {"mask to select by": TensorProto.BOOL, "mask to add": TensorProto.FLOAT}
PACKED = ("packed", "packed shape", "packed split", "packed slice")
node = helper.make_node


def tensor(name: str, dtype: int, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def attention_decoder(style: str) -> onnx.ModelProto:
    """One layer of attention with an embedding and a head; `style` says how its past is written. Every style computes the same."""
    rng = np.random.default_rng(3)
    width = HEADS * DIM

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

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
                "axis0": [0],
                "axis1": [1],
                "axis2": [2],
                "axis3": [3],
                "ones": [1, 1],
                "far": [1 << 40],
            }.items()
        ),
    ]
    nodes = [node("Gather", ["table", "input_ids"], ["x"])]
    for name in "qkv":
        nodes += [
            node("MatMul", ["x", f"w{name}"], [f"{name}_flat"]),
            node("Reshape", [f"{name}_flat", "split_heads"], [f"{name}_split"]),
            node("Transpose", [f"{name}_split"], [name], perm=[0, 2, 1, 3]),
        ]
    cache_shape: list[int | str] = ["batch", HEADS, "past", DIM]
    if style.startswith("time second"):
        cache_shape = ["batch", "past", HEADS, DIM]
    inputs = [tensor("input_ids", TensorProto.INT64, "batch", "sequence")]
    outputs = [tensor("logits", TensorProto.FLOAT, "batch", "last" if style == "logits to keep" else "sequence", VOCABULARY)]
    if style in PACKED:
        inputs.append(tensor("past_0", TensorProto.FLOAT, 2, *cache_shape))
        outputs.append(tensor("present_0", TensorProto.FLOAT, 2, "batch", HEADS, "total", DIM))
        nodes += unpacked(style)
    else:
        present_shape = [size if size != "past" else "total" for size in cache_shape]
        inputs += [tensor(name, TensorProto.FLOAT, *cache_shape) for name in (PAST_KEY, PAST_VALUE)]
        outputs += [tensor(f"present.0.{kind}", TensorProto.FLOAT, *present_shape) for kind in ("key", "value")]
    # Query i sees keys 0 … past + i.
    time = 1 if style.startswith("time second") else 2
    past_length = [node("Shape", [PAST_KEY], ["past_length_1"], start=time, end=time + 1)]
    if style == "whole shape":
        past_length = [node("Shape", [PAST_KEY], ["past_shape"]), node("Gather", ["past_shape", "axis2"], ["past_length_1"])]
    if style == "packed shape":
        past_length = [node("Shape", ["past_0"], ["past_shape"]), node("Gather", ["past_shape", "axis3"], ["past_length_1"])]
    if "group query" in style:
        more_inputs, more_nodes = key_counts(style)
        inputs += more_inputs
        nodes += more_nodes
        initializers.append(numpy_helper.from_array(np.zeros((1, 1, 1, 1), np.float32), "no_bias"))
        angles = np.outer(np.arange(32), 1.5 ** -np.arange(DIM // 4 if "partly" in style else DIM // 2)).astype(np.float32)
        initializers += [numpy_helper.from_array(values, name) for name, values in (("cosines", np.cos(angles)), ("sines", np.sin(angles)))]
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
    if style in FOUR_AXES:
        inputs.append(tensor("attention_mask", FOUR_AXES[style], "batch", 1, "sequence", "total"))
    nodes += attention(style)
    if style in FUSED or style == "three axes":
        nodes.append(node("Identity", ["mixed"], ["merged"]))
    else:
        nodes += [
            node("Transpose", ["mixed"], ["mixed_split"], perm=[0, 2, 1, 3]),
            node("Reshape", ["mixed_split", "merge_heads"], ["merged"]),
        ]
    result = "merged"
    if "read twice" in style:
        nodes += [node("ReduceSum", [PAST_KEY], ["history"], keepdims=0)]
        nodes += [node("Mul", ["history", "nothing"], ["added"]), node("Add", ["merged", "added"], ["sum"])]
        initializers.append(numpy_helper.from_array(np.array(0, np.float32), "nothing"))
        result = "sum"
    if style == "logits to keep":
        inputs.append(tensor("num_logits_to_keep", TensorProto.INT64, 1))
        nodes += [node("Neg", ["num_logits_to_keep"], ["start"]), node("Slice", ["merged", "start", "far", "axis1"], ["kept"])]
        result = "kept"
    nodes.append(node("MatMul", [result, "head"], ["logits"]))
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def key_counts(style: str) -> tuple[list[onnx.ValueInfoProto], list[onnx.NodeProto]]:
    """How many keys each row has: inputs of the graph, or counted from the mask."""
    if style != COUNTED:
        return [tensor("seqlens_k", TensorProto.INT32, "batch"), tensor("total_sequence_length", TensorProto.INT32)], []
    return [tensor("attention_mask", TensorProto.INT64, "batch", "total")], [
        node("ReduceSum", ["attention_mask", "axis1"], ["lengths"], keepdims=0),
        node("Sub", ["lengths", "one"], ["last_keys"]),
        node("Cast", ["last_keys"], ["seqlens_k"], to=TensorProto.INT32),
        node("ReduceMax", ["lengths"], ["longest"], keepdims=0),
        node("Cast", ["longest"], ["total_sequence_length"], to=TensorProto.INT32),
    ]


def unpacked(style: str) -> list[onnx.NodeProto]:
    """A packed past taken apart."""
    if style in ("packed", "packed shape"):
        return [node("Gather", ["past_0", "zero"], [PAST_KEY], axis=0), node("Gather", ["past_0", "one"], [PAST_VALUE], axis=0)]
    halves = [node("Split", ["past_0", "ones"], ["past_0_key", "past_0_value"], axis=0)]
    if style == "packed slice":
        halves = [
            node("Slice", ["past_0", "axis0", "axis1", "axis0"], ["past_0_key"]),
            node("Slice", ["past_0", "axis1", "axis2", "axis0"], ["past_0_value"]),
        ]
    return [*halves, node("Squeeze", ["past_0_key", "axis0"], [PAST_KEY]), node("Squeeze", ["past_0_value", "axis0"], [PAST_VALUE])]


def attention(style: str) -> list[onnx.NodeProto]:
    """What mixes the values, and joins the past to what is new."""
    presents = ["present.0.key", "present.0.value"]
    flat = ["q_flat", "k_flat", "v_flat"]
    if style == "attention":
        return [node("Attention", ["q", "k", "v", "mask", PAST_KEY, PAST_VALUE], ["mixed", *presents])]
    if style == "causal attention":
        return [node("Attention", ["q", "k", "v", "", PAST_KEY, PAST_VALUE], ["mixed", *presents], is_causal=1)]
    if style == "three axes":
        inputs = [*flat, "mask", PAST_KEY, PAST_VALUE]
        return [node("Attention", inputs, ["mixed", *presents], q_num_heads=HEADS, kv_num_heads=HEADS)]
    if "group query" in style:
        angles = ["cosines", "sines"] if "turned" in style else ["", ""]
        inputs = [*flat, PAST_KEY, PAST_VALUE, "seqlens_k", "total_sequence_length", *angles, "", "no_bias" if "bias" in style else ""]
        window = 3 if "window" in style else -1
        return [
            node(
                "GroupQueryAttention",
                inputs,
                ["mixed", *presents],
                domain="com.microsoft",
                num_heads=HEADS,
                kv_num_heads=HEADS,
                local_window_size=window,
                do_rotary=int("turned" in style),
                rotary_interleaved=int("partly" in style),
            )
        ]
    if style == "multi head":
        inputs = [*flat, "", "", "", PAST_KEY, PAST_VALUE]
        return [node("MultiHeadAttention", inputs, ["mixed", *presents], domain="com.microsoft", num_heads=HEADS, unidirectional=1)]
    if style.startswith("time second"):
        return [
            node("Concat", [PAST_KEY, "k_split"], ["present.0.key"], axis=1),
            node("Concat", [PAST_VALUE, "v_split"], ["present.0.value"], axis=1),
            node("Transpose", ["present.0.key"], ["all_k"], perm=[0, 2, 1, 3]),
            node("Transpose", ["present.0.value"], ["all_v"], perm=[0, 2, 1, 3]),
            node("Attention", ["q", "all_k", "all_v", "mask"], ["mixed"]),
        ]
    if style == "keys turned":
        return [
            node("Transpose", [PAST_KEY], ["past_turned"], perm=[0, 1, 3, 2]),
            node("Transpose", ["k"], ["k_turned"], perm=[0, 1, 3, 2]),
            node("Concat", ["past_turned", "k_turned"], ["all_turned"], axis=-1),
            node("Transpose", ["all_turned"], ["present.0.key"], perm=[0, 1, 3, 2]),
            node("Concat", [PAST_VALUE, "v"], ["present.0.value"], axis=2),
            node("Transpose", ["all_turned"], ["all_k"], perm=[0, 1, 3, 2]),
            node("Attention", ["q", "all_k", "present.0.value", "mask"], ["mixed"]),
        ]
    axis = -2 if style == "negative axis" else 2
    nodes = [
        node("Concat", [PAST_KEY, "k"], ["present.0.key"], axis=axis),
        node("Concat", [PAST_VALUE, "v"], ["present.0.value"], axis=axis),
        node("Attention", ["q", *presents, "" if style == "unmasked" else "attention_mask" if style in FOUR_AXES else "mask"], ["mixed"]),
    ]
    if style in PACKED:
        nodes += [
            node("Unsqueeze", ["present.0.key", "axis0"], ["packed_key"]),
            node("Unsqueeze", ["present.0.value", "axis0"], ["packed_value"]),
            node("Concat", ["packed_key", "packed_value"], ["present_0"], axis=0),
        ]
    return nodes


CONCAT, ATTENTION = "Concat replaced by an append to the cache", "Attention's past replaced by an append to the cache"
JOINED = {
    "concat": CONCAT,
    "negative axis": CONCAT,
    "whole shape": CONCAT,
    "time second": CONCAT,
    "keys turned": CONCAT,
    "packed": CONCAT,
    "packed split": CONCAT,
    "packed shape": CONCAT,
    "logits to keep": CONCAT,
    "mask to select by": CONCAT,
    "mask to add": CONCAT,
    "attention": ATTENTION,
    "causal attention": ATTENTION,
    "three axes": ATTENTION,
    "group query": ATTENTION,
    "multi head": ATTENTION,
}
NOT_JOINED = {
    "packed slice": "past_0 goes into a Slice",
    "past read twice": "read in several places",
    "time second, read twice": "read in several places",
    "group query with bias": "GroupQueryAttention has a bias",
    COUNTED: "GroupQueryAttention has a bias",
}


def decoder_of(style: str, folder: Path, plugins: PluginManager) -> Decoder:
    path = folder / f"{style}.onnx"
    onnx.save(attention_decoder(style), path)
    return Decoder(DecoderSource(style, (path,)), plugins=plugins)


@pytest.mark.parametrize("style", [*JOINED, *NOT_JOINED])
def test_every_way_computes_the_same(style: str, tmp_path: Path, plugins: PluginManager) -> None:
    decoder = decoder_of(style, tmp_path, plugins)
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


TOKENS = np.array([[3, 1, 4, 1, 5]])


def prompt_graph(style: str) -> onnx.ModelProto:
    """The same layer without a past: its inputs of the past are constants that hold no token."""
    model = attention_decoder(style)
    for name in {value.name: value for value in model.graph.input if value.name.startswith("past")}:
        past = next(value for value in model.graph.input if value.name == name)
        sizes = [each.dim_value or {"batch": 1, "past": 0}[each.dim_param] for each in past.type.tensor_type.shape.dim]
        model.graph.input.remove(past)
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(sizes, np.float32), name))
    return model


@pytest.mark.parametrize(
    ("style", "reason"),
    [
        ("concat", "presents stored in the cache as soon as they're computed"),
        ("time second", "presents stored in the cache as soon as they're computed"),
        ("attention", "presents stored in the cache as soon as they're computed"),
        ("packed", "layer 0: its keys and values are one tensor"),
        ("group query with bias", "GroupQueryAttention has a bias"),
    ],
)
def test_a_graph_for_the_prompt_stores_what_it_computes(style: str, reason: str, tmp_path: Path, plugins: PluginManager) -> None:
    paths = tmp_path / "prefill.onnx", tmp_path / "decode.onnx"
    for path, model in zip(paths, (prompt_graph(style), attention_decoder(style)), strict=True):
        onnx.save(model, path)
    decoder, one = Decoder(DecoderSource(style, paths), plugins=plugins), decoder_of(style, tmp_path, plugins)
    join = decoder.joins["prefill"]
    assert join.reason.startswith(reason)
    assert join.appends == reason.startswith("presents")
    for cache_layout in ("static", "concat_bhtd"):
        steps = []
        for each in (decoder, one):
            generator = Generator(each, each.new_cache(cache_layout), each.new_sampler(), end_tokens=())
            generator.append_tokens(TOKENS)
            steps.append(list(generate(generator, 6)))
        for left, right in zip(*steps, strict=True):
            np.testing.assert_allclose(left.logits, right.logits, atol=1e-4, rtol=0)


def test_what_a_prompt_stores_is_of_the_caches_own_type_and_order(plugins: PluginManager) -> None:
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 23]>
        prompt (int64[b, n] ids, float[b, n, 2, 4] k) => (float[b, n, 2, 4] key, float[b, n, 2, 8] value, float[b, n, 2, 8] logits) {
            key = Neg(k) value = Concat<axis = 3>(key, k) logits = Abs(value)
        }""")
    axes = CacheAxes((0, 2, 1, 3), (0, 2, 1, 3))
    binding = GraphBinding("ids", "logits", None, None, (), (LayerNames("key", "value"),), axes, {}, {})
    assert store_presents(model.graph, binding, ir.Value(name="cache"), np.dtype(np.float16)) is None
    session = InferenceSession(model, plugins=plugins, kernels=[CACHE_STORE])
    assert [each.name for each in session.get_outputs()] == ["logits", "CacheStore_0/count"]

    class Appended:
        def append(self, layer: int, key: np.ndarray, value: np.ndarray) -> None:
            self.found = layer, key.dtype, key.shape, value.dtype, value.shape

    cache = Appended()
    outputs = session.execute({"ids": np.zeros((1, 3), np.int64), "k": np.ones((1, 3, 2, 4), np.float32), "cache": cache})
    assert cache.found == (0, np.float16, (1, 2, 3, 4), np.float16, (1, 2, 3, 8))
    assert outputs["CacheStore_0/count"] == 3


def test_all_styles_are_one_model(tmp_path: Path, plugins: PluginManager) -> None:
    first = []
    for style in [*JOINED, *NOT_JOINED]:
        decoder = decoder_of(style, tmp_path, plugins)
        assert decoder.takes_several_tokens
        first.append(decoder.forward(TOKENS, np.ones_like(TOKENS), decoder.new_cache(), every_logit=True))
    for each in first[1:]:
        np.testing.assert_allclose(each, first[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("style", ["group query window", "group query turned", "group query partly turned"])
def test_an_op_that_is_opened_computes_what_its_own_kernel_does(style: str, tmp_path: Path, plugins: PluginManager) -> None:
    """A bias of zeros keeps one of the two closed."""
    opened, closed, plain = (decoder_of(each, tmp_path, plugins) for each in (style, f"{style} with bias", "group query"))
    assert [each.joins["decoder"].appends for each in (opened, closed)] == [True, False]
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 9)
    logits = []
    for decoder in (opened, closed, plain):
        generator = Generator(decoder, decoder.new_cache(), decoder.new_sampler(), end_tokens=(), prefill_chunk=4)
        generator.append_tokens(tokens)
        logits.append(np.concatenate([step.logits for step in generate(generator, 6)]))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4, rtol=0)
    assert np.abs(logits[0] - logits[2]).max() > 0.1, "what is tested must matter"


@pytest.mark.parametrize("style", ["group query", "causal attention", "multi head", *FOUR_AXES])
def test_rows_of_a_batch_give_what_each_gives_alone(style: str, tmp_path: Path, plugins: PluginManager) -> None:
    decoder = decoder_of(style, tmp_path, plugins)
    rows = [[3, 1, 4, 1, 5], [9, 2]]
    alone = []
    for row in rows:
        generator = Generator(decoder, decoder.new_cache(), decoder.new_sampler(), end_tokens=())
        generator.append_tokens(row)
        alone.append(np.concatenate([step.logits for step in generate(generator, 6)]))
    generator = Generator(decoder, decoder.new_cache(batch=2), decoder.new_sampler(), end_tokens=())
    generator.append_tokens(*pad_left(rows))
    found = np.stack([step.logits for step in generate(generator, 6)], axis=1)
    np.testing.assert_allclose(found, alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("style", "reason"),
    [
        ("concat", "takes no attention mask, so it can't tell padding from text"),
        ("group query with bias", "takes no attention mask, so it can't tell padding from text"),
        (COUNTED, "wants its rows padded on the right: GroupQueryAttention has a bias"),
    ],
)
def test_a_padded_batch_that_would_be_wrong_is_refused(style: str, reason: str, tmp_path: Path, plugins: PluginManager) -> None:
    decoder = decoder_of(style, tmp_path, plugins)
    generator = Generator(decoder, decoder.new_cache(batch=2), decoder.new_sampler(), end_tokens=())
    with pytest.raises(GenerationError, match=f"{style} {reason}"):
        generator.append_tokens(*pad_left([[3, 1, 4], [9]]))
    generator.append_tokens([[3, 1, 4], [9, 2, 7]])
    assert len(list(generate(generator, 2))) == 2


def test_a_graph_without_a_mask_between_new_tokens_is_given_one_at_a_time(tmp_path: Path, plugins: PluginManager) -> None:
    unmasked, masked = decoder_of("unmasked", tmp_path, plugins), decoder_of("concat", tmp_path, plugins)
    assert (unmasked.takes_several_tokens, masked.takes_several_tokens) == (False, True)
    logits = []
    for decoder in (unmasked, masked):
        generator = Generator(decoder, decoder.new_cache(), decoder.new_sampler(), end_tokens=())
        generator.append_tokens(TOKENS)
        logits.append(np.concatenate([step.logits for step in generate(generator, 6)]))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4, rtol=0)
    with pytest.raises(GenerationError, match="unmasked takes one new token at a time"):
        unmasked.forward(TOKENS, np.ones_like(TOKENS), unmasked.new_cache())


def test_a_graph_is_asked_for_the_last_logits_alone_unless_all_are_wanted(tmp_path: Path, plugins: PluginManager) -> None:
    decoder = decoder_of("logits to keep", tmp_path, plugins)
    last = decoder.forward(TOKENS, np.ones_like(TOKENS), decoder.new_cache())
    every = decoder.forward(TOKENS, np.ones_like(TOKENS), decoder.new_cache(), every_logit=True)
    assert (last.shape, every.shape) == ((1, 1, VOCABULARY), (1, 5, VOCABULARY))
    np.testing.assert_allclose(last[:, 0], every[:, -1], atol=1e-5, rtol=0)
    plain, guessing = (Generator(decoder, decoder.new_cache(), decoder.new_sampler(), end_tokens=()) for _ in range(2))
    for generator in (plain, guessing):
        generator.append_tokens([3, 1, 4, 1, 3, 1, 4, 1, 3, 1])
    expected = [int(step.ids[0]) for step in generate(plain, 12)]
    assert [int(step.ids[0]) for step in generate_with_lookup(guessing, 3, max_new_tokens=12)] == expected
