"""Graphs of a GPT-2 with its files, and the demo model, which is one; onnxruntime runs what was written."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import miniort_models
from miniort.errors import ModelError
from miniort.plugins import create_plugin_manager
from miniort_models.conversion import convert
from miniort_models.graphs.gpt2 import GPT2Config
from miniort_models.weights.arrays import WeightArrays

TINY = Path(__file__).parents[2] / "data" / "huggingface_gpt2"
DEMO = Path(miniort_models.__path__[0]) / "demo"
HELD_OUT_LIMIT = 3.4  # nats per token
CONFIG = {"model_type": "gpt2", "vocab_size": 31, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 40}
PLUGINS = create_plugin_manager(allow=["models"])

Arrays = dict[str, NDArray[Any]]


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """All the weights of a GPT-2 as Hugging Face has them; a projection is stored [in, out]."""
    width = config["n_embd"]
    inner = config.get("n_inner") or 4 * width
    block = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, width),
        "mlp.c_proj.bias": (width,),
    }
    return {
        "wte.weight": (config["vocab_size"], width),
        "wpe.weight": (config["n_positions"], width),
        **{f"h.{layer}.{name}": shape for layer in range(config["n_layer"]) for name, shape in block.items()},
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }


def random_weights(config: dict[str, Any], seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {f"transformer.{name}": rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in weight_shapes(config).items()}


def write(config: dict[str, Any], weights: Arrays, folder: Path, **options: Any) -> Path:
    convert(WeightArrays("arrays", config, weights), folder, plugins=PLUGINS, replace=True, **options)
    return folder


def built(folder: Path, **options: Any) -> Path:
    return write(CONFIG, random_weights(CONFIG), folder, **options)


def graph(folder: Path, name: str) -> onnx.GraphProto:
    return onnx.load(folder / f"{name}.onnx", load_external_data=False).graph


@functools.cache
def opened(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def run(
    folder: Path,
    name: str,
    ids: Any,
    past: Arrays | None = None,
    mask: Any = None,
    positions: Any = None,
) -> Arrays:
    """One run of a graph with onnxruntime; by default nothing is padding, and positions follow the past."""
    ids = np.atleast_2d(np.asarray(ids, np.int64))
    past = past or {}
    length = next(iter(past.values())).shape[2] if past else 0
    end = length + ids.shape[1]
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones((len(ids), end), np.int64) if mask is None else mask,
        "position_ids": np.tile(np.arange(length, end), (len(ids), 1)) if positions is None else positions,
    }
    feeds |= {key.replace("present", "past_key_values"): value for key, value in past.items()}
    session = opened(folder / f"{name}.onnx")
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def cache(outputs: Arrays) -> Arrays:
    return {name: value for name, value in outputs.items() if name.startswith("present.")}


def empty_cache(config: dict[str, Any], batch: int = 1) -> Arrays:
    empty = np.zeros((batch, config["n_head"], 0, config["n_embd"] // config["n_head"]), np.float32)
    return {f"present.{layer}.{kind}": empty for layer in range(config["n_layer"]) for kind in ("key", "value")}


def assert_same(actual: Arrays, expected: Arrays) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-5, err_msg=str(name))


# ---------------------------------------------------------------------------------------- what the files hold


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("all_logits", [False, True])
def test_both_graphs_are_valid_onnx(tmp_path: Path, all_logits: bool, dtype: Any) -> None:
    built(tmp_path, all_logits=all_logits, dtype=dtype)
    for name in ("prefill", "decode"):
        onnx.checker.check_model(tmp_path / f"{name}.onnx", full_check=True)
        model = onnx.load(tmp_path / f"{name}.onnx", load_external_data=False)
        assert model.ir_version == 11, "the first that has opset 23"
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 23)]
        assert all(node.domain == "" for node in model.graph.node)


def test_inputs_and_outputs_have_the_documented_shapes(tmp_path: Path) -> None:
    built(tmp_path)

    def shapes(values: Any) -> dict[str, list[str | int]]:
        return {value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}

    ids = ["batch", "sequence"]
    layers = [(layer, kind) for layer in range(2) for kind in ("key", "value")]
    prefill, decode = graph(tmp_path, "prefill"), graph(tmp_path, "decode")
    assert shapes(prefill.input) == {"input_ids": ids, "attention_mask": ids, "position_ids": ids}
    assert shapes(prefill.output) == {
        "logits": ["batch", 1, 31],
        **{f"present.{layer}.{kind}": ["batch", 4, "sequence", 4] for layer, kind in layers},
    }
    total = "past_sequence + sequence"
    assert shapes(decode.input) == {
        "input_ids": ids,
        "attention_mask": ["batch", total],
        "position_ids": ids,
        **{f"past_key_values.{layer}.{kind}": ["batch", 4, "past_sequence", 4] for layer, kind in layers},
    }
    assert shapes(decode.output) == {
        "logits": ["batch", "sequence", 31],
        **{f"present.{layer}.{kind}": ["batch", 4, total, 4] for layer, kind in layers},
    }


def stored_weights(folder: Path, name: str) -> dict[str, dict[str, str]]:
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in graph(folder, name).initializer
        if tensor.data_location == TensorProto.EXTERNAL
    }


def test_both_graphs_share_one_weights_file(tmp_path: Path) -> None:
    built(tmp_path)
    weights = random_weights(CONFIG)
    stored = stored_weights(tmp_path, "prefill")
    assert stored == stored_weights(tmp_path, "decode")
    assert stored.keys() == weights.keys()
    data = (tmp_path / "weights.bin").read_bytes()
    assert sum(int(place["length"]) for place in stored.values()) == sum(weight.nbytes for weight in weights.values())
    for name, place in stored.items():
        start, length = int(place["offset"]), int(place["length"])
        assert place["location"] == "weights.bin"
        assert start % 64 == 0
        assert data[start : start + length] == weights[name].tobytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "decode.onnx", "prefill.onnx", "weights.bin"]


def test_a_large_weight_starts_on_a_page(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 5, "n_positions": 2**15, "n_embd": 8, "n_layer": 1, "n_head": 1}
    write(config, random_weights(config), tmp_path)
    place = stored_weights(tmp_path, "prefill")["transformer.wpe.weight"]
    assert int(place["length"]) == 2**20
    assert int(place["offset"]) == 4096


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_tied_embedding_is_stored_once_and_read_twice(tmp_path: Path, name: str) -> None:
    weights = random_weights(CONFIG)
    write(CONFIG, weights | {"lm_head.weight": weights["transformer.wte.weight"]}, tmp_path)
    tied = graph(tmp_path, name)
    assert [node.op_type for node in tied.node if "transformer.wte.weight" in node.input] == ["Gather", "Transpose"]
    embedding_bytes = weights["transformer.wte.weight"].tobytes()
    assert (tmp_path / "weights.bin").read_bytes().count(embedding_bytes) == 1
    assert sum(tensor.ByteSize() for tensor in tied.initializer) < 6000


# ------------------------------------------------------------------------------------------ what they compute


def test_decode_of_a_prompt_with_an_empty_past_is_prefill(tmp_path: Path) -> None:
    built(tmp_path, all_logits=True)
    ids = [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]]
    assert_same(run(tmp_path, "decode", ids, empty_cache(CONFIG, 2)), run(tmp_path, "prefill", ids))


def test_prefill_gives_logits_for_the_last_position_unless_asked(tmp_path: Path) -> None:
    ids = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    last = run(built(tmp_path / "last"), "prefill", ids)
    every = run(built(tmp_path / "every", all_logits=True), "prefill", ids)
    assert every["logits"].shape == (2, 5, 31)
    assert_same(last, every | {"logits": every["logits"][:, -1:]})


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_several_tokens_over_a_past_are_one_by_one_and_all_at_once(tmp_path: Path, cut: int) -> None:
    built(tmp_path, all_logits=True)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = run(tmp_path, "prefill", ids)

    past = cache(run(tmp_path, "prefill", ids[:cut]))
    several = run(tmp_path, "decode", ids[cut:], past)
    assert_same(several, whole | {"logits": whole["logits"][:, cut:]})

    singles = []
    for token in ids[cut:]:
        single = run(tmp_path, "decode", [token], past)
        past = cache(single)
        singles.append(single["logits"])
    assert_same(past | {"logits": np.concatenate(singles, axis=1)}, several)


def test_a_token_sees_nothing_after_it(tmp_path: Path) -> None:
    built(tmp_path, all_logits=True)
    past = cache(run(tmp_path, "prefill", [3, 1]))
    one = run(tmp_path, "decode", [4, 1, 5, 9], past)["logits"]
    other = run(tmp_path, "decode", [4, 1, 6, 2], past)["logits"]
    np.testing.assert_allclose(one[:, :2], other[:, :2], rtol=1e-5, atol=1e-6)
    assert np.abs(one[:, 2:] - other[:, 2:]).max() > 0.1


def test_a_left_padded_batch_gives_what_its_rows_give_alone(tmp_path: Path) -> None:
    built(tmp_path, all_logits=True)
    short, long = [7, 8], [3, 1, 4, 1, 5]
    ids = [[0, 0, 0, *short], long]
    mask = np.array([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    positions = np.array([[0, 0, 0, 0, 1], [0, 1, 2, 3, 4]])
    together = run(tmp_path, "prefill", ids, mask=mask, positions=positions)
    alone = [run(tmp_path, "prefill", row) for row in (short, long)]
    assert all(np.isfinite(value).all() for value in together.values())
    np.testing.assert_allclose(together["logits"][:1, 3:], alone[0]["logits"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together["logits"][1:], alone[1]["logits"], rtol=1e-4, atol=1e-5)

    mask = np.array([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
    positions = np.array([[2, 3], [5, 6]])
    further = run(tmp_path, "decode", [[9, 2], [6, 5]], cache(together), mask=mask, positions=positions)
    for row, (ids_alone, first) in enumerate(zip(([9, 2], [6, 5]), alone, strict=True)):
        expected = run(tmp_path, "decode", ids_alone, cache(first))["logits"]
        np.testing.assert_allclose(further["logits"][row : row + 1], expected, rtol=1e-4, atol=1e-5)


def test_float16_weights_are_half_as_big_and_computed_with_in_float32(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    matrices = {name for name, weight in weights.items() if weight.ndim == 2}
    rounded = {name: weight.astype(np.float16).astype(np.float32) if name in matrices else weight for name, weight in weights.items()}
    half = write(CONFIG, weights, tmp_path / "half", dtype="f16")
    full = write(CONFIG, rounded, tmp_path / "full", dtype="f32")
    assert_same(run(half, "prefill", [3, 1, 4]), run(full, "prefill", [3, 1, 4]))

    types = {tensor.name: tensor.data_type for tensor in graph(half, "prefill").initializer}
    assert {types[name] for name in matrices} == {TensorProto.FLOAT16}
    assert {types[name] for name in weights.keys() - matrices} == {TensorProto.FLOAT}, "vectors are too small to matter"
    sizes = {name: int(place["length"]) for name, place in stored_weights(half, "prefill").items()}
    assert all(sizes[name] == 2 * weights[name].size for name in matrices)
    casts = [node.input[0] for node in graph(half, "decode").node if node.op_type == "Cast"]
    looked_up = {"transformer.wpe.weight"}  # of a table, only the rows that were looked up are cast
    assert set(casts) == {"attention_mask", "wte.stored", "wpe.stored", *(matrices - looked_up)}
    assert [node.input[0] for node in graph(full, "decode").node if node.op_type == "Cast"] == ["attention_mask"]


# --------------------------------------------------------------------------------------------- Hugging Face's


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = json.loads((TINY / "config.json").read_text())
    return write(config, load_file(TINY / "model.safetensors"), tmp_path_factory.mktemp("tiny"), all_logits=True)


@pytest.fixture(scope="module")
def reference() -> Arrays:
    return dict(np.load(TINY / "reference.npz"))


def test_logits_are_hugging_faces(tiny: Path, reference: Arrays) -> None:
    logits = run(tiny, "prefill", reference["input_ids"])["logits"]
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-4)


def test_logits_of_a_prompt_and_a_continuation_are_hugging_faces(tiny: Path, reference: Arrays) -> None:
    ids = reference["input_ids"]
    past = cache(run(tiny, "prefill", ids[:, :9]))
    logits = run(tiny, "decode", ids[:, 9:], past)["logits"]
    np.testing.assert_allclose(logits, reference["logits"][:, 9:], rtol=0, atol=1e-4)


def test_logits_of_a_left_padded_batch_are_hugging_faces(tiny: Path, reference: Arrays) -> None:
    ids, mask, positions = (reference[f"b2_{name}"] for name in ("input_ids", "attention_mask", "position_ids"))
    logits = run(tiny, "prefill", ids, mask=mask, positions=positions)["logits"]
    np.testing.assert_allclose(logits[mask != 0], reference["b2_logits"][mask != 0], rtol=0, atol=1e-4)


def test_onnx_reference_evaluator_agrees(tiny: Path, reference: Arrays) -> None:
    feeds = {name: reference[f"b2_{name}"] for name in ("input_ids", "attention_mask", "position_ids")}
    evaluator = ReferenceEvaluator(str(tiny / "prefill.onnx"))
    (logits,) = map(np.asarray, evaluator.run(["logits"], feeds))
    mask = feeds["attention_mask"] != 0
    np.testing.assert_allclose(logits[mask], reference["b2_logits"][mask], rtol=0, atol=1e-4)


def test_names_may_come_without_a_prefix(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text())
    weights = load_file(TINY / "model.safetensors")
    assert all(name.startswith("transformer.") for name in weights)
    bare = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    write(config, bare, tmp_path)
    assert (tmp_path / "weights.bin").read_bytes() == (tiny / "weights.bin").read_bytes()


# ----------------------------------------------------------------------------------------------------- errors


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    del weights["transformer.h.1.mlp.c_fc.bias"]
    with pytest.raises(ModelError, match=r"arrays: weight 'transformer\.h\.1\.mlp\.c_fc\.bias' is missing"):
        write(CONFIG, weights, tmp_path / "decoder")
    assert list(tmp_path.iterdir()) == []


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    weights["transformer.h.0.attn.c_attn.weight"] = weights["transformer.h.0.attn.c_attn.weight"].T
    with pytest.raises(ModelError, match=r"'transformer\.h\.0\.attn\.c_attn\.weight' has shape \[48, 16\].*\[16, 48\]"):
        write(CONFIG, weights, tmp_path / "decoder")


def test_a_head_of_its_own_is_refused_where_the_config_says_that_it_is_tied(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    untied = weights | {"lm_head.weight": weights["transformer.wte.weight"] + 1}
    with pytest.raises(ModelError, match=r"'lm_head\.weight' differs from 'transformer\.wte\.weight'"):
        write(CONFIG, untied, tmp_path / "decoder")
    write(CONFIG | {"tie_word_embeddings": False}, untied, tmp_path / "decoder")


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("activation_function", "softmax"),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("n_layer", 0),
        ("n_embd", "16"),
        ("n_inner", True),
        ("layer_norm_epsilon", -1),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_a_config_that_the_graphs_do_not_compute_is_refused(entry: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(value) if entry == "activation_function" else entry):
        write(CONFIG | {entry: value}, random_weights(CONFIG), tmp_path / "decoder")
    assert list(tmp_path.iterdir()) == []


def test_heads_have_to_share_the_width() -> None:
    with pytest.raises(ModelError, match="n_embd=10 has to be a multiple of n_head=4"):
        GPT2Config(n_embd=10, n_head=4)


# --------------------------------------------------------------------------------------------------- the demo


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def demo_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    return config


def test_the_demo_is_complete_and_small() -> None:
    sizes = {file.name: file.stat().st_size for file in DEMO.iterdir() if file.is_file()}
    assert sizes.keys() == {
        "README.md",
        "config.json",
        "decode.onnx",
        "generation_config.json",
        "prefill.onnx",
        "tokenizer.json",
        "weights.bin",
    }
    assert sum(sizes.values()) <= 6_000_000


def test_the_demo_has_two_million_parameters() -> None:
    assert demo_config()["n_positions"] == 256
    for name in ("prefill", "decode"):
        external = [tensor for tensor in graph(DEMO, name).initializer if tensor.data_location == TensorProto.EXTERNAL]
        stored = {tensor.name.removeprefix("transformer."): tuple(tensor.dims) for tensor in external}
        assert stored == weight_shapes(demo_config())
        count = sum(int(np.prod(shape)) for shape in stored.values())
        assert count == demo_config()["training"]["parameters"] >= 2_000_000
        onnx.checker.check_model(DEMO / f"{name}.onnx", full_check=True)


def test_the_demo_tells_its_held_out_loss() -> None:
    figures = demo_config()["training"]
    card = (DEMO / "README.md").read_text()
    assert 1 < figures["training_loss"] < figures["held_out_loss"] < HELD_OUT_LIMIT
    row = next(line for line in card.splitlines() if line.startswith("| held-out chapters"))
    assert f"{figures['held_out_loss']:.4f}" in row
    assert f"{figures['held_out_bits_per_byte']:.4f}" in row


HELD_OUT = (  # from a chapter that was held out
    "Now when Jesus was born in Bethlehem of Judaea in the days of Herod the king, behold, there came wise "
    "men from the east to Jerusalem, Saying, Where is he that is born King of the Jews? for we have seen his "
    "star in the east, and are come to worship him."
)


def demo_loss(tokenizer: Tokenizer, text: str) -> float:
    """Nats per token, the first token left out."""
    ids = tokenizer.encode(text).ids
    logits = run(DEMO, "decode", ids, empty_cache(demo_config()))["logits"][0, :-1].astype(np.float64)
    log_likelihood = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(-log_likelihood[np.arange(len(ids) - 1), ids[1:]].mean())


def test_the_demo_knows_the_language_of_a_held_out_verse(tokenizer: Tokenizer) -> None:
    backwards = " ".join(reversed(HELD_OUT.split()))
    assert demo_loss(tokenizer, HELD_OUT) < HELD_OUT_LIMIT
    assert demo_loss(tokenizer, backwards) > HELD_OUT_LIMIT + 2


def greedy_continuation(prompt: list[int], count: int) -> list[int]:
    outputs = run(DEMO, "prefill", prompt)
    tokens = [int(outputs["logits"][0, -1].argmax())]
    while len(tokens) < count:
        outputs = run(DEMO, "decode", tokens[-1:], cache(outputs))
        tokens.append(int(outputs["logits"][0, -1].argmax()))
    return tokens


# The 200 words that the King James Bible has most often, 72 percent of its text.
FREQUENT_WORDS = """
a about according after again against all also am among an and answered any are art as at away be
because before behold brethren bring brought but by called came cast children christ city come david day
days did do done down earth eat egypt even every evil eyes father fathers fire for forth from give given
go god good great had hand hast hath have he hear heard heart heaven her him himself his holy house how
hundred i if in into is israel it jerusalem jesus judah king know land law let like lord made make man
many may me men mine more moses my name neither no nor not now o of off offering on one or our out over
own pass people place priest put said saith saw say saying see sent servant set seven shall shalt she
should so son sons spake speak spirit take than that the thee their them then there therefore thereof
these they thine thing things this thou thousand three thus thy time to together took two unto up upon
us voice was way we went were what when which who whom will with word words ye years yet you your
"""


@pytest.mark.parametrize("prompt", ["In the beginning", "And it came to pass", "The LORD said unto Moses"])
def test_the_demo_goes_on_in_plain_words(tokenizer: Tokenizer, prompt: str) -> None:
    text = tokenizer.decode(greedy_continuation(tokenizer.encode(prompt).ids, 40))
    words, frequent = re.findall(r"[a-z']+", text.lower()), set(FREQUENT_WORDS.split())
    assert len(words) >= 25, text
    assert len(set(words)) >= 6, text
    assert sum(word in frequent for word in words) >= 0.75 * len(words), text
