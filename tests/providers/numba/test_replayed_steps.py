"""A decoder's steps replayed as calls of compiled functions: the tokens of ordinary steps, and when they aren't replayed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniort import SessionOptions
from miniort.generation import Decoder, Generator, generate, open_decoder, search
from miniort.tape import Tape
from miniort_cli.report import replay_rows

from .test_numba_conformance import plugins

PLUGINS = plugins()
FOLDERS = ("gpt2_optimum", "llama_optimum", "llama_genai_int4_asym", "qwen2_genai_int4", "gpt2_ort_convert_int8")
BEFORE_REPLAYS = 3
"""Tokens until steps are replayed: the prompt's, one step that meets the cache, one that is recorded."""


def open_on(folder: Path | str, *, replay: bool = True, threads: int | None = None) -> Decoder:
    options = SessionOptions(intra_op_num_threads=threads)
    return open_decoder(folder, providers=["numba", "cpu"], plugins=PLUGINS, options=options, replay=replay)


def started(decoder: Decoder, layout: str = "static", rows: int = 1, prompt: int = 9, **options: Any) -> Generator:
    generator = Generator(decoder, decoder.new_cache(layout, rows, **options), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(np.random.default_rng(0).integers(0, 200, (rows, prompt)))
    return generator


def tokens_of(generator: Generator, count: int) -> list[list[int]]:
    return [step.ids.tolist() for step in generate(generator, count)]


def counts_of(decoder: Decoder) -> tuple[int, int]:
    counts = decoder.replay_counts
    assert counts is not None
    return counts.recorded, counts.replayed


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("folder", FOLDERS)
def test_replays_give_the_tokens_and_the_logits_of_ordinary_steps(folder: str, rows: int, data: Path) -> None:
    ordinary, replaying = (open_on(data / "fixtures" / folder, replay=replay) for replay in (False, True))
    assert ordinary.replay_counts is None
    wanted, found = (list(generate(started(each, rows=rows), 12)) for each in (ordinary, replaying))
    assert [step.ids.tolist() for step in found] == [step.ids.tolist() for step in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.logits, other.logits, rtol=1e-4, atol=1e-5)
    assert replaying.replay_counts is not None
    assert replaying.replay_counts.obstacle is None
    assert counts_of(replaying) == (1, 12 - BEFORE_REPLAYS)
    assert dict(replay_rows(replaying))["steps replayed"] == "9, of 1 that was recorded"


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder",
    [
        *("gpt2/optimum", "gpt2/dynamo_cache", "gpt2/ort_convert_fused", "gpt2/optimum_eager", "gpt2/int8_dynamic"),
        *("gpt_neox/optimum", "gpt_neox/ort_optimizer", "opt/optimum", "qwen2/optimum"),
        *("llama/dynamo_bf16", "llama/fp16", "llama/genai_fp32", "llama/genai_fp32_nofuse", "llama/genai_int4"),
    ],
)
def test_more_exporters_and_families(folder: str, collection: Path) -> None:
    ordinary, replaying = (open_on(collection / folder, replay=replay) for replay in (False, True))
    assert tokens_of(started(replaying), 10) == tokens_of(started(ordinary), 10)
    assert counts_of(replaying) == (1, 10 - BEFORE_REPLAYS)


def test_a_left_padded_batch_rewound_and_forked(data: Path) -> None:
    with np.load(data / "fixtures" / "llama_optimum" / "reference.npz") as file:
        reference = dict(file)
    decoder = open_on(data / "fixtures" / "llama_optimum")
    generator = Generator(decoder, decoder.new_cache("static", batch=2), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(reference["b2_input_ids"], reference["b2_attention_mask"])
    tokens = np.stack([step.ids for step in generate(generator, 8)], axis=1)
    assert tokens.tolist() == reference["b2_greedy_tokens"][:, :8].tolist()
    start = generator.tokens.shape[1] - 4
    other = generator.fork()
    for each in (other, generator):  # the fork's memory is its own, so it's recorded anew; what follows goes on with the first recording
        each.rewind(start)
        assert np.stack([step.ids for step in generate(each, 4)], axis=1).tolist() == tokens[:, 4:].tolist()
    assert counts_of(decoder) == (2, 5 + 2 + 4)


def test_a_cache_that_grows_is_recorded_again(data: Path) -> None:
    folder = data / "fixtures" / "llama_optimum"
    decoder = open_on(folder)
    assert tokens_of(started(decoder, step=4), 20) == tokens_of(started(open_on(folder, replay=False), step=4), 20)
    recorded, replayed = counts_of(decoder)
    assert recorded > 1
    assert replayed > 0


def test_a_full_cache(data: Path) -> None:
    """Its last token has no room behind it, so that step is run as ever."""
    decoder = open_on(data / "fixtures" / "llama_optimum")
    tokens = tokens_of(started(open_on(data / "fixtures" / "llama_optimum", replay=False)), 6)
    assert tokens_of(started(decoder, max_length=14), 6) == tokens
    assert counts_of(decoder) == (1, 2)


def test_logits_that_are_kept_are_not_written_over(data: Path) -> None:
    decoder = open_on(data / "fixtures" / "gpt2_optimum")
    generator = started(decoder)
    kept = []
    for _ in range(7):
        logits = generator.logits()
        kept.append((logits, logits.copy()))
        generator.step()
    assert counts_of(decoder)[1] > 0
    for logits, copy in kept:
        np.testing.assert_array_equal(logits, copy)


def test_two_generations_of_one_decoder_in_two_threads(data: Path) -> None:
    folder = data / "fixtures" / "gpt2_optimum"
    prompts = (5, 9, 13, 21)
    wanted = [tokens_of(started(open_on(folder, replay=False), prompt=prompt), 30) for prompt in prompts]
    decoder = open_on(folder, threads=2)
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            assert list(pool.map(lambda prompt: tokens_of(started(decoder, prompt=prompt), 30), prompts)) == wanted
    recorded, replayed = counts_of(decoder)
    assert recorded >= len(prompts)
    assert replayed > 0


def test_beams_are_not_recorded_in_each_step(data: Path) -> None:
    decoder = open_on(data / "fixtures" / "llama_optimum")
    generator = Generator(decoder, decoder.new_cache("static"), decoder.new_sampler("beam", num_beams=2), end_tokens=())
    generator.append_tokens([5, 6, 7])
    search(generator, 5)
    assert counts_of(decoder) == (0, 0)


@pytest.mark.parametrize(
    ("folder", "layout", "reason"),
    [
        ("gpt2_optimum_legacy", "static", "the graph takes no positions, so it counts them by the length of its past"),
        ("llama_optimum", "paged", "the cache's layout has no place of its own for each token; static has"),
    ],
)
def test_what_is_not_recorded_runs_as_ever_and_says_why(folder: str, layout: str, reason: str, data: Path) -> None:
    decoder = open_on(data / "fixtures" / folder)
    wanted = tokens_of(started(open_on(data / "fixtures" / folder, replay=False), layout), 6)
    assert tokens_of(started(decoder, layout), 6) == wanted
    assert counts_of(decoder) == (0, 0)
    assert dict(replay_rows(decoder))["steps replayed"] == f"none, not recorded: {reason}"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["mistral/optimum", "gemma3/optimum"])
def test_a_window_that_is_counted_by_the_length_of_the_past_is_noticed(folder: str, collection: Path) -> None:
    """And what the step that was noted down wrote into the cache is put right."""
    decoder = open_on(collection / folder)
    assert tokens_of(started(decoder, prompt=40), 40) == tokens_of(started(open_on(collection / folder, replay=False), prompt=40), 40)


def test_an_interrupt_in_a_replay_loses_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = data / "fixtures" / "gpt2_optimum"
    wanted = tokens_of(started(open_on(folder, replay=False)), 12)
    generator = started(open_on(folder))
    found = tokens_of(generator, 5)
    play = Tape.play

    def interrupted(self: Tape) -> None:
        play(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tape, "play", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generator.step()
    assert found + tokens_of(generator, 7) == wanted
