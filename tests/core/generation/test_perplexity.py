"""Likelihoods of texts, against a direct computation without a cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from miniort.errors import GenerationError
from miniort.generation import Decoder, TextLikelihood, next_token_log_probabilities, open_decoder, text_likelihood

LENGTH = 300


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    opened = open_decoder("demo")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def tokens(decoder: Decoder) -> list[int]:
    return np.random.default_rng(4).integers(0, 2048, LENGTH).tolist()


def directly(decoder: Decoder, tokens: list[int], place: int) -> float:
    """log P of the token at a place, from one run of all those before it."""
    before = np.array([tokens[:place]])
    logits = decoder.uncached(before, np.ones_like(before))[0, -1].astype(np.float64)
    return float(logits[tokens[place]] - np.log(np.exp(logits).sum()))


def test_each_token_is_foretold_from_those_before_it(decoder: Decoder, tokens: list[int]) -> None:
    """More tokens than are run at a time."""
    found = next_token_log_probabilities(decoder, tokens[:150])
    assert found.shape == (149,)
    for place in (1, 2, 3, 64, 127, 128, 129, 130, 148, 149):
        assert found[place - 1] == pytest.approx(directly(decoder, tokens, place), abs=1e-4)
    assert next_token_log_probabilities(decoder, tokens[:1]).shape == (0,)


@pytest.mark.parametrize(("window", "stride"), [(40, 40 // 2), (40, 39), (20, 1), (41, 7), (100, None)])
def test_windows_count_each_token_once(decoder: Decoder, tokens: list[int], window: int, stride: int | None) -> None:
    text = tokens[:60]
    found = text_likelihood(decoder, text, window=window, stride=stride)
    step = stride or window // 2
    wanted, counted = 0.0, 1
    for start in range(0, len(text), step):
        end = min(start + window, len(text))
        scores = next_token_log_probabilities(decoder, text[start:end])
        wanted -= scores[counted - start - 1 :].sum()
        counted = end
        if end == len(text):
            break
    assert found.tokens == len(text) - 1
    assert found.nats == pytest.approx(wanted, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(wanted / (len(text) - 1)), rel=1e-6)
    assert found.seconds > 0


def test_a_text_longer_than_the_context(decoder: Decoder, tokens: list[int]) -> None:
    """Its end is seen from the second window, its beginning from the first."""
    assert decoder.context_length == 256
    seen: list[TextLikelihood] = []
    found = text_likelihood(decoder, tokens, progress=seen.append)
    first = next_token_log_probabilities(decoder, tokens[:256])
    second = next_token_log_probabilities(decoder, tokens[128:])
    assert [each.tokens for each in seen] == [255, 299]
    assert seen[-1] == found
    assert seen[0].nats == pytest.approx(-first.sum(), rel=1e-6)
    assert found.nats == pytest.approx(-first.sum() - second[-(LENGTH - 256) :].sum(), rel=1e-6)


@pytest.mark.parametrize(
    ("length", "options", "said"),
    [
        (1, {}, "at least two tokens for its likelihood, found 1"),
        (9, {"window": 1}, "the window must be at least 2 tokens, found 1"),
        (9, {"window": 300}, "a window of 300 tokens is more than the model's context of 256"),
        (9, {"window": 4, "stride": 4}, "the stride must be at least 1 and less than the window of 4 tokens, found 4"),
        (9, {"stride": 0}, "the stride must be at least 1"),
    ],
)
def test_what_cannot_be_measured(decoder: Decoder, tokens: list[int], length: int, options: dict[str, int], said: str) -> None:
    with pytest.raises(GenerationError, match=said):
        text_likelihood(decoder, tokens[:length], **options)


def test_a_token_that_is_impossible() -> None:
    assert TextLikelihood(math.inf, 3, 1.0).perplexity == math.inf
    assert TextLikelihood(1e6, 3, 1.0).perplexity == math.inf
