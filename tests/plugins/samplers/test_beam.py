"""Beam search beside what transformers recorded: the search by hand, its contract with the generator, and what it refuses."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from miniort.errors import GenerationError
from miniort.generation import Decoder, Generator, Search, TokenHistory, generate, open_decoder, pad_left, search
from miniort.plugins import PluginManager
from miniort.types import FloatArray
from miniort_samplers.beam import beam

VOCABULARY, END = 4, 3


@pytest.fixture(scope="module")
def demo(plugins: PluginManager) -> Decoder:
    return open_decoder("demo", plugins=plugins)


def table(seed: int) -> FloatArray:
    """Log-probabilities of the next token by the last one: [vocabulary, vocabulary]."""
    logits = np.random.default_rng(seed).standard_normal((VOCABULARY, VOCABULARY)) * 2
    scores: FloatArray = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    return scores


def run_by_hand(scores: FloatArray, steps: int, **options: Any) -> list[tuple[list[int], float]]:
    """A search over a table, of one prompt that is the token 0."""
    method = beam(**options)
    run = method.start(1)
    tokens = np.zeros((method.width, 1), np.int64)
    for step in range(steps):
        if run.is_done:
            break
        history = TokenHistory(tokens, np.ones_like(tokens), 1, frozenset([END]), steps - step)
        rows, ids = run.step(history, scores[tokens[:, -1]])
        tokens = np.concatenate([tokens[rows], ids[:, None]], axis=1)
    return [(each.tokens.tolist(), each.score) for each in run.continuations()[0]]


@pytest.mark.parametrize("seed", range(8))
def test_enough_beams_find_the_best_of_all_texts(seed: int) -> None:
    """With as many beams as there are texts nothing is cut off: the best is what trying out every text finds."""
    scores, steps = table(seed), 4
    found = run_by_hand(scores, steps, num_beams=VOCABULARY**3, early_stopping="never", length_penalty=1.0)

    def score(text: tuple[int, ...]) -> float:
        return math.fsum(float(scores[a, b]) for a, b in itertools.pairwise((0, *text))) / len(text)

    texts = [
        text
        for length in range(1, steps + 1)
        for text in itertools.product(range(VOCABULARY), repeat=length)
        if END not in text[:-1] and (text[-1] == END or length == steps)
    ]
    best = max(texts, key=score)
    assert found[0][0] == list(best)
    assert found[0][1] == pytest.approx(score(best), abs=1e-5)
    assert [each for _, each in found] == sorted((each for _, each in found), reverse=True)


def test_one_beam_is_greedy(demo: Decoder) -> None:
    prompt = demo.open_tokenizer().encode("In the beginning")
    plain = Generator(demo, demo.new_cache(), demo.new_sampler())
    plain.append_tokens(prompt)
    wanted = [int(step.ids[0]) for step in generate(plain, 12)]
    searching = Generator(demo, demo.new_cache(), demo.new_sampler("beam", num_beams=1))
    searching.append_tokens(prompt)
    [[found]] = search(searching, 12)
    assert found.tokens.tolist() == wanted


def test_a_batch_is_searched_as_its_prompts_are_alone(demo: Decoder) -> None:
    tokenizer = demo.open_tokenizer()
    prompts = [tokenizer.encode(text) for text in ("In the beginning", "And", "Thou shalt not")]

    def found(rows: list[list[int]], cached: bool = True) -> list[list[list[int]]]:
        tokens, mask = pad_left(rows)
        cache = demo.new_cache(batch=len(rows)) if cached else None
        generator = Generator(demo, cache, beam(3, 0.5), end_tokens=tokenizer.encode(","))
        generator.append_tokens(tokens, mask)
        return [[each.tokens.tolist() for each in prompt] for prompt in search(generator, 5)]

    together = found(prompts)
    assert together == [found([prompt])[0] for prompt in prompts]
    assert together == found(prompts, cached=False)
    assert all(len(prompt) == 3 for prompt in together)


def test_the_generator_stays_usable(demo: Decoder) -> None:
    generator = Generator(demo, demo.new_cache(), beam(2))
    generator.append_tokens([5, 6, 7])
    first = search(generator, 5)
    assert generator.tokens.tolist() == [[5, 6, 7]]
    assert [each.tokens.tolist() for each in search(generator, 5)[0]] == [each.tokens.tolist() for each in first[0]]
    generator.append_tokens(first[0][0].tokens)
    assert len(search(generator, 3)[0]) == 2


def test_a_search_ends_with_the_context(demo: Decoder) -> None:
    assert demo.context_length == 256
    generator = Generator(demo, demo.new_cache(), beam(2), end_tokens=())
    generator.append_tokens([5] * 254)
    assert [len(each.tokens) for each in search(generator)[0]] == [3, 3]


def test_a_grammar_holds_for_every_beam(demo: Decoder) -> None:
    tokenizer = demo.open_tokenizer()
    processors = demo.new_processors({"grammar": {"regex": " [a-z]+ [a-z]+\\."}})
    generator = Generator(demo, demo.new_cache(), beam(3), processors)
    generator.append_tokens(tokenizer.encode("And he"))
    for each in search(generator, 10)[0]:
        text = tokenizer.decode(each.tokens.tolist())
        assert text.endswith(".")
        assert text.count(" ") == 2


@pytest.mark.parametrize("choices", [["yes"], ["yes", "no"]])
def test_fewer_texts_than_beams(demo: Decoder, choices: list[str]) -> None:
    """No beam goes where the processors don't allow it, and the search ends when nothing is left."""
    tokenizer = demo.open_tokenizer()
    generator = Generator(demo, demo.new_cache(batch=2), beam(4), demo.new_processors({"grammar": {"choices": choices}}))
    generator.append_tokens([[5, 6], [7, 8]])
    for prompt in search(generator, 30):
        assert {tokenizer.decode(each.tokens.tolist()) for each in prompt} == set(choices)
        assert all(each.score > -1000 for each in prompt)


def test_nothing_to_choose_from_is_an_error(demo: Decoder) -> None:
    generator = Generator(demo, demo.new_cache(), beam(2), [lambda history, logits: np.full_like(logits, -np.inf)])
    generator.append_tokens([5, 6])
    with pytest.raises(GenerationError, match="prompt 0 has only scores of -inf"):
        search(generator, 3)


def test_a_search_is_no_sampler_and_a_sampler_no_search(demo: Decoder) -> None:
    assert isinstance(beam(), Search)
    assert not isinstance(demo.new_sampler("greedy"), Search)
    for sampler, call, message in (
        (beam(2), lambda each: each.step(), r"call search\(generator\)"),
        (demo.new_sampler("greedy"), search, "call generate"),
        (beam(2), lambda each: search(each, 0), "at least 1 for a search"),
    ):
        generator = Generator(demo, demo.new_cache(), sampler)
        generator.append_tokens([5])
        with pytest.raises(GenerationError, match=message):
            call(generator)


@pytest.mark.parametrize("options", [{"num_beams": 0}, {"early_stopping": "always"}, {"length_penalty": float("nan")}])
def test_options_that_mean_nothing_are_refused(options: Any) -> None:
    with pytest.raises(GenerationError):
        beam(**options)
