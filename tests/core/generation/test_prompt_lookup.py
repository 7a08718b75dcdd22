"""Prompt lookup: drafts out of the context change nothing but the number of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniort.errors import CacheError, GenerationError
from miniort.generation import Decoder, Generator, draft_from_context, generate, generate_with_lookup, open_decoder
from miniort.plugins import PluginManager
from miniort.types import Array

PROMPTS = 20


@pytest.fixture(scope="module")
def decoder(data: Path, plugins: PluginManager) -> Decoder:
    return open_decoder(data / "fixtures" / "gpt2_optimum", plugins=plugins)


def generator_of(decoder: Decoder, prompt: Sequence[int], layout: str = "concat_bhtd", **options: Any) -> Generator:
    sampler, processors = options.pop("sampler", "greedy"), options.pop("processors", {})
    generator = Generator(
        decoder,
        options.pop("cache", None) or decoder.new_cache(layout),
        decoder.new_sampler(sampler),
        decoder.new_processors(processors),
        end_tokens=options.pop("end_tokens", ()),
        **options,
    )
    generator.append_tokens(prompt)
    return generator


def prompt_of(seed: int) -> list[int]:
    """Tokens in which some runs come again."""
    rng = np.random.default_rng(seed)
    part = rng.integers(3, 512, 6).tolist()
    return [*part, *rng.integers(3, 512, 3).tolist(), *part[: 2 + seed % 4]]


def ids_of(tokens: Any) -> list[int]:
    return [int(token.ids[0]) for token in tokens]


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1]),
        ([7, 1, 2, 8, 1, 2, 9, 1, 2], [9, 1]),  # the last of several
        ([5, 2, 3, 6, 2, 3, 2], [3, 2]),  # no run of three or two: of one
        ([1, 1, 1], [1]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_drafts(tokens: list[int], draft: list[int]) -> None:
    assert draft_from_context(np.array(tokens), 2).tolist() == draft


@pytest.mark.parametrize("layout", ["concat_bhtd", "concat_bthd", "static", "paged", "window"])
def test_output_is_that_of_plain_decoding(decoder: Decoder, layout: str) -> None:
    for seed in range(PROMPTS):
        prompt = prompt_of(seed)
        plain = list(generate(generator_of(decoder, prompt), 24))
        drafted = list(generate_with_lookup(generator_of(decoder, prompt, layout), 4, 24))
        assert ids_of(drafted) == ids_of(plain)
        np.testing.assert_allclose(
            np.concatenate([each.logits for each in drafted]), np.concatenate([each.logits for each in plain]), atol=1e-4, rtol=0
        )


def test_output_is_that_of_sampling_with_the_same_seed(decoder: Decoder) -> None:
    options: dict[str, Any] = {
        "sampler": "categorical",
        "processors": {"temperature": {"temperature": 0.3}, "repetition_penalty": {"penalty": 1.1}},
    }
    for seed in range(PROMPTS):
        prompt = prompt_of(seed)
        plain = ids_of(generate(generator_of(decoder, prompt, seed=seed, **options), 16))
        assert ids_of(generate_with_lookup(generator_of(decoder, prompt, seed=seed, **options), 4, 16)) == plain


class CountingCache:
    """A cache that counts the runs of a graph over it."""

    def __init__(self, right: Any) -> None:
        self.right, self.runs = right, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def append(self, layer: int, key: Array, value: Array) -> Any:
        self.runs += layer == 0
        return self.right.append(layer, key, value)


def test_a_text_that_repeats_itself_takes_fewer_runs(plugins: PluginManager) -> None:
    decoder = open_decoder("demo", plugins=plugins)
    prompt = decoder.open_tokenizer().encode("In the beginning")
    loop = ids_of(generate(generator_of(decoder, prompt), 60))
    cache: Any = CountingCache(decoder.new_cache())
    assert ids_of(generate_with_lookup(generator_of(decoder, prompt, cache=cache), 8, 60)) == loop
    assert cache.runs < 40, "this model's greedy text is a loop"


def test_an_end_token_in_a_draft_ends_the_text(decoder: Decoder) -> None:
    prompt = prompt_of(1)
    text = ids_of(generate(generator_of(decoder, prompt), 30))
    end = text[20]
    wanted = ids_of(generate(generator_of(decoder, prompt, end_tokens=[end]), 30))
    generator = generator_of(decoder, prompt, end_tokens=[end])
    assert ids_of(generate_with_lookup(generator, 6, 30)) == wanted
    assert generator.is_done


@pytest.mark.parametrize("limits", [{"max_new_tokens": 7}, {"max_length": 20}, {}])
def test_limits_are_those_of_plain_decoding(decoder: Decoder, limits: dict[str, int]) -> None:
    prompt = prompt_of(2)
    wanted = ids_of(generate(generator_of(decoder, prompt), **limits))
    assert ids_of(generate_with_lookup(generator_of(decoder, prompt), 5, **limits)) == wanted


@pytest.mark.parametrize("taken", [1, 3, 10, 17])
def test_stopping_leaves_what_was_given(decoder: Decoder, taken: int) -> None:
    prompt = prompt_of(0)
    wanted = ids_of(generate(generator_of(decoder, prompt), 40))
    generator = generator_of(decoder, prompt)
    stream = generate_with_lookup(generator, 8, 40)
    assert ids_of(next(stream) for _ in range(taken)) == wanted[:taken]
    stream.close()  # type: ignore[attr-defined]
    assert generator.tokens[0].tolist() == prompt + wanted[:taken]
    assert ids_of(generate(generator, 40 - taken)) == wanted[taken:]


@pytest.mark.parametrize("fail_at", range(2, 9))
@pytest.mark.parametrize("error", [KeyboardInterrupt, CacheError])
def test_an_interrupted_draft_can_be_taken_again(decoder: Decoder, fail_at: int, error: type[BaseException]) -> None:
    prompt = prompt_of(0)
    wanted = ids_of(generate(generator_of(decoder, prompt), 20))

    class Failing(CountingCache):
        def append(self, layer: int, key: Array, value: Array) -> Any:
            result = super().append(layer, key, value)
            if layer == 1 and self.runs == fail_at:
                self.runs += 1
                raise error("stop")
            return result

    cache: Any = Failing(decoder.new_cache())
    generator = generator_of(decoder, prompt, cache=cache)
    found: list[int] = []
    interrupted = 0
    while len(found) < 20:
        try:
            for token in generate_with_lookup(generator, 6, 20 - len(found)):
                found.append(int(token.ids[0]))  # noqa: PERF401 - an error must not lose those before it
        except error:
            interrupted += 1
    assert interrupted == 1
    assert found == wanted


def test_a_processor_that_fails_in_a_draft_leaves_random_numbers_as_they_were(decoder: Decoder) -> None:
    prompt = prompt_of(0)
    wanted = ids_of(generate(generator_of(decoder, prompt, sampler="categorical", seed=3), 12))
    generator = generator_of(decoder, prompt, sampler="categorical", seed=3)
    calls = []

    def fails_once(history: Any, logits: Array) -> Array:
        calls.append(1)
        if len(calls) == 4:
            raise GenerationError("once")
        return logits

    generator.processors = (fails_once,)
    found: list[int] = []
    while len(found) < 12:
        try:
            for token in generate_with_lookup(generator, 6, 12 - len(found)):
                found.append(int(token.ids[0]))  # noqa: PERF401
        except GenerationError:
            assert len(calls) == 4
    assert found == wanted


def test_what_has_no_drafts(decoder: Decoder, plugins: PluginManager) -> None:
    generator = generator_of(decoder, [5, 6, 5])
    with pytest.raises(GenerationError, match="1 token or more"):
        next(generate_with_lookup(generator, 0))
    with pytest.raises(GenerationError, match=r"holds 0 of 3"):
        generator.step_with_draft([6])
    generator.step()
    with pytest.raises(GenerationError, match="doesn't fit"):
        generator.step_with_draft([6] * 125)
    batch = Generator(decoder, decoder.new_cache(batch=2), decoder.new_sampler())
    batch.append_tokens(np.array([[5, 6], [7, 8]]))
    uncached = Generator(decoder, None, decoder.new_sampler())
    uncached.append_tokens([5, 6])
    for wrong in (batch, uncached):
        with pytest.raises(GenerationError, match="one row with a cache"):
            next(generate_with_lookup(wrong, 3))
        with pytest.raises(GenerationError, match="one row, a sampler"):
            wrong.step_with_draft([5])
