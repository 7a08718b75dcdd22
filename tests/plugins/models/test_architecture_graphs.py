"""The graphs of every architecture against what transformers computes (tests/data/architectures, by tools/record_architectures.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import pytest

from miniort import InferenceSession
from miniort.errors import ModelError
from miniort.generation import Generator, generate, open_decoder
from miniort.plugins import PluginManager
from miniort.types import Array
from miniort_models.conversion import convert
from miniort_models.weights.arrays import WeightArrays
from miniort_models.weights.safetensors_folder import open_safetensors_folder

RECORDED = Path(__file__).parents[2] / "data" / "architectures"
CASES: dict[str, Any] = json.loads((RECORDED / "cases.json").read_text("utf-8"))
CUTS = (6, 10, 11, 12, 13, 14, 15, 16)
TOLERANCE = 1e-4

Open = Callable[[Path], Any]


def open_with_onnxruntime(path: Path) -> Any:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def weights_of(shapes: dict[str, Any]) -> dict[str, Array]:
    """As in the script that recorded: weights that depend on nothing but the order of their names and their shapes."""
    bits = np.random.PCG64(1611)
    weights: dict[str, Array] = {}
    for name in sorted(shapes):
        between = bits.random_raw(int(np.prod(shapes[name]))).astype(np.float64) / 2.0**64 - 0.5
        is_scale = len(shapes[name]) == 1 and name.endswith("weight")
        weights[name] = (between + is_scale).reshape(shapes[name]).astype(np.float32)
    return weights


def source_of(case: str) -> WeightArrays:
    return WeightArrays(case, CASES[case]["config"], weights_of(CASES[case]["shapes"]))


def recorded(case: str) -> dict[str, Array]:
    with np.load(RECORDED / "recordings.npz") as file:
        return {name.partition("/")[2]: file[name] for name in file.files if name.startswith(f"{case}/")}


class Graphs:
    """A prefill and a decode graph, and the cache between them. `forget` starts a new text."""

    def __init__(self, folder: Path, open_session: Open) -> None:
        self.sessions = [open_session(folder / name) for name in ("prefill.onnx", "decode.onnx")]
        self.forget()

    def forget(self) -> None:
        self.cache: dict[str, Array] = {}

    def run(self, ids: Array, mask: Array | None = None) -> Array:
        """The next tokens, after what is cached; the first time they're a prompt. ids: [B, S]; mask: [B, T] -> logits [B, S, V]"""
        session = self.sessions[1 if self.cache else 0]
        length = next(iter(self.cache.values())).shape[2] if self.cache else 0
        mask = np.ones((len(ids), length + ids.shape[1]), np.int64) if mask is None else mask
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, length:]
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions} | {
            name.replace("present", "past_key_values"): value for name, value in self.cache.items()
        }
        names = [output.name for output in session.get_outputs()]
        outputs = dict(zip(names, session.run(names, feeds), strict=True))
        logits: Array = outputs.pop("logits")
        self.cache = outputs
        return logits


def prompt_logits(folder: Path, ids: Array, open_session: Open) -> Array:
    """What the prefill graph gives for an unpadded prompt: [B, S, V]"""
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    [logits] = open_session(folder / "prefill.onnx").run(["logits"], feeds)
    return np.asarray(logits)


@pytest.mark.parametrize(
    ("open_session", "opset"),
    [(InferenceSession, 23), (open_with_onnxruntime, 24), (open_with_onnxruntime, 13)],
    ids=["miniort", "ort24", "ort13"],
)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, open_session: Open, opset: int, tmp_path: Path, plugins: PluginManager) -> None:
    expected = recorded(case)
    convert(source_of(case), tmp_path / "decoder", opset=opset, all_logits=True, plugins=plugins)

    graphs = Graphs(tmp_path / "decoder", open_session)
    np.testing.assert_allclose(graphs.run(expected["ids"]), expected["logits"], atol=TOLERANCE, rtol=0)

    graphs.forget()
    pieces = [graphs.run(expected["ids"][:, begin:end]) for begin, end in pairwise((0, *CUTS))]
    np.testing.assert_allclose(np.concatenate(pieces[1:], axis=1), expected["stepped"], atol=TOLERANCE, rtol=0)

    graphs.forget()
    real = expected["b2_mask"] != 0
    assert not real.all(), "a row must be padded, or the test says nothing"
    padded = graphs.run(expected["b2_ids"], expected["b2_mask"])
    assert np.isfinite(padded).all()
    np.testing.assert_allclose(padded[real], expected["b2_logits"][real], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("opset", [13, 17, 20, 23, 24])
@pytest.mark.parametrize("case", ["gpt2", "gpt_neox", "llama_dynamic", "gemma3_linear"])
def test_graphs_are_valid_onnx(case: str, opset: int, tmp_path: Path, plugins: PluginManager) -> None:
    convert(source_of(case), tmp_path / "decoder", opset=opset, plugins=plugins)
    for name in ("prefill", "decode"):
        path = tmp_path / "decoder" / f"{name}.onnx"
        onnx.checker.check_model(path, full_check=True)
        model = onnx.load(path, load_external_data=False)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", opset)]
        read = {value for node in model.graph.node for value in node.input} | {output.name for output in model.graph.output}
        made = {tensor.name for tensor in model.graph.initializer} | {value for node in model.graph.node for value in node.output}
        assert made | {value.name for value in model.graph.input} == read - {""}, "nothing is there that nobody reads"
        for node in model.graph.node:
            assert onnx.defs.get_schema(node.op_type, opset, "").since_version <= opset


@pytest.mark.parametrize("opset", [14, 17, 18, 20])
def test_opsets_between_run_in_onnxruntime(opset: int, tmp_path: Path, plugins: PluginManager) -> None:
    for case in ("gpt2", "gemma3"):
        expected = recorded(case)
        convert(source_of(case), tmp_path / case, opset=opset, all_logits=True, plugins=plugins)
        logits = prompt_logits(tmp_path / case, expected["ids"], open_with_onnxruntime)
        np.testing.assert_allclose(logits, expected["logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_a_decode_graph_is_short(case: str, tmp_path: Path, plugins: PluginManager) -> None:
    """Nothing in a layer but the model's own operators: no shapes, no gathers, nothing repeated."""
    convert(source_of(case), tmp_path / "decoder", opset=24, plugins=plugins)
    nodes = onnx.load(tmp_path / "decoder" / "decode.onnx", load_external_data=False).graph.node
    layers = CASES[case]["config"]["num_hidden_layers"]
    ops = [node.op_type for node in nodes]
    assert ops.count("Attention") == layers
    assert ops.count("MatMul") == 4 * layers + 1  # query, key and value as one, and gate and up
    assert ops.count("RotaryEmbedding") == 2 * layers
    assert not {"Expand", "Concat", "Where"} & set(ops)
    assert len(ops) <= 36 * layers + 30


@pytest.mark.parametrize("beginning", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_a_gemma_that_sees_images(beginning: str, tmp_path: Path, plugins: PluginManager) -> None:
    expected, source = recorded("gemma3"), source_of("gemma3")
    weights = {name.replace("model.", beginning, 1): weight for name, weight in source.arrays.items()}
    weights |= {"vision_tower.patches.weight": np.zeros((2, 2)), "model.multi_modal_projector.weight": np.zeros((2, 2))}
    config = {"model_type": "gemma3", "text_config": dict(source.config), "vision_config": {}}
    convert(WeightArrays("seeing", config, weights), tmp_path / "decoder", all_logits=True, plugins=plugins)
    logits = prompt_logits(tmp_path / "decoder", expected["ids"], InferenceSession)
    np.testing.assert_allclose(logits, expected["logits"], atol=TOLERANCE, rtol=0)
    with pytest.raises(ModelError, match="text_config must be an object"):
        convert(WeightArrays("seeing", {"model_type": "gemma3"}, weights), tmp_path / "other", plugins=plugins)


# ------------------------------------------------------------------------------- the folders that come with the project's collection


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3"])
def test_folders_of_the_collection(name: str, collection: Path, tmp_path: Path, plugins: PluginManager) -> None:
    source = collection / "huggingface" / name
    recording = source / "reference.npz" if (source / "reference.npz").is_file() else collection / name / "reference.npz"
    with np.load(recording) as file:
        expected = dict(file)
    convert(open_safetensors_folder(source), tmp_path / "decoder", plugins=plugins)
    decoder = open_decoder(tmp_path / "decoder", plugins=plugins)
    generator = Generator(decoder, decoder.new_cache(), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(expected["input_ids"])
    steps = list(generate(generator, len(expected["greedy_tokens"])))
    assert [int(step.ids[0]) for step in steps] == expected["greedy_tokens"].tolist()
    np.testing.assert_allclose(np.concatenate([step.logits for step in steps]), expected["greedy_logits"], atol=TOLERANCE, rtol=0)

    generator = Generator(decoder, decoder.new_cache(batch=2), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(expected["b2_input_ids"], expected["b2_attention_mask"])
    steps = list(generate(generator, expected["b2_greedy_tokens"].shape[1]))
    assert np.stack([step.ids for step in steps], axis=1).tolist() == expected["b2_greedy_tokens"].tolist()
    np.testing.assert_allclose(np.stack([step.logits for step in steps], axis=1), expected["b2_greedy_logits"], atol=TOLERANCE, rtol=0)


# -------------------------------------------------------------------------------------------------- how weights are stored


WeightDtype = Literal["f32", "f16", "bf16", "int8", "int4"]


@pytest.mark.parametrize(("dtype", "largest"), [("f16", 0.02), ("bf16", 0.15), ("int8", 0.25), ("int4", 4.0)])
@pytest.mark.parametrize("case", ["gpt_neox", "llama_biases_tied"])
def test_smaller_weights_are_near_and_onnxruntime_reads_them_alike(
    case: str, dtype: WeightDtype, largest: float, tmp_path: Path, plugins: PluginManager
) -> None:
    expected = recorded(case)
    convert(source_of(case), tmp_path / "decoder", dtype=dtype, all_logits=True, plugins=plugins)
    ours = prompt_logits(tmp_path / "decoder", expected["ids"], InferenceSession)
    theirs = prompt_logits(tmp_path / "decoder", expected["ids"], open_with_onnxruntime)
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)
    error = np.sqrt(np.square(ours - expected["logits"]).mean())
    assert 0 < error < largest / 2
    onnx.checker.check_model(tmp_path / "decoder" / "decode.onnx", full_check=True)
