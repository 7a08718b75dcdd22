"""The greedy sampler."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from miniort.errors import GenerationError
from miniort.generation.sampling import Sampler, SamplerInfo
from miniort.plugins import create_plugin_manager, find_named
from miniort.testing import SamplerConformance

RNGS = [np.random.default_rng(0)] * 3


def greedy() -> Sampler:
    """The sampler as a session finds it: by entry point and name."""
    sampler: Sampler = find_named(create_plugin_manager(allow=["samplers"]), "miniort_samplers", SamplerInfo, "greedy", "sampler").create()
    return sampler


class TestGreedyConforms(SamplerConformance):
    def create(self) -> Sampler:
        return greedy()


def test_takes_the_largest_of_each_row() -> None:
    ids = greedy()(np.array([[0.5, 2.0, 1.0], [-1.0, -3.0, -2.0]], np.float32), RNGS)
    assert ids.tolist() == [1, 0]
    assert ids.dtype == np.int64


def test_lowest_id_wins_a_tie() -> None:
    assert greedy()(np.array([[1, 3, 3, 2, 3]], np.float32), RNGS).tolist() == [1]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_float_types(dtype: type) -> None:
    assert greedy()(np.array([[1.0, 2.5, -4.0]]).astype(dtype), RNGS).tolist() == [1]


def test_draws_nothing_from_the_generator() -> None:
    rng = np.random.default_rng(7)
    greedy()(np.zeros((2, 5), np.float32), [rng, rng])
    assert rng.random() == np.random.default_rng(7).random()


def test_infinite_logits_can_be_chosen_and_avoided() -> None:
    logits = np.array([[0, np.inf, 1], [-np.inf, -np.inf, -5]], np.float32)
    assert greedy()(logits, RNGS).tolist() == [1, 2]


def test_nan_is_an_error_that_names_the_row() -> None:
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2:] = np.nan
    with pytest.raises(GenerationError, match=r"row 1 has 2 NaN of 4, the first at token 2"):
        greedy()(logits, RNGS)


def test_nan_is_found_beside_larger_logits_and_infinities() -> None:
    with pytest.raises(GenerationError, match="row 0 has 1 NaN"):
        greedy()(np.array([[np.inf, np.nan, 1.0]], np.float32), RNGS)


def test_a_row_without_any_token_is_an_error() -> None:
    logits = np.array([[0, 1], [-np.inf, -np.inf]], np.float32)
    with pytest.raises(GenerationError, match="row 1 has only logits of -inf"):
        greedy()(logits, RNGS)
