"""The kits for samplers and logits processors, run on each of miniort-samplers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from miniort.generation import LogitsProcessor, Sampler, TokenHistory
from miniort.testing import LogitsProcessorConformance, SamplerConformance
from miniort.types import FloatArray
from miniort_samplers.categorical import categorical
from miniort_samplers.forbidding import bad_words, min_new_tokens, no_repeat_ngram
from miniort_samplers.grammar import grammar
from miniort_samplers.greedy import greedy
from miniort_samplers.logit_bias import logit_bias
from miniort_samplers.penalties import frequency_penalty, presence_penalty, repetition_penalty
from miniort_samplers.plugin import miniort_logits_processors, miniort_samplers
from miniort_samplers.temperature import temperature
from miniort_samplers.truncation import epsilon, eta, min_p, top_k, top_p, typical_p

SAMPLERS: dict[str, Callable[[], Any]] = {"greedy": greedy, "categorical": categorical}

TRUNCATING: dict[str, Callable[[], LogitsProcessor]] = {
    "temperature": lambda: temperature(0.7),
    "temperature, nearly 0": lambda: temperature(1e-38),
    "top_k": lambda: top_k(3),
    "top_p": lambda: top_p(0.9),
    "top_p, 0": lambda: top_p(0),
    "min_p": lambda: min_p(0.1),
    "typical_p": lambda: typical_p(0.5),
    "epsilon": lambda: epsilon(0.1),
    "eta": lambda: eta(0.1),
    "repetition_penalty": lambda: repetition_penalty(1.3),
    "frequency_penalty": lambda: frequency_penalty(0.5),
    "presence_penalty": lambda: presence_penalty(-1.5),
    "logit_bias": lambda: logit_bias({0: 1.5}),
}

FORBIDDING: dict[str, Callable[[], LogitsProcessor]] = {
    "no_repeat_ngram": lambda: no_repeat_ngram(2),
    "bad_words": lambda: bad_words([[0], [0, 0]]),
    "min_new_tokens": lambda: min_new_tokens(3),
}


class Letters:
    """A tokenizer of six tokens: a, b, c, ab, ca, and the end."""

    vocabulary_size = 6

    def encode(self, text: str) -> list[int]:
        return ["abc".index(letter) for letter in text]

    def decode(self, ids: Any) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()

    def token_bytes(self, token: int) -> bytes:
        return [b"a", b"b", b"c", b"ab", b"ca", b""][token]


@st.composite
def beginnings(draw: st.DrawFn) -> tuple[TokenHistory, FloatArray]:
    """Histories whose generated part is the beginning of (ab|c)*, with finite logits of 8 tokens, two more than the tokenizer's."""
    texts = ([], [3], [0, 1], [2, 3], [4, 1], [5, 5])
    length = draw(st.sampled_from([0, 2]))
    rows = draw(st.lists(st.sampled_from([text for text in texts if len(text) == length]), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = np.ones((len(rows), 3 + length), np.int64)
    mask[:, :3] = np.arange(3) >= rng.integers(3, size=(len(rows), 1))
    tokens = np.concatenate([rng.integers(6, size=(len(rows), 3)), np.array(rows, np.int64).reshape(len(rows), length)], axis=1)
    logits = rng.standard_normal((len(rows), 8)).astype(np.float32)
    return TokenHistory(tokens, mask, 3, frozenset([5]), draw(st.none() | st.integers(2, 20))), logits


def sampler_kit(name: str) -> SamplerConformance:
    class Kit(SamplerConformance):
        def create(self) -> Sampler:
            sampler: Sampler = SAMPLERS[name]()
            return sampler

    return Kit()


def processor_kits() -> Iterator[tuple[str, LogitsProcessorConformance]]:
    class Kit(LogitsProcessorConformance):
        def __init__(self, make: Callable[[], LogitsProcessor], may_rule_out_all: bool) -> None:
            self.make, self.may_rule_out_all = make, may_rule_out_all

        def create(self) -> LogitsProcessor:
            return self.make()

    within_grammar = grammar(Letters(), regex="(ab|c)*")

    class GrammarKit(LogitsProcessorConformance):
        def create(self) -> LogitsProcessor:
            return within_grammar

        def examples(self) -> st.SearchStrategy[tuple[TokenHistory, FloatArray]]:
            return beginnings()

    yield from ((name, Kit(make, False)) for name, make in TRUNCATING.items())
    yield from ((name, Kit(make, True)) for name, make in FORBIDDING.items())
    yield "grammar", GrammarKit()


KITS = dict(processor_kits())


def names_of_tests(kit: type) -> list[str]:
    return [name for name in dir(kit) if name.startswith("test_")]


@pytest.mark.parametrize("test", names_of_tests(SamplerConformance))
@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_conforms(name: str, test: str) -> None:
    getattr(sampler_kit(name), test)()


@pytest.mark.parametrize("test", names_of_tests(LogitsProcessorConformance))
@pytest.mark.parametrize("name", KITS)
def test_logits_processor_conforms(name: str, test: str) -> None:
    getattr(KITS[name], test)()


def test_none_of_ours_is_left_out() -> None:
    assert {info.name for info in miniort_samplers()} == {*SAMPLERS, "beam"}, "beam is a search; test_beam.py is about it"
    assert {info.name for info in miniort_logits_processors()} == {name.partition(",")[0] for name in KITS}
