"""Logits processors where transformers is no oracle: options that are refused, padding, what counts as generated, and their order."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from miniort.errors import GenerationError, PluginError
from miniort.generation import Decoder, LogitsProcessor, TokenHistory, open_decoder
from miniort.plugins import PluginManager
from miniort.types import FloatArray
from miniort_samplers.forbidding import bad_words, min_new_tokens, no_repeat_ngram
from miniort_samplers.logit_bias import logit_bias
from miniort_samplers.penalties import frequency_penalty, presence_penalty, repetition_penalty
from miniort_samplers.plugin import miniort_logits_processors
from miniort_samplers.temperature import temperature
from miniort_samplers.truncation import epsilon, eta, min_p, top_k, top_p, typical_p

ORDER = [
    *("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram", "bad_words", "min_new_tokens"),
    *("grammar", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon", "eta"),
]


def history_of(tokens: Sequence[Sequence[int]], prompt_length: int, padding: Sequence[int] = (), **more: Any) -> TokenHistory:
    array = np.array(tokens, np.int64)
    mask = np.arange(array.shape[1]) >= np.array(padding or [0] * len(array))[:, None]
    return TokenHistory(array, mask.astype(np.int64), prompt_length, **more)


def ruled_out(process: LogitsProcessor, history: TokenHistory, vocabulary: int = 6) -> list[list[int]]:
    found: FloatArray = process(history, np.zeros((len(history.tokens), vocabulary), np.float32))
    return [np.flatnonzero(row == -np.inf).tolist() for row in found]


@pytest.fixture(scope="module")
def demo(plugins: PluginManager) -> Decoder:
    return open_decoder("demo", plugins=plugins)


def test_temperature_0_names_greedy() -> None:
    with pytest.raises(GenerationError, match=r"temperature must be above 0, found 0; .*sampler greedy"):
        temperature(0)


@pytest.mark.parametrize(
    ("create", "wrong"),
    [
        (temperature, (-1.0, float("nan"), float("inf"), 1e-50)),
        (top_k, (0, -1)),
        (top_p, (-0.1, 1.1, float("nan"))),
        (min_p, (-0.1, 1.1, float("nan"))),
        (typical_p, (0, 1, float("nan"))),
        (epsilon, (0, 1, float("nan"))),
        (eta, (0, 1, float("nan"))),
        (repetition_penalty, (0, -1, float("nan"), float("inf"))),
        (frequency_penalty, (float("nan"), float("inf"))),
        (presence_penalty, (float("nan"), float("-inf"))),
        (no_repeat_ngram, (0,)),
        (min_new_tokens, (-1,)),
        (bad_words, ([], [[]])),
        (logit_bias, ({1: float("nan")}, {1: float("inf")})),
    ],
)
def test_options_that_mean_nothing_are_refused(create: Any, wrong: Sequence[Any]) -> None:
    for option in wrong:
        with pytest.raises(GenerationError):
            create(option)


def test_low_temperatures_do_not_leave_float32() -> None:
    logits = np.array([[100.0, 99.0, -np.inf]], np.float32)
    found = temperature(1e-37)(history_of([[0]], 1), logits)
    assert found[0, 0] == 0
    assert found[0, 1] < -1e36
    assert found[0, 2] == -np.inf


def test_a_repetition_counts_once_and_padding_not_at_all() -> None:
    history = history_of([[5, 5, 1, 1], [2, 3, 3, 4]], prompt_length=3, padding=[2, 0])
    found = repetition_penalty(2.0)(history, np.array([[-1.0, 3.0, 1.0, 1.0, 1.0, 1.0]] * 2, np.float32))
    assert found.tolist() == [[-1, 1.5, 1, 1, 1, 1], [-1, 3, 0.5, 0.5, 0.5, 1]]


def test_frequency_and_presence_count_what_was_generated() -> None:
    history = history_of([[9, 0, 1, 2, 2, 2, 1], [0, 0, 0, 0, 0, 0, 0]], prompt_length=3, padding=[1, 0])
    logits = np.zeros((2, 4), np.float32)
    assert frequency_penalty(0.5)(history, logits).tolist() == [[0, -0.5, -1.5, 0], [-2, 0, 0, 0]]
    assert presence_penalty(0.5)(history, logits).tolist() == [[0, -0.5, -0.5, 0], [-0.5, 0, 0, 0]]


def test_runs_of_tokens_do_not_reach_into_padding() -> None:
    history = history_of([[1, 2, 1], [1, 2, 1]], prompt_length=3, padding=[0, 2])
    assert ruled_out(no_repeat_ngram(2), history) == [[2], []]
    assert ruled_out(bad_words([[2, 1, 4], [1, 5], [3]]), history) == [[3, 4, 5], [3, 5]]


def test_an_end_token_is_no_bad_word() -> None:
    history = history_of([[1, 2]], 2, end_tokens=frozenset([3]))
    assert ruled_out(bad_words([[3], [2, 3], [4]]), history) == [[3, 4]]
    assert ruled_out(bad_words([[3], [4]]), history) == [[4]]


def test_min_new_tokens_counts_from_the_prompt_on() -> None:
    for generated, forbidden in ((0, [3, 4]), (1, [3, 4]), (2, []), (3, [])):
        history = history_of([[1, 1, *[2] * generated]], 2, end_tokens=frozenset([3, 4]))
        assert ruled_out(min_new_tokens(2), history) == [forbidden]


@pytest.mark.parametrize("process", [bad_words([[0], [6]]), logit_bias({6: 1.0}), logit_bias({-1: 1.0})])
def test_tokens_that_the_model_has_not_are_errors(process: LogitsProcessor) -> None:
    with pytest.raises(GenerationError, match=r"the model has 0 … 5"):
        ruled_out(process, history_of([[0]], 1))


def test_the_order_is_the_documented_one(demo: Decoder) -> None:
    ranked = sorted(miniort_logits_processors(), key=lambda info: -info.priority)
    assert [info.name for info in ranked] == ORDER
    priorities = [info.priority for info in ranked]
    assert len(set(priorities)) == len(priorities), "none depends on its name"


def test_processors_run_by_priority_whatever_order_they_are_named_in(demo: Decoder) -> None:
    """Temperature before top-p: at a temperature of 4 the second token is within .9, and at 1 it isn't."""
    logits = np.array([[4.0, 1.0, -9.0]], np.float32)
    history = history_of([[0]], 1)
    wanted: dict[str, dict[str, Any]] = {"top_p": {"p": 0.9}, "temperature": {"temperature": 4.0}}
    for names in (list(wanted), list(reversed(wanted))):
        result = logits
        for process in demo.new_processors({name: wanted[name] for name in names}):
            result = process(history, result)
        assert np.isfinite(result).tolist() == [[True, True, False]]
    for process in (top_p(0.9), temperature(4.0)):  # a user's own order
        logits = process(history, logits)
    assert np.isfinite(logits).tolist() == [[True, False, False]]


def test_options_can_be_discovered() -> None:
    """Each option has a type that a command line can go by."""
    known = {"float": float, "int": int, "tokenizer": None}
    for info in miniort_logits_processors():
        parameters = inspect.signature(info.create, eval_str=True).parameters
        assert parameters, info.name
        assert all(parameter.annotation is not parameter.empty for parameter in parameters.values())
        if len(parameters) == 1 and info.name not in ("logit_bias", "bad_words"):
            [parameter] = parameters.values()
            assert parameter.annotation in known.values(), info.name


def test_a_missing_option_is_named(demo: Decoder) -> None:
    with pytest.raises(PluginError, match="'top_k' needs the option 'k'; given: none"):
        demo.new_processors({"top_k": {}})
