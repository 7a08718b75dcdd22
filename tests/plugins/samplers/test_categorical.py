"""The categorical sampler."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.errors import GenerationError
from miniort_samplers.categorical import categorical


def streams(count: int) -> list[np.random.Generator]:
    return [np.random.default_rng([5, row]) for row in range(count)]


def test_tokens_come_with_their_probabilities() -> None:
    """20,000 draws: each share is within 5 standard deviations of its probability."""
    count, probabilities = 20_000, np.array([0.5, 0.3, 0.15, 0.0, 0.05])
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities).astype(np.float32)
    ids = categorical()(np.broadcast_to(logits, (count, 5)), streams(count))
    shares = np.bincount(ids, minlength=5) / count
    assert (np.abs(shares - probabilities) <= 5 * np.sqrt(probabilities * (1 - probabilities) / count)).all()


def test_one_number_is_drawn_per_row() -> None:
    [rng] = streams(1)
    categorical()(np.zeros((1, 1000), np.float32), [rng])
    [other] = streams(1)
    other.random()
    assert rng.random() == other.random()


def test_a_rare_token_of_a_large_vocabulary_keeps_its_chance() -> None:
    """100,000 tokens that together are half of it, each too small for float32 sums to notice beside the other half."""
    logits = np.full((100, 100_001), np.float32(-np.log(100_000.0)))
    logits[:, 0] = 0
    ids = categorical()(logits, streams(100))
    assert 25 < (ids > 0).sum() < 75


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([[0, 1], [np.nan, 0]], "row 1 has 1 NaN of 2, the first at token 0"),
        ([[0, 1], [-np.inf, -np.inf]], "row 1 has only logits of -inf"),
        ([[0, np.inf]], r"row 0 has \+inf"),
    ],
)
def test_rows_without_a_choice_are_errors(logits: list[list[float]], message: str) -> None:
    with pytest.raises(GenerationError, match=f"categorical .*{message}"):
        categorical()(np.array(logits, np.float32), streams(len(logits)))
