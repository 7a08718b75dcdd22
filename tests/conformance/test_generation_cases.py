"""Ways to get generation wrong that others have met: small inputs with the answer that is right, and their whole kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniort.generation import CacheLayoutInfo, Decoder, Generator, TokenHistory, generate, open_decoder, pad_left
from miniort.plugins import PluginManager, collect_mapping, create_plugin_manager
from miniort_models.tokenizer import open_tokenizer

LAYOUTS = list(collect_mapping(create_plugin_manager(), "miniort_cache_layouts", CacheLayoutInfo))

LAYOUT_OPTIONS = {"int8": {"block": 1}}
"""Padding moves the blocks of tokens that share a scale, so `int8` gives a row what it gives it alone only with blocks of one token."""

TOLERANCE = {"int8": 5e-2}
"""A key that lies between two steps of int8 may be rounded either way, as its last bits depend on how BLAS divides a batch."""


@pytest.fixture(scope="module", params=["gpt2_optimum", "llama_optimum"])
def decoder(request: pytest.FixtureRequest, data: Path, plugins: PluginManager) -> Decoder:
    return open_decoder(data / "fixtures" / request.param, plugins=plugins)


@pytest.mark.parametrize("options", [{}, {"sampler": "categorical", "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_of_eight_is_eight_alone(decoder: Decoder, layout: str, options: dict[str, Any]) -> None:
    """unslothai/unsloth#3699, huggingface/optimum#877: positions come from the mask, row by row."""
    rows = [np.random.default_rng(length).integers(3, 512, length).tolist() for length in (2, 5, 1, 9, 14, 3, 7, 11)]

    def generator_of(batch: int) -> Generator:
        sampler = decoder.new_sampler(options.get("sampler", "greedy"))
        return Generator(
            decoder, decoder.new_cache(layout, batch, **LAYOUT_OPTIONS.get(layout, {})), sampler, end_tokens=(), seed=options.get("seed")
        )

    together = generator_of(8)
    together.append_tokens(*pad_left(rows))
    steps = list(generate(together, 10))
    for index, row in enumerate(rows):
        alone = generator_of(1)
        alone.append_tokens(row)
        own = list(generate(alone, 10))
        assert [int(step.ids[index]) for step in steps] == [int(step.ids[0]) for step in own]
        atol = TOLERANCE.get(layout, 1e-4)
        np.testing.assert_allclose([step.logits[index] for step in steps], [step.logits[0] for step in own], atol=atol, rtol=0)


@pytest.mark.parametrize(("p", "kept"), [(0.9, 3), (1e-8, 1), (0.5, 1), (0.51, 2), (0.9501, 4), (1.0, 4)])
def test_top_p_keeps_the_token_that_crosses_and_one_at_least(decoder: Decoder, p: float, kept: int) -> None:
    """ml-explore/mlx-lm PR#1912, fishaudio/fish-speech PR#1171."""
    [process] = decoder.new_processors({"top_p": {"p": p}})
    logits = np.log(np.array([[0.1, 0.5, 0.05, 0.35]], np.float32))
    tokens = np.zeros((1, 1), np.int64)
    left = process(TokenHistory(tokens, tokens + 1, 1), logits)
    assert np.flatnonzero(np.isfinite(left[0])).tolist() == sorted(np.argsort(-logits[0])[:kept].tolist())


VOCABULARY = {
    "'": 6,
    "a": 64,
    "b": 65,
    "i": 72,
    "s": 82,
    "t": 83,
    "x": 87,
    "Ċ": 198,
    "Ġ": 220,
    "it": 270,
    "Ġb": 275,
    "ĊĊ": 628,
    "Ġ'": 705,
    "Ġx": 2124,
}
"""Those of GPT-2's tokens that the texts below need, with its ids; all of its merges that could join them."""

MERGES = ["Ġ b", "i t", "Ċ Ċ", "Ġ '", "Ġ x"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("a  b", [64, 220, 275]),  # of several spaces the last one belongs to the word
        ("\n\n x", [628, 2124]),
        ("it 's", [270, 705, 82]),  # an apostrophe behind a space begins no contraction
        ("a's", [64, 6, 82]),
        ("a  ", [64, 220, 220]),  # at the end there is no word
    ],
)
def test_texts_are_split_as_gpt2_splits_them(tmp_path: Path, text: str, ids: list[int]) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": VOCABULARY, "merges": MERGES}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level, "model": model})
    )
    tokenizer = open_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("layout", ["static", "paged", "window"])
def test_a_step_copies_no_history(decoder: Decoder, layout: str) -> None:
    """huggingface/optimum PR#1087: a layout that stores in place doesn't move what it has when a token comes."""
    spec = decoder.cache_spec(1)
    cache = decoder.new_cache(layout)
    tokens = np.random.default_rng(0).integers(3, 512, (1, 40))
    decoder.forward(tokens[:, :38], np.ones((1, 38), np.int64), cache)
    cache.commit(38)

    def stored() -> list[Any]:
        nothing = np.empty((1, spec.kv_heads, 0, spec.head_dim), spec.dtype)
        view = cache.append(0, nothing, nothing)[0]
        return [view] if isinstance(view, np.ndarray) else [block.tokens for block in view.blocks]

    before = stored()
    decoder.forward(tokens[:, 38:39], np.ones((1, 39), np.int64), cache)
    cache.commit(1)
    assert any(np.shares_memory(old, new) for old, new in zip(before, stored(), strict=False))
