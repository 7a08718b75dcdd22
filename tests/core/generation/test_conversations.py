"""Resuming: what two prompts begin with is computed once; limits of a run; and the scores of what was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniort.errors import CacheError, GenerationError
from miniort.generation import Decoder, GeneratedToken, Generator, generate, open_decoder, pad_left, score, tokens_left
from miniort.plugins import PluginManager
from miniort.types import Array, FloatArray

HISTORY = np.random.default_rng(0).integers(3, 512, 30).tolist()


@pytest.fixture(scope="module")
def decoder(data: Path, plugins: PluginManager) -> Decoder:
    return open_decoder(data / "fixtures" / "gpt2_optimum", plugins=plugins)


class CountingCache:
    """A cache that notes how many tokens each run was given."""

    def __init__(self, right: Any) -> None:
        self.right = right
        self.given: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def append(self, layer: int, key: Array, value: Array) -> Any:
        if layer == 0:
            self.given.append(key.shape[2])
        return self.right.append(layer, key, value)


def generator_of(decoder: Decoder, cache: Any, **options: Any) -> Generator:
    return Generator(decoder, cache, decoder.new_sampler(options.pop("sampler", "greedy")), end_tokens=(), **options)


def logits_of(decoder: Decoder, tokens: Any, mask: Any = None) -> FloatArray:
    fresh = generator_of(decoder, None)
    fresh.append_tokens(tokens, mask)
    return fresh.logits()


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([*HISTORY[:20], 7, 8], 20),  # the conversation goes on
        ([*HISTORY[:12], 7, 8, 9], 12),  # it was changed in the middle
        (HISTORY[:20], 19),  # the same again: only the logits are wanted
        (HISTORY[:5], 4),  # back to its beginning
        ([7, 8, 9], 0),  # another one
    ],
)
@pytest.mark.parametrize("layout", ["concat_bhtd", "static", "paged"])
def test_only_what_is_new_is_run(decoder: Decoder, layout: str, tokens: list[int], kept: int) -> None:
    cache = CountingCache(decoder.new_cache(layout))
    generator = generator_of(decoder, cache)
    generator.append_tokens(HISTORY[:20])
    generator.logits()
    cache.given.clear()
    assert generator.continue_from(tokens) == kept
    np.testing.assert_allclose(generator.logits(), logits_of(decoder, tokens), atol=1e-4, rtol=0)
    assert cache.given == [len(tokens) - kept]
    assert generator.tokens.tolist() == [tokens]
    assert generator.prompt_length == len(tokens)


def test_an_answer_that_comes_back_as_history_is_not_run_again(decoder: Decoder) -> None:
    cache = CountingCache(decoder.new_cache())
    generator = generator_of(decoder, cache)
    generator.append_tokens(HISTORY[:10])
    answer = [int(each.ids[0]) for each in generate(generator, 6)]
    cache.given.clear()
    question = [*HISTORY[:10], *answer, 9, 9, 9]
    assert generator.continue_from(question) == 15  # the last of the answer was chosen, and not run
    generator.step()
    assert cache.given == [4]


def test_a_padded_batch_is_continued_row_by_row(decoder: Decoder) -> None:
    generator = generator_of(decoder, decoder.new_cache(batch=2))
    tokens, mask = pad_left([HISTORY[:4], HISTORY[:9]])
    generator.append_tokens(tokens, mask)
    generator.step()
    longer = np.concatenate([tokens, [[5, 6], [5, 6]]], axis=1)
    more = np.concatenate([mask, [[1, 1], [1, 1]]], axis=1)
    assert generator.continue_from(longer, more) == 9
    np.testing.assert_allclose(generator.logits(), logits_of(decoder, longer, more), atol=1e-4, rtol=0)
    # Rows with another padding have nothing in common, whatever the ids that stand there.
    assert generator.continue_from(longer, np.ones_like(longer)) == 0


def test_random_numbers_are_those_of_a_new_generator(decoder: Decoder) -> None:
    fresh = generator_of(decoder, decoder.new_cache(), sampler="categorical", seed=4)
    fresh.append_tokens(HISTORY[:12])
    wanted = [int(each.ids[0]) for each in generate(fresh, 8)]
    used = generator_of(decoder, decoder.new_cache(), sampler="categorical", seed=4)
    used.append_tokens(HISTORY[:8])
    list(generate(used, 5))
    used.continue_from(HISTORY[:12])
    assert [int(each.ids[0]) for each in generate(used, 8)] == wanted


def test_without_a_cache_and_without_a_history(decoder: Decoder) -> None:
    uncached = generator_of(decoder, None)
    uncached.append_tokens(HISTORY[:6])
    assert uncached.continue_from(HISTORY[:8]) == 0
    np.testing.assert_array_equal(uncached.logits(), logits_of(decoder, HISTORY[:8]))
    new = generator_of(decoder, decoder.new_cache())
    assert new.continue_from(HISTORY[:8]) == 0
    assert new.tokens.shape == (1, 8)


def test_what_is_refused_changes_nothing(decoder: Decoder) -> None:
    generator = generator_of(decoder, decoder.new_cache("window", window=8, sinks=0, rewind=1))
    generator.append_tokens(HISTORY[:20])
    list(generate(generator, 40))
    before, wanted = generator.tokens.tolist(), generator.logits()
    assert generator.cache is not None
    assert generator.cache.min_length > 2
    for wrong, error in (
        (HISTORY[:2], CacheError),
        ([], GenerationError),
        ([[5], [6]], GenerationError),
        ([5] * 129, GenerationError),
    ):
        with pytest.raises(error):
            generator.continue_from(wrong)
        assert generator.tokens.tolist() == before
        np.testing.assert_array_equal(generator.logits(), wanted)


def test_continuations_of_one_prompt_run_it_once(decoder: Decoder) -> None:
    cache = CountingCache(decoder.new_cache())
    generator = generator_of(decoder, cache, sampler="categorical", seed=1)
    generator.append_tokens(HISTORY[:12])
    generator.logits()
    generator.reorder([0, 0, 0])
    rows = np.stack([each.ids for each in generate(generator, 8)], axis=1)
    assert cache.given == [12] + [1] * 7
    assert len({tuple(row) for row in rows.tolist()}) == 3
    alone = generator_of(decoder, decoder.new_cache(), sampler="categorical", seed=1)
    alone.append_tokens(HISTORY[:12])
    assert [int(each.ids[0]) for each in generate(alone, 8)] == rows[0].tolist()


@pytest.mark.parametrize(
    ("limits", "count"),
    [({"max_new_tokens": 4}, 4), ({"max_length": 15}, 5), ({"max_new_tokens": 3, "max_length": 15}, 3), ({"max_length": 10}, 0)],
)
def test_limits(decoder: Decoder, limits: dict[str, int], count: int) -> None:
    generator = generator_of(decoder, decoder.new_cache())
    generator.append_tokens(HISTORY[:10])
    assert tokens_left(generator, **limits) == count
    assert len(list(generate(generator, **limits))) == count


def test_limits_that_are_passed_already(decoder: Decoder) -> None:
    generator = generator_of(decoder, decoder.new_cache())
    generator.append_tokens(HISTORY[:10])
    assert tokens_left(generator) is None
    with pytest.raises(GenerationError, match="max_length is 9, and there are 10 tokens"):
        next(generate(generator, max_length=9))


def test_scores_are_log_probabilities() -> None:
    logits = np.array([[1.0, 3.0, 3.0, -np.inf], [0.0, 0.0, 0.0, 1000.0]], np.float32)
    first, second = score(GeneratedToken(np.array([0, 3]), logits), top=3)
    total = np.log(np.exp([1.0, 3.0, 3.0]).sum())
    assert (first.chosen.id, first.chosen.logit) == (0, 1.0)
    assert first.chosen.log_probability == pytest.approx(1 - total)
    assert [each.id for each in first.top] == [1, 2, 0], "of equal ones the lowest id first"
    assert first.top[0].log_probability == pytest.approx(3 - total)
    assert second.chosen.log_probability == 0
    assert sum(np.exp([each.log_probability for each in score(GeneratedToken(np.array([0, 0]), logits), top=4)[0].top])) == pytest.approx(1)
    assert score(GeneratedToken(np.array([0, 3]), logits))[0].top == ()
    with pytest.raises(GenerationError, match="negative"):
        score(GeneratedToken(np.array([0, 3]), logits), top=-1)


def test_a_cache_that_is_adopted_must_lack_the_last_token(decoder: Decoder) -> None:
    generator = generator_of(decoder, decoder.new_cache())
    tokens = np.array([HISTORY[:5]])
    cache = decoder.new_cache()
    decoder.forward(tokens, np.ones_like(tokens), cache)
    cache.commit(5)
    with pytest.raises(GenerationError, match="holds 5 of 5"):
        generator.adopt(cache, tokens, np.ones_like(tokens), 5)
    cache.crop(4)
    generator.adopt(cache, tokens, np.ones_like(tokens), 5)
    np.testing.assert_allclose(generator.logits(), logits_of(decoder, HISTORY[:5]), atol=1e-4, rtol=0)
    with pytest.raises(GenerationError, match="without tokens"):
        generator.adopt(cache, tokens, np.ones_like(tokens), 5)
