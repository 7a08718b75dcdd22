"""Greedy search, every logits processor and beam search give what Hugging Face transformers gave: see tools/record_sampling.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniort.generation import Continuation, Decoder, Generator, LogitsProcessor, TokenHistory, open_decoder, pad_left, search
from miniort.plugins import PluginManager
from miniort.types import FloatArray
from miniort_samplers.plugin import miniort_logits_processors, miniort_samplers

RECORDED = Path(__file__).parents[2] / "data" / "sampling"

OPTION = {
    "temperature": "temperature",
    "top_k": "k",
    "top_p": "p",
    "min_p": "p",
    "typical_p": "p",
    "epsilon": "cutoff",
    "eta": "cutoff",
    "repetition_penalty": "penalty",
    "frequency_penalty": "penalty",
    "presence_penalty": "penalty",
    "no_repeat_ngram": "size",
    "min_new_tokens": "count",
    "logit_bias": "biases",
    "bad_words": "words",
}

CREATE = {info.name: info.create for info in miniort_logits_processors()}


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, Any]:
    return dict(np.load(RECORDED / "processors.npz"))


def history_of(recorded: Mapping[str, Any], batch: int) -> TokenHistory:
    tokens = recorded["tokens"][batch].astype(np.int64)
    return TokenHistory(tokens, np.ones_like(tokens), int(recorded["prompt_length"]), frozenset(recorded["end_tokens"].tolist()))


def options_of(recorded: Mapping[str, Any], name: str) -> list[Any]:
    options: list[Any] = json.loads(str(recorded["options"]))[name]
    return [{int(token): bias for token, bias in each.items()} for each in options] if name == "logit_bias" else options


def differing(recorded: Mapping[str, Any], name: str, create: Callable[[Any], LogitsProcessor]) -> list[int]:
    """Batches for which a processor gives something else than was recorded under that name."""
    logits: FloatArray = recorded["logits"]
    options = options_of(recorded, name)
    assert len(options) == len(logits) >= 50
    wrong = []
    for batch, option in enumerate(options):
        found = create(option)(history_of(recorded, batch), logits[batch].copy())
        if recorded[name].dtype == np.uint8:  # of a processor that only rules out, it was recorded what it lets through
            kept = np.unpackbits(recorded[name], count=logits.size).reshape(logits.shape)[batch]
            wanted = np.where(kept == 1, logits[batch], -np.inf)
            if name == "top_p":  # which of equal logits are kept is an accident of torch.sort, which isn't stable; how many isn't
                found, wanted = np.sort(found), np.sort(wanted)
            right = np.array_equal(found, wanted)
        else:
            right = np.allclose(found, recorded[name][batch], rtol=1e-6, atol=0)
        if not right:
            wrong.append(batch)
    return wrong


@pytest.mark.parametrize("name", OPTION)
def test_processor_agrees(recorded: Mapping[str, Any], name: str) -> None:
    assert differing(recorded, name, lambda option: CREATE[name](**{OPTION[name]: option})) == []


def test_every_processor_is_compared() -> None:
    assert set(OPTION) == set(CREATE) - {"grammar"}, "grammar has no counterpart in transformers"


def keeps_one_too_many(p: float) -> LogitsProcessor:
    """top_p off by one."""

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        order = np.argsort(-logits, axis=-1, kind="stable")
        ranked = np.take_along_axis(logits, order, axis=-1)
        powers = np.exp(ranked - ranked[:, :1])
        reached = (powers / powers.sum(axis=-1, keepdims=True)).cumsum(axis=-1)
        removed = np.empty(logits.shape, bool)
        np.put_along_axis(removed, order[:, 2:], reached[:, :-2] >= p, axis=-1)
        np.put_along_axis(removed, order[:, :2], False, axis=-1)
        return np.where(removed, np.float32(-np.inf), logits)

    return process


def test_top_p_off_by_one_is_seen(recorded: Mapping[str, Any]) -> None:
    assert len(differing(recorded, "top_p", keeps_one_too_many)) > 10


def test_top_p_keeps_the_lowest_ids_of_equal_logits() -> None:
    """As greedy does: the smallest p keeps the token that greedy chooses."""
    history = TokenHistory(np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64), 1)
    found = CREATE["top_p"](p=0.5)(history, np.zeros((1, 6), np.float32))
    assert np.flatnonzero(np.isfinite(found[0])).tolist() == [0, 1, 2]


def test_greedy_agrees(recorded: Mapping[str, Any]) -> None:
    [greedy] = [info.create() for info in miniort_samplers() if info.name == "greedy"]
    for logits, ids in zip(recorded["logits"], recorded["greedy"], strict=True):
        assert greedy(logits, []).tolist() == ids.tolist()
    assert len(recorded["greedy"]) >= 50


def test_top_p_of_the_published_cases() -> None:
    """Cases 20: probabilities .5, .35, .1, .05."""
    logits = np.log(np.array([[0.5, 0.35, 0.1, 0.05]], np.float32))
    history = TokenHistory(np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64), 1)
    for p, kept in ((0.9, 3), (1e-8, 1), (0.5, 1), (0.51, 2), (1, 4)):
        found = CREATE["top_p"](p=p)(history, logits)
        assert np.isfinite(found).tolist() == [[True] * kept + [False] * (4 - kept)]


BEAMS = dict(np.load(RECORDED / "beams.npz"))
CASES = json.loads(str(BEAMS["cases"]))


@pytest.fixture(scope="module")
def decoder(data: Path, plugins: PluginManager) -> Decoder:
    return open_decoder(data / "fixtures" / "gpt2_optimum", plugins=plugins)


def search_case(decoder: Decoder, case: Mapping[str, Any], **other: Any) -> list[list[Continuation]]:
    settings = {"num_beams": case["num_beams"], "length_penalty": case["length_penalty"], "early_stopping": case["early_stopping"], **other}
    wanted = {}
    if "repetition_penalty" in case:
        wanted = {"repetition_penalty": {"penalty": case["repetition_penalty"]}, "no_repeat_ngram": {"size": case["no_repeat_ngram_size"]}}
    tokens, mask = pad_left(case["rows"])
    generator = Generator(
        decoder,
        decoder.new_cache(batch=len(tokens)),
        decoder.new_sampler("beam", **settings),
        decoder.new_processors(wanted),
        end_tokens=case["end_tokens"],
    )
    generator.append_tokens(tokens, mask)
    found = search(generator, int(BEAMS["max_new_tokens"]))
    assert generator.tokens.tolist() == tokens.tolist(), "the generator stays at its prompt"
    return found


def same_as_recorded(number: int, found: list[list[Continuation]]) -> bool:
    """Tokens and scores of all beams of all prompts; recorded tokens [prompts·beams, time] are filled up with the first end token."""
    filling = CASES[number]["end_tokens"][0]
    beams = [continuation for prompt in found for continuation in prompt]
    tokens, scores = BEAMS[f"tokens_{number}"], BEAMS[f"scores_{number}"]
    if len(beams) != len(tokens):
        return False
    same = all(
        each.tokens.tolist() == row[: len(each.tokens)].tolist() and (row[len(each.tokens) :] == filling).all()
        for each, row in zip(beams, tokens, strict=True)
    )
    return same and np.allclose([each.score for each in beams], scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_beam_search_agrees(decoder: Decoder, number: int) -> None:
    assert same_as_recorded(number, search_case(decoder, CASES[number]))


@pytest.mark.parametrize(
    ("option", "values"),
    [("num_beams", (2, 4)), ("length_penalty", (-0.5, 1.0, 2.5)), ("early_stopping", (False, True, "never"))],
)
def test_recorded_beams_tell_each_option(decoder: Decoder, option: str, values: tuple[Any, ...]) -> None:
    """Another value of an option gives something else for some of the cases: they do look at it."""
    for case_value in values:
        for other in values:
            if other != case_value:
                numbers = [number for number, case in enumerate(CASES) if case[option] == case_value]
                found = (same_as_recorded(number, search_case(decoder, CASES[number], **{option: other})) for number in numbers)
                assert not all(found), f"{option} {other} in the place of {case_value} isn't seen"
