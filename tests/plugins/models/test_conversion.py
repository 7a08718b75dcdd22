"""From weights to a folder: what is written, what is refused, and that nothing half-written is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import save_file

from miniort import InferenceSession, create_plugin_manager, hookimpl
from miniort.errors import ModelError, PluginError
from miniort.generation import Architecture, Generator, generate, open_decoder
from miniort.plugins import PluginManager
from miniort.types import Array
from miniort_models.conversion import convert
from miniort_models.converted import converted_folder
from miniort_models.graphs import operators
from miniort_models.weights.arrays import WeightArrays
from miniort_models.weights.quantisation import dequantise, pack, quantise, unpack
from miniort_models.weights.safetensors_folder import open_safetensors_folder
from miniort_models.weights.source import BlockQuantised

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LAYER = {
    "input_layernorm": (64,),
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "post_attention_layernorm": (64,),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (24, 64),
    **{f"model.layers.{layer}.{name}.weight": shape for layer in range(2) for name, shape in LAYER.items()},
    "model.norm.weight": (64,),
    "lm_head.weight": (24, 64),
}
IDS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def random_weights(dtype: Any = np.float32) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.3, shape).astype(dtype) for name, shape in SHAPES.items()}


def folder_with(folder: Path, weights: Mapping[str, Array] | None = None, **config: Any) -> Path:
    """As Hugging Face lays it out, in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights or random_weights()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def sharded(folder: Path) -> Path:
    """The same in two files, with an index."""
    weights = random_weights()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    folder.mkdir(parents=True)
    for file, inside in shards.items():
        save_file({name: weights[name] for name in inside}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, inside in shards.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def logits(folder: Path, name: str = "prefill", *, onnxruntime_too: bool = False) -> Array:
    feeds: dict[str, Array] = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.arange(IDS.shape[1])[None]}
    [ours] = InferenceSession(folder / f"{name}.onnx").run(["logits"], feeds)
    if onnxruntime_too:
        [theirs] = onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"]).run(["logits"], feeds)
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    return np.asarray(ours)


def stored_types(folder: Path) -> dict[str, int]:
    graph = onnx.load(folder / "decode.onnx", load_external_data=False).graph
    return {tensor.name: tensor.data_type for tensor in graph.initializer if tensor.external_data}


# ------------------------------------------------------------------------------------------------- safetensors


def test_one_file_and_several_give_the_same(tmp_path: Path, plugins: PluginManager) -> None:
    for name, source in (("one", folder_with(tmp_path / "a")), ("several", sharded(tmp_path / "b"))):
        convert(open_safetensors_folder(source), tmp_path / name, plugins=plugins)
    assert (tmp_path / "one" / "weights.bin").read_bytes() == (tmp_path / "several" / "weights.bin").read_bytes()
    assert json.loads((tmp_path / "one" / "config.json").read_text()) == CONFIG


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_are_stored_as_the_source_has_them(dtype: Any, tmp_path: Path, plugins: PluginManager) -> None:
    weights = random_weights(dtype)
    convert(open_safetensors_folder(folder_with(tmp_path / "half", weights)), tmp_path / "out", plugins=plugins)
    matrices = {name: kind for name, kind in stored_types(tmp_path / "out").items() if "norm" not in name}
    assert set(matrices.values()) == {onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))}
    whole = {name: weight.astype(np.float32) for name, weight in weights.items()}
    convert(WeightArrays("whole", CONFIG, whole), tmp_path / "whole", plugins=plugins)
    np.testing.assert_allclose(logits(tmp_path / "out", onnxruntime_too=True), logits(tmp_path / "whole"), atol=1e-5, rtol=0)


def test_old_checkpoints_have_buffers_that_are_left_out(tmp_path: Path, plugins: PluginManager) -> None:
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    convert(open_safetensors_folder(folder_with(tmp_path / "old", random_weights() | buffers)), tmp_path / "out", plugins=plugins)
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in stored_types(tmp_path / "out")


def damage(folder: Path, how: str) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if how == "cut":
        path.write_bytes(data[:-100])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "no header":
        path.write_bytes(b"PK\x03\x04" + data[4:])
    elif how == "long header":
        path.write_bytes((2**40).to_bytes(8, "little") + data[8:])
    elif how == "no json":
        path.write_bytes(data[:8] + b"{" * length + data[8 + length :])
    else:
        header["model.norm.weight"] |= {
            "offsets": {"data_offsets": [0, 7]},
            "negative": {"data_offsets": [-8, 248]},
            "no shape": {"shape": None},
        }[how]
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("how", ["cut", "empty", "no header", "long header", "no json", "offsets", "negative", "no shape"])
def test_a_damaged_file_is_named(how: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "damaged")
    damage(folder, how)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged, or no safetensors file: .*; get it again"):
        open_safetensors_folder(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "shards")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors of the 2 weight files .* missing"):
        open_safetensors_folder(folder)


def test_a_shard_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "shards")
    save_file({"other": np.zeros(1, np.float32)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"weight '.*' should be in model-00002-of-00002\.safetensors.*get that file again"):
        open_safetensors_folder(folder)


def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "shards")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ModelError, match="weight_map that gives a file of this folder"):
        open_safetensors_folder(folder)


def test_shards_without_their_index_are_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "shards")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors\.index\.json that says which belong together"):
        open_safetensors_folder(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_way_out(name: str, tmp_path: Path, plugins: PluginManager) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / name).write_bytes(b"\x80\x02.")
    with pytest.raises(ModelError, match=rf"{name}, which is pickled.*refused.*model\.safetensors.*save_pretrained"):
        open_safetensors_folder(folder)
    with pytest.raises(ModelError, match="which is pickled"):
        open_decoder(folder, plugins=plugins)


def test_quantised_checkpoints_are_refused(tmp_path: Path, plugins: PluginManager) -> None:
    folder = folder_with(tmp_path / "awq", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ModelError, match=r"quantised by the method 'awq'"):
        open_safetensors_folder(folder)
    eight = {name: weight.astype(ml_dtypes.float8_e4m3fn) for name, weight in random_weights().items()}
    with pytest.raises(ModelError, match=r"stored as F8_E4M3, and can be read as F64, F32, F16, BF16 only"):
        convert(open_safetensors_folder(folder_with(tmp_path / "fp8", eight)), tmp_path / "out", plugins=plugins)


@pytest.mark.parametrize("config", [None, "{", "[]"])
def test_a_config_that_is_missing_or_damaged_is_named(config: str | None, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "source")
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"config\.json (is missing|can't be read as JSON|must be a JSON object)"):
        open_safetensors_folder(folder)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, r"weights is of the architecture 'mamba'; graphs can be written for .*gpt2.*miniort_architectures"),
        ({"model_type": None}, "weights has no model_type"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"num_attention_heads": 3}, "hidden_size=64 has to be a multiple of num_attention_heads=3"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 has to be a multiple of num_key_value_heads=3"),
        ({"intermediate_size": 100}, r"gate_proj.weight' has shape \[96, 64\]; config.json asks for \[100, 64\]"),
        ({"num_hidden_layers": 1}, r"don't use: model\.layers\.1\..* and 6 more"),
        ({"num_hidden_layers": 3}, r"weight 'model\.layers\.2\.input_layernorm\.weight' is missing"),
        ({"attention_bias": True}, r"weight 'model\.layers\.0\.self_attn\.q_proj\.bias' is missing"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"tie_word_embeddings": True}, r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"),
        ({"hidden_act": "mish"}, "activation 'mish'; the graphs compute gelu"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "kind 'mrope'; the graphs compute default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "kind 'linear' need factor"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "weights: no llama graphs can be made of its config.json.*two"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "1 numbers in short_factor; 8 pairs",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types must name one of"),
    ],
)
def test_what_does_not_fit_is_said_and_leaves_nothing(change: dict[str, Any], said: str, tmp_path: Path, plugins: PluginManager) -> None:
    biases = {f"model.layers.{n}.self_attn.{p}_proj.bias": np.zeros(64 if p == "q" else 32, np.float32) for n in (0, 1) for p in "qkv"}
    weights = random_weights() | (biases if change.get("model_type") == "qwen2" else {})
    with pytest.raises(ModelError, match=said):
        convert(WeightArrays("weights", CONFIG | change, weights), tmp_path / "out", plugins=plugins)
    assert list(tmp_path.iterdir()) == []


def test_values_that_float16_cannot_hold_are_said(tmp_path: Path, plugins: PluginManager) -> None:
    weights = random_weights()
    weights["lm_head.weight"][3, 5] = -70000
    with pytest.raises(ModelError, match=r"'lm_head\.weight' has values up to 70000, and float16 ends at 65504"):
        convert(WeightArrays("weights", CONFIG, weights), tmp_path / "out", dtype="f16", plugins=plugins)
    convert(WeightArrays("weights", CONFIG, weights), tmp_path / "out", dtype="bf16", plugins=plugins)


@pytest.mark.parametrize("opset", [12, 25])
def test_opsets_that_graphs_are_not_written_for(opset: int, tmp_path: Path, plugins: PluginManager) -> None:
    with pytest.raises(ModelError, match=f"opsets 13 to 24, found {opset}"):
        convert(WeightArrays("weights", CONFIG, random_weights()), tmp_path / "out", opset=opset, plugins=plugins)


# -------------------------------------------------------------------------------------- whole, or not at all


@dataclass(frozen=True)
class Interrupted(WeightArrays):
    """Weights whose reader is interrupted in the middle."""

    error: BaseException = field(default_factory=KeyboardInterrupt)

    def read(self, name: str) -> Array:
        if name == "model.layers.1.mlp.down_proj.weight":
            raise self.error
        return super().read(name)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelError("broken"), OSError(28, "No space left on device")])
def test_an_interruption_leaves_what_was_there(error: BaseException, tmp_path: Path, plugins: PluginManager) -> None:
    source = WeightArrays("weights", CONFIG, random_weights())
    convert(source, tmp_path / "out", plugins=plugins)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    expected = ModelError if isinstance(error, OSError) else type(error)
    for folder in ("out", "new"):
        with pytest.raises(expected, match=r"No space left|broken|^$"):
            convert(Interrupted("weights", CONFIG, source.arrays, error), tmp_path / folder, replace=True, plugins=plugins)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_a_decoder_is_replaced_and_only_if_asked(tmp_path: Path, plugins: PluginManager) -> None:
    source = WeightArrays("weights", CONFIG, random_weights())
    out = tmp_path / "out"
    out.mkdir()
    convert(source, out, plugins=plugins)  # an empty folder may be there
    with pytest.raises(ModelError, match="isn't empty"):
        convert(source, out, plugins=plugins)
    convert(source, out, dtype="f16", replace=True, files={"tokenizer.json": b"{}"}, plugins=plugins)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "decode.onnx", "prefill.onnx", "tokenizer.json", "weights.bin"]

    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelError, match=r"something else than a converted decoder \(thesis\.txt\)"):
        convert(source, other, replace=True, plugins=plugins)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match=r"something else than a converted decoder \(notes\.txt\)"):
        convert(source, out, replace=True, plugins=plugins)
    assert (out / "notes.txt").read_text() == "mine"
    with pytest.raises(ModelError, match=r"thesis\.txt is a file"):
        convert(source, other / "thesis.txt", replace=True, plugins=plugins)
    assert (other / "thesis.txt").read_text() == "years of work"


# --------------------------------------------------------------------------------------------- the cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIORT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_with_safetensors_is_a_model(cache: Path, tmp_path: Path, data: Path, plugins: PluginManager) -> None:
    source = folder_with(tmp_path / "smol")
    (source / "tokenizer.json").write_bytes((data / "tokenizer" / "tokenizer.json").read_bytes())
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    decoder = open_decoder(source, plugins=plugins)
    assert decoder.source.name == "smol"
    assert decoder.source.context_length == 64
    assert decoder.source.end_tokens == {2, 7}
    assert decoder.source.tokenizer is not None
    [converted] = {graph.parent for graph in decoder.source.graphs}
    assert cache in converted.parents

    made = (converted / "weights.bin").stat()
    again = open_decoder(source, plugins=plugins)
    assert again.source.graphs == decoder.source.graphs
    assert (converted / "weights.bin").stat() == made, "it's converted once"
    for each in (decoder, again):
        generator = Generator(each, each.new_cache(), each.new_sampler("greedy"), end_tokens=())
        generator.append_tokens(IDS)
        assert len(list(generate(generator, 3))) == 3

    changed = random_weights()
    changed["lm_head.weight"] += 1
    folder_with(source, changed)
    os.utime(source / "model.safetensors", ns=(1, 1))
    newer = open_decoder(source, plugins=plugins)
    assert newer.source.graphs != decoder.source.graphs
    assert not converted.exists(), "what belongs to weights that have gone is cleared away"


def test_two_threads_that_convert_at_once_make_it_once(cache: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_text("weights")
    begun, written, found = threading.Event(), [], []

    def write(folder: Path) -> None:
        begun.set()
        written.append(folder)
        folder.mkdir()

    def ask() -> None:
        found.append(converted_folder("a name: of / sorts", [weights], write))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert begun.is_set()
    assert len(written) == 1
    assert found == written * 4
    assert found[0].is_dir()


def test_a_cache_that_is_a_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("MINIORT_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=r"the cache .* can't be written.*MINIORT_CACHE_DIR"):
        converted_folder("name", [], lambda folder: folder.mkdir())


# --------------------------------------------------------------------------------------- a third party's


def build_attention_only(graph: Any, config: Mapping[str, Any]) -> None:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    size = width // heads
    x = graph.embedding("embed.weight", config["vocab_size"], width, to="embedding")
    parts = graph.linears(x, ["query", "key", "value"], width, [width] * 3, bias=False)
    for part, to in zip(parts, ("0.query", *graph.names_of_new(0)), strict=True):
        operators.heads_first(graph, operators.split_heads(graph, part, heads, size, to=f"{part}.split"), to=to)
    mixed = graph.attend(0, "0.query", heads=heads, kv_heads=heads, head_dim=size, scale=1.0)
    graph.head(graph.last_position(graph.add("Add", x, mixed, to="sum")), "embed.weight", config["vocab_size"], width)


class ThirdParty:
    @hookimpl
    def miniort_architectures(self) -> list[Architecture]:
        return [Architecture("attention_only", build_attention_only)]


def test_a_plugin_adds_an_architecture(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"embed.weight": (11, 8), "query.weight": (8, 8), "key.weight": (8, 8), "value.weight": (8, 8)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    config = {"model_type": "attention_only", "vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2}
    source = WeightArrays("mine", config, weights)
    plugins = create_plugin_manager()
    with pytest.raises(ModelError, match="miniort_architectures"):
        convert(source, tmp_path / "out", plugins=plugins)
    plugins.register(ThirdParty(), name="third")
    convert(source, tmp_path / "out", plugins=plugins)

    x = weights["embed.weight"][IDS[0]]
    query, key, value = (x @ weights[f"{part}.weight"].T for part in ("query", "key", "value"))
    mixed = np.zeros(8, np.float32)
    for head in (slice(0, 4), slice(4, 8)):
        powers = np.exp(key[:, head] @ query[-1, head])
        mixed[head] = powers @ value[:, head] / powers.sum()
    np.testing.assert_allclose(logits(tmp_path / "out")[0, 0], weights["embed.weight"] @ (x[-1] + mixed), atol=1e-4)

    plugins.register(ThirdParty(), name="fourth")
    with pytest.raises(PluginError, match="both offer 'attention_only'"):
        convert(source, tmp_path / "again", plugins=plugins)


# ------------------------------------------------------------------------------------------- weights in blocks


@pytest.mark.parametrize(("bits", "columns"), [(8, 64), (4, 64), (8, 70), (4, 70)])
def test_rounding_is_at_most_half_a_step(bits: int, columns: int) -> None:
    weight = np.random.default_rng(0).normal(size=(5, columns)).astype(np.float32)
    weight[1] = 0
    weight[2, :32] = 3.5  # a block of one value
    weight[3] = np.abs(weight[3])  # all on one side
    blocks = quantise(weight, bits)
    restored = dequantise(blocks, columns)
    steps = np.repeat(blocks.scales, 32, axis=1)[:, :columns]
    clipped = bits == 4  # what lies beyond the 16 steps, if that makes the others finer
    inside = np.abs(restored - weight) <= steps * 0.5001
    assert inside.mean() > (0.9 if clipped else 0.9999)
    np.testing.assert_array_equal(restored[1], 0)
    assert np.abs(restored[2, :32] - 3.5).max() < 0.02 if bits == 8 else 0.15
    assert np.square(restored - weight).mean() < {8: 1e-4, 4: 1.1e-2}[bits]


def test_four_bits_with_a_fitted_range_beat_plain_ones() -> None:
    weight = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    blocks = weight.reshape(64, -1, 32)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    plain = np.rint(blocks / largest * 7) * largest / 7
    fitted = dequantise(quantise(weight, 4), 256)
    assert np.square(fitted - weight).mean() < 0.8 * np.square(plain.reshape(64, 256) - weight).mean()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_packed_with_the_first_in_the_lowest_bits(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 16)).astype(np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 2 * bits)
    assert packed[0, 0] & (2**bits - 1) == codes[0, 0]
    np.testing.assert_array_equal(unpack(packed, bits), codes)


@dataclass(frozen=True)
class BlockSource(WeightArrays):
    """Weights whose matrices are in blocks of one kind or another, as a GGUF file has them. kinds: by the end of a name."""

    kinds: Mapping[str, tuple[int, bool]] = field(default_factory=dict)  # bits, whether zero points are no whole numbers

    def names(self) -> Sequence[str]:
        return list(self.arrays)

    def read(self, name: str) -> Array:
        blocks = self.read_blocks(name)
        return self.arrays[name] if blocks is None else dequantise(blocks, self.arrays[name].shape[1])

    def read_blocks(self, name: str) -> BlockQuantised | None:
        kind = next((kind for end, kind in self.kinds.items() if name.endswith(end)), None)
        if kind is None or self.arrays[name].ndim != 2:
            return None
        bits, fractions = kind
        blocks = quantise(self.arrays[name], bits)
        points = np.full_like(blocks.scales, 2 ** (bits - 1)) if blocks.zero_points is None else blocks.zero_points
        return BlockQuantised(blocks.codes, blocks.scales, points + 0.25 if fractions else blocks.zero_points, bits, blocks.block_size)


@pytest.mark.parametrize(
    "kinds",
    [
        {"weight": (4, False)},
        {"weight": (4, True)},
        {"weight": (8, False)},
        {"embed_tokens.weight": (4, True), "weight": (8, False)},
        {"v_proj.weight": (8, False), "proj.weight": (4, True), "lm_head.weight": (8, False)},  # parts that can't be joined
    ],
)
def test_blocks_of_the_source_are_kept(kinds: dict[str, tuple[int, bool]], tmp_path: Path, plugins: PluginManager) -> None:
    source = BlockSource("blocks", CONFIG, random_weights(), kinds)
    convert(source, tmp_path / "blocks", all_logits=True, plugins=plugins)
    convert(source, tmp_path / "whole", dtype="f32", all_logits=True, plugins=plugins)
    np.testing.assert_allclose(logits(tmp_path / "blocks", onnxruntime_too=True), logits(tmp_path / "whole"), atol=1e-4, rtol=0)
    graph = onnx.load(tmp_path / "blocks" / "decode.onnx", load_external_data=False).graph
    assert {tensor.name for tensor in graph.initializer} <= {value for node in graph.node for value in node.input}
    ops = [node.op_type for node in graph.node]
    joined = "v_proj.weight" not in kinds
    assert ops.count("MatMulNBits") == (9 if joined else 13)
    assert onnx.TensorProto.FLOAT not in {kind for name, kind in stored_types(tmp_path / "blocks").items() if name.endswith("codes")}
    decoder = open_decoder(tmp_path / "blocks", plugins=plugins)
    assert decoder.joins["decode"].appends, decoder.joins["decode"].reason


def test_bytes_with_fractions_as_zero_points_are_kept_too(tmp_path: Path, plugins: PluginManager) -> None:
    """As GGUF's Q5_K gives them. onnxruntime's kernel refuses these."""
    source = BlockSource("blocks", CONFIG, random_weights(), {"weight": (8, True)})
    convert(source, tmp_path / "blocks", plugins=plugins)
    convert(source, tmp_path / "whole", dtype="f32", plugins=plugins)
    np.testing.assert_allclose(logits(tmp_path / "blocks"), logits(tmp_path / "whole"), atol=1e-4, rtol=0)


def test_a_tied_embedding_in_blocks_is_stored_once(tmp_path: Path, plugins: PluginManager) -> None:
    weights = random_weights()
    del weights["lm_head.weight"]
    source = WeightArrays("tied", CONFIG | {"tie_word_embeddings": True}, weights)
    for dtype in ("int4", "int8"):
        convert(source, tmp_path / dtype, dtype=dtype, plugins=plugins)
        tables = [name for name in stored_types(tmp_path / dtype) if "embed_tokens" in name]
        assert sorted(tables) == ["model.embed_tokens.weight.codes", "model.embed_tokens.weight.scales"]
        logits(tmp_path / dtype, onnxruntime_too=True)


def test_columns_that_are_no_whole_blocks(tmp_path: Path, plugins: PluginManager) -> None:
    shapes = {name: tuple({64: 40, 96: 50}.get(size, size) for size in shape) for name, shape in SHAPES.items()}
    shapes |= {name: (20, 40) for name in SHAPES if "k_proj" in name or "v_proj" in name}
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    config = CONFIG | {"hidden_size": 40, "intermediate_size": 50}
    for dtype in ("int8", "int4"):
        convert(WeightArrays("odd", config, weights), tmp_path / dtype, dtype=dtype, plugins=plugins)
        logits(tmp_path / dtype, onnxruntime_too=True)


# ----------------------------------------------------------------------------------------------------- start-up


def test_asking_for_architectures_and_formats_imports_nothing_heavy() -> None:
    code = (
        "import sys; from miniort_models import plugin\n"
        "assert plugin.miniort_architectures() and plugin.miniort_model_formats()\n"
        "print(sorted({'onnx', 'onnx_ir', 'tokenizers', 'gguf', 'huggingface_hub', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
