"""Decoder graphs of real exporters against what Hugging Face transformers gave for the same weights.

`reference.npz` was recorded with transformers 4.57.6, float32, eager attention (keys in tests/data/fixtures/README.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from miniort import InferenceSession, SessionOptions
from miniort.errors import BindingError, GenerationError
from miniort.generation import Decoder, Generator, bind_decoder, generate, open_decoder
from miniort.model.loading import load_model
from miniort.plugins import PluginManager
from miniort.types import Array

TOLERANCE = 1e-4
LEVELS = ["none", "all"]
FOLDERS = {"gpt2_optimum": "gpt2_optimum", "gpt2_optimum_legacy": "gpt2_optimum", "llama_optimum": "llama_optimum"}
"""Each decoder, and the folder whose reference is of its weights."""


def reference(data: Path, folder: str) -> dict[str, Array]:
    with np.load(data / "fixtures" / FOLDERS[folder] / "reference.npz") as file:
        return dict(file)


def feeds_of(session: InferenceSession, ids: Array, mask: Array, positions: Array, past: dict[str, Array] | None = None) -> dict[str, Any]:
    """What a decoder graph wants, with an empty past where none is given."""
    known = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **(past or {})}
    feeds = {}
    for each in session.get_inputs():
        if each.name in known:
            feeds[each.name] = known[each.name]
        else:
            assert each.name.startswith("past_key_values")
            heads, size = (int(each.shape[axis] or 0) for axis in (1, 3))
            feeds[each.name] = np.zeros((len(ids), heads, 0, size), np.float32)
    return feeds


def run_prompt(session: InferenceSession, ids: Array, mask: Array, positions: Array) -> dict[str, Array]:
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds_of(session, ids, mask, positions)), strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("folder", "file"),
    [("gpt2_optimum", "model.onnx"), ("gpt2_optimum_legacy", "decoder_model.onnx"), ("llama_optimum", "model.onnx")],
)
def test_prompt_logits_and_cache(data: Path, folder: str, file: str, level: str, plugins: PluginManager) -> None:
    expected = reference(data, folder)
    session = InferenceSession(data / "fixtures" / folder / file, SessionOptions(level, strict=True), plugins=plugins)
    ids = expected["input_ids"]
    found = run_prompt(session, ids, np.ones_like(ids), np.arange(ids.shape[1])[None])
    presents = [name for name in found if name.startswith("present")]
    assert len(presents) == len([name for name in expected if name.startswith("present")])
    for name in ["logits", *presents]:
        np.testing.assert_allclose(found[name], expected[name], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("folder", ["gpt2_optimum", "llama_optimum"])
def test_left_padded_batch(data: Path, folder: str, level: str, plugins: PluginManager) -> None:
    expected = reference(data, folder)
    session = InferenceSession(data / "fixtures" / folder / "model.onnx", SessionOptions(level), plugins=plugins)
    mask = expected["b2_attention_mask"]
    found = run_prompt(session, expected["b2_input_ids"], mask, expected["b2_position_ids"])
    real = mask.astype(bool)
    assert not real.all(), "one row must be padded, or the test says nothing"
    np.testing.assert_allclose(found["logits"][real], expected["b2_logits"][real], atol=TOLERANCE, rtol=0)


def test_legacy_decode_goes_on_from_legacy_prefill(data: Path, plugins: PluginManager) -> None:
    expected = reference(data, "gpt2_optimum_legacy")
    folder = data / "fixtures" / "gpt2_optimum_legacy"
    prefill = InferenceSession(folder / "decoder_model.onnx", plugins=plugins)
    decode = InferenceSession(folder / "decoder_with_past_model.onnx", plugins=plugins)
    ids = expected["input_ids"]
    found = run_prompt(prefill, ids, np.ones_like(ids), np.arange(ids.shape[1])[None])
    for step in range(4):
        past = {name.replace("present", "past_key_values"): value for name, value in found.items() if name.startswith("present")}
        token = expected["greedy_tokens"][step].reshape(1, 1)
        mask = np.ones((1, ids.shape[1] + step + 1), np.int64)
        names = [each.name for each in decode.get_outputs()]
        found = dict(zip(names, decode.run(None, feeds_of(decode, token, mask, mask, past)), strict=True))
        np.testing.assert_allclose(found["logits"][0, -1], expected["greedy_logits"][step + 1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_merged_decoder_takes_both_branches(data: Path, level: str, plugins: PluginManager) -> None:
    expected = reference(data, "gpt2_optimum_legacy")
    path = data / "fixtures" / "gpt2_optimum_legacy" / "decoder_model_merged.onnx"
    session = InferenceSession(path, SessionOptions(level), plugins=plugins)
    ids = expected["input_ids"]
    names = [each.name for each in session.get_outputs()]
    feeds = feeds_of(session, ids, np.ones_like(ids), ids, {"use_cache_branch": np.array([False])})
    found = dict(zip(names, session.run(None, feeds), strict=True))
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=TOLERANCE, rtol=0)
    past = {name.replace("present", "past_key_values"): value for name, value in found.items() if name.startswith("present")}
    token = expected["greedy_tokens"][0].reshape(1, 1)
    mask = np.ones((1, ids.shape[1] + 1), np.int64)
    feeds = feeds_of(session, token, mask, mask, {**past, "use_cache_branch": np.array([True])})
    logits = dict(zip(names, session.run(None, feeds), strict=True))["logits"]
    np.testing.assert_allclose(logits[0, -1], expected["greedy_logits"][1], atol=TOLERANCE, rtol=0)


@dataclass(frozen=True)
class Fixture:
    """One decoder of the whole collection, and how near its logits must come to the recorded ones.

    path: its file or its folder, in the collection; what's recorded lies in the folder of its model, or beside it if `own`.
    padded: whether the export can do a batch that is padded on the left. several: whether its steps may be given several tokens.
    """

    path: str
    tolerance: float = TOLERANCE
    own: bool = False
    padded: bool = True
    several: bool = True


FIXTURES = [
    *(Fixture(f"{model}/optimum/model.onnx") for model in ("gemma3", "gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen2")),
    *(Fixture(f"{model}/optimum_eager/model.onnx") for model in ("gpt2", "llama")),
    *(Fixture(f"{model}/dynamo_cache/model.onnx") for model in ("gpt2", "llama")),
    Fixture("gpt2/dynamo_op23/model.onnx"),
    *(Fixture(f"{model}/ort_optimizer/model.onnx") for model in ("gpt_neox", "llama")),
    *(Fixture(f"gpt2/{variant}/model.onnx") for variant in ("ort_convert_fp32", "ort_convert_fused")),
    *(Fixture(path) for path in ("llama/genai_fp32/model.onnx", "llama/genai_fp32_nofuse/model.onnx", "qwen2/genai_fp32/model.onnx")),
    # Positions that are counted from the padding: harmless where they're relative, wrong where they choose rows of a table.
    *(Fixture(f"gpt2/optimum_legacy{file}", padded=False, several=False) for file in ("", "/decoder_model_merged.onnx")),
    *(Fixture(f"llama/optimum_legacy{file}") for file in ("", "/decoder_model_merged.onnx")),
    # Half precision, and integers that one rounding of an activation moves by a whole step.
    Fixture("llama/dynamo_bf16/model.onnx", 0.8),
    *(Fixture(f"llama/{variant}/model.onnx", 0.1, own=True) for variant in ("fp16", "fp16_fp32io", "optimum_fp16")),
    Fixture("gpt2/int8_dynamic/model.onnx", 0.5, own=True),
    Fixture("llama/int8_dynamic/model.onnx", 0.05, own=True),
    Fixture("gpt2/ort_convert_int8/model.onnx", 0.05, own=True),
    *(Fixture(f"llama/{variant}/model.onnx", 0.05, own=True) for variant in ("int4_nbits_b32", "int4_nbits_b32_asym", "int8_nbits_b32")),
    *(Fixture(f"llama/{variant}/model.onnx", 0.05, own=True) for variant in ("genai_int4", "genai_int4_asym", "genai_int8")),
    Fixture("qwen2/genai_int4/model.onnx", 0.05, own=True),
]
"""Every decoder that has a cache."""


def recorded(collection: Path, fixture: Fixture) -> dict[str, Array]:
    model = collection / fixture.path.partition("/")[0]
    with np.load(model / "reference.npz") as file:
        reference = dict(file)
    if fixture.own:
        with np.load((collection / fixture.path).parent / "ort_expected.npz") as file:
            reference |= dict(file)
    return reference


def continued(decoder: Decoder, tokens: Array, count: int, mask: Array | None = None, chunk: int | None = None) -> tuple[Array, Array]:
    """Greedy tokens [batch, count], and the logits [batch, count, vocabulary] that they were chosen from."""
    generator = Generator(decoder, decoder.new_cache(batch=len(tokens)), decoder.new_sampler(), end_tokens=(), prefill_chunk=chunk)
    generator.append_tokens(tokens, mask)
    steps = list(generate(generator, count))
    return np.stack([step.ids for step in steps], axis=1), np.stack([step.logits for step in steps], axis=1)


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.path)
def test_every_decoder_binds_and_generates(fixture: Fixture, collection: Path, plugins: PluginManager) -> None:
    expected = recorded(collection, fixture)
    decoder = open_decoder(collection / fixture.path, plugins=plugins)
    last = list(decoder.joins)[-1]
    assert decoder.joins[last].appends, decoder.joins[last].reason
    assert decoder.vocabulary_size == 512
    assert decoder.takes_several_tokens == fixture.several
    ids = expected["input_ids"]
    prompt = decoder.forward(ids, np.ones_like(ids), decoder.new_cache(), every_logit=True)
    assert prompt.shape[1] in (1, ids.shape[1])
    np.testing.assert_allclose(prompt, expected["logits"][:, -prompt.shape[1] :], atol=fixture.tolerance, rtol=0)
    tokens, logits = continued(decoder, ids, 40)
    assert tokens[0].tolist() == expected["greedy_tokens"].tolist()
    np.testing.assert_allclose(logits[0], expected["greedy_logits"], atol=fixture.tolerance, rtol=0)
    check_padded_batch(decoder, fixture, expected)


def check_padded_batch(decoder: Decoder, fixture: Fixture, expected: dict[str, Array]) -> None:
    """Two rows, one of them padded: as recorded; for weights that aren't the recording's own, as each row gives alone; or refused."""
    rows, mask = expected["b2_input_ids"], expected["b2_attention_mask"]
    if not fixture.padded:
        with pytest.raises(GenerationError, match=r"takes no position_ids .* export it with position_ids; or give one row at a time"):
            continued(decoder, rows, 1, mask)
        return
    _, logits = continued(decoder, rows, 20, mask)
    if not fixture.own:
        np.testing.assert_allclose(logits[:, 0], expected["b2_greedy_logits"][:, 0], atol=fixture.tolerance, rtol=0)
        if fixture.tolerance == TOLERANCE:
            np.testing.assert_allclose(logits, expected["b2_greedy_logits"], atol=fixture.tolerance, rtol=0)
        return
    alone = [continued(decoder, row[kept != 0][None], 1)[1][0, 0] for row, kept in zip(rows, mask, strict=True)]
    shared_scales = "int8_dynamic" in fixture.path or "ort_convert_int8" in fixture.path  # of a whole batch, so rows move each other
    np.testing.assert_allclose(logits[:, 0], alone, atol=1 if shared_scales else fixture.tolerance, rtol=0)


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.path)
def test_every_decoder_is_the_same_from_the_cache_of_graphs(
    fixture: Fixture, collection: Path, plugins: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first that's kept, so nothing that a graph may have is lost on the way to the disk."""
    fresh = open_decoder(collection / fixture.path, plugins=plugins)
    monkeypatch.setenv("MINIORT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MINIORT_GRAPH_CACHE_MB", "100")
    open_decoder(collection / fixture.path, plugins=plugins)
    assert len(list((tmp_path / "graphs").iterdir())) == len(fresh.sessions)
    kept = open_decoder(collection / fixture.path, plugins=plugins)
    assert (kept.binding, kept.joins) == (fresh.binding, fresh.joins)
    ids = recorded(collection, fixture)["input_ids"]
    for mine, others in zip(continued(kept, ids, 5), continued(fresh, ids, 5), strict=True):
        np.testing.assert_array_equal(mine, others)
    for name, session in kept.sessions.items():
        assert session.explain() == fresh.sessions[name].explain()
        assert [step.info for step in session.plan.steps] == [step.info for step in fresh.sessions[name].plan.steps]


@pytest.mark.parametrize("path", ["gpt2/optimum/model.onnx", "gpt2/optimum_legacy", "llama/genai_fp32_nofuse/model.onnx"])
def test_a_prompt_in_chunks(path: str, collection: Path, plugins: PluginManager) -> None:
    """Also where the graph of a step has no mask between new tokens, and where it gives the last logits alone."""
    fixture = Fixture(path)
    expected = recorded(collection, fixture)
    tokens, logits = continued(open_decoder(collection / path, plugins=plugins), expected["input_ids"], 10, chunk=7)
    assert tokens[0].tolist() == expected["greedy_tokens"][:10].tolist()
    np.testing.assert_allclose(logits[0], expected["greedy_logits"][:10], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("folder", ["gpt2_optimum", "llama_optimum", "qwen2_genai_int4"])
def test_a_cache_whose_names_say_nothing_is_bound_by_what_it_is_used_for(folder: str, data: Path, plugins: PluginManager) -> None:
    """Past and present renamed at random: key and value, and layers, can only be told from the graph."""
    model = onnx.load(data / "fixtures" / folder / "model.onnx", load_external_data=False)
    names = [value.name for value in (*model.graph.input, *model.graph.output) if value.name.startswith(("past", "present"))]
    renamed = {name: f"state_{number}" for name, number in zip(names, np.random.default_rng(1).permutation(len(names)), strict=True)}
    for value in (*model.graph.input, *model.graph.output):
        value.name = renamed.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    expected = open_decoder(data / "fixtures" / folder / "model.onnx", plugins=plugins).binding.decode
    found = bind_decoder([load_model(model, base_dir=data / "fixtures" / folder).graph]).decode
    for layers, wanted in ((found.past, expected.past), (found.present, expected.present)):
        assert [(each.key, each.value) for each in layers] == [(renamed[each.key], renamed[each.value]) for each in wanted]


def test_half_precision_inside_of_single_precision_inputs_is_cached_as_half(collection: Path, plugins: PluginManager) -> None:
    assert open_decoder(collection / "llama/fp16_fp32io/model.onnx", plugins=plugins).binding.dtype == np.float16


def test_a_decoder_without_a_cache_is_refused(collection: Path, plugins: PluginManager) -> None:
    with pytest.raises(BindingError, match=r"takes no past and gives no cache.*export it with a cache"):
        open_decoder(collection / "llama/dynamo_nocache/model.onnx", plugins=plugins)


HERE = [
    ("gpt2_optimum", "gpt2_optimum"),
    ("gpt2_optimum_legacy", "gpt2_optimum"),
    ("gpt2_optimum_legacy/decoder_model_merged.onnx", "gpt2_optimum"),
    ("llama_optimum", "llama_optimum"),
]
"""Decoders that are in the repository itself, and the folder whose reference is of their weights."""


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("path", "folder"), HERE)
def test_greedy_tokens(data: Path, path: str, folder: str, cached: bool, plugins: PluginManager) -> None:
    expected = reference(data, folder)
    decoder = open_decoder(data / "fixtures" / path, plugins=plugins)
    generator = Generator(decoder, decoder.new_cache() if cached else None, decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(expected["input_ids"])
    steps = list(generate(generator, len(expected["greedy_tokens"])))
    assert [int(step.ids[0]) for step in steps] == expected["greedy_tokens"].tolist()
    logits = np.concatenate([step.logits for step in steps])
    np.testing.assert_allclose(logits, expected["greedy_logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("folder", ["gpt2_ort_convert_int8", "llama_genai_int4_asym", "qwen2_genai_int4"])
def test_greedy_tokens_of_quantized_decoders(data: Path, folder: str, plugins: PluginManager) -> None:
    with np.load(data / "fixtures" / folder / "ort_expected.npz") as file:
        expected = dict(file)
    tokens, logits = continued(open_decoder(data / "fixtures" / folder, plugins=plugins), reference(data, "gpt2_optimum")["input_ids"], 40)
    assert tokens[0].tolist() == expected["greedy_tokens"].tolist()
    np.testing.assert_allclose(logits[0], expected["greedy_logits"], atol=0.05, rtol=0)


@pytest.mark.parametrize("folder", ["gpt2_optimum", "llama_optimum"])
def test_greedy_tokens_of_a_left_padded_batch(data: Path, folder: str, plugins: PluginManager) -> None:
    expected = reference(data, folder)
    decoder = open_decoder(data / "fixtures" / folder, plugins=plugins)
    tokens, logits = continued(decoder, expected["b2_input_ids"], expected["b2_greedy_tokens"].shape[1], expected["b2_attention_mask"])
    assert tokens.tolist() == expected["b2_greedy_tokens"].tolist()
    np.testing.assert_allclose(logits, expected["b2_greedy_logits"], atol=TOLERANCE, rtol=0)
