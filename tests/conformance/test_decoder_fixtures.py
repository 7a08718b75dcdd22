"""Decoder graphs of real exporters against what Hugging Face transformers gave for the same weights.

`reference.npz` was recorded with transformers 4.57.6, float32, eager attention (keys in tests/data/fixtures/README.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniort import InferenceSession, SessionOptions
from miniort.generation import Generator, generate, open_decoder
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
            feeds[each.name] = np.zeros((len(ids), each.shape[1], 0, each.shape[3]), np.float32)
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


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("folder", list(FOLDERS))
def test_greedy_tokens(data: Path, folder: str, cached: bool, plugins: PluginManager) -> None:
    expected = reference(data, folder)
    decoder = open_decoder(data / "fixtures" / folder, plugins=plugins)
    generator = Generator(decoder, decoder.new_cache() if cached else None, decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(expected["input_ids"])
    steps = list(generate(generator, len(expected["greedy_tokens"])))
    assert [int(step.ids[0]) for step in steps] == expected["greedy_tokens"].tolist()
    logits = np.concatenate([step.logits for step in steps])
    np.testing.assert_allclose(logits, expected["greedy_logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("folder", ["gpt2_optimum", "llama_optimum"])
def test_greedy_tokens_of_a_left_padded_batch(data: Path, folder: str, plugins: PluginManager) -> None:
    expected = reference(data, folder)
    decoder = open_decoder(data / "fixtures" / folder, plugins=plugins)
    generator = Generator(decoder, decoder.new_cache(batch=2), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(expected["b2_input_ids"], expected["b2_attention_mask"])
    steps = list(generate(generator, expected["b2_greedy_tokens"].shape[1]))
    assert np.stack([step.ids for step in steps], axis=1).tolist() == expected["b2_greedy_tokens"].tolist()
    logits = np.stack([step.logits for step in steps], axis=1)
    np.testing.assert_allclose(logits, expected["b2_greedy_logits"], atol=TOLERANCE, rtol=0)
