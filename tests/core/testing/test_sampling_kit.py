"""The kits for samplers and logits processors catch those that are wrong, each in one way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from miniort.generation.sampling import LogitsProcessor, Sampler, TokenHistory
from miniort.testing import LogitsProcessorConformance, SamplerConformance
from miniort.types import FloatArray, IntArray

Rngs = Sequence[np.random.Generator]

CAUGHT = (AssertionError, ExceptionGroup, ValueError)
"""ValueError: NumPy refused to write into a read-only array."""


def sampler_kit(make: Callable[[], Sampler]) -> SamplerConformance:
    class Kit(SamplerConformance):
        def create(self) -> Sampler:
            return make()

    return Kit()


def processor_kit(make: Callable[[], LogitsProcessor]) -> LogitsProcessorConformance:
    class Kit(LogitsProcessorConformance):
        def create(self) -> LogitsProcessor:
            return make()

    return Kit()


def names_of_tests(kit: type) -> list[str]:
    return [name for name in dir(kit) if name.startswith("test_")]


def probabilities(logits: FloatArray) -> FloatArray:
    """Softmax over the vocabulary: logits [batch, vocabulary] -> the same shape."""
    powers = np.exp(logits.astype(np.float32) - logits.max(axis=-1, keepdims=True).astype(np.float32))
    result: FloatArray = powers / powers.sum(axis=-1, keepdims=True)
    return result


def multinomial(logits: FloatArray, rngs: Rngs) -> IntArray:
    """A right sampler: one number is drawn per row."""
    reached = probabilities(logits).cumsum(axis=-1, dtype=np.float64)
    draws = np.array([rng.random() for rng in rngs]) * reached[:, -1]
    ids: IntArray = (reached <= draws[:, None]).sum(axis=-1)
    return ids


def ids_as_column(logits: FloatArray, rngs: Rngs) -> IntArray:
    return logits.argmax(axis=-1, keepdims=True)


def ids_as_floats(logits: FloatArray, rngs: Rngs) -> Any:
    return logits.argmax(axis=-1).astype(np.float32)


def ids_as_int32(logits: FloatArray, rngs: Rngs) -> Any:
    return logits.argmax(axis=-1).astype(np.int32)


def ids_as_list(logits: FloatArray, rngs: Rngs) -> Any:
    return logits.argmax(axis=-1).tolist()


def ids_past_the_vocabulary(logits: FloatArray, rngs: Rngs) -> IntArray:
    return logits.argmax(axis=-1) + logits.shape[1]


def global_randomness(logits: FloatArray, rngs: Rngs) -> IntArray:
    return multinomial(logits, [np.random.default_rng() for _ in rngs])


def one_stream_for_all(logits: FloatArray, rngs: Rngs) -> IntArray:
    return multinomial(logits, [rngs[0]] * len(rngs))


def streams_by_position(logits: FloatArray, rngs: Rngs) -> IntArray:
    """Takes randomness from the right stream, but as much more of it as there are rows before it."""
    for row, rng in enumerate(rngs):
        rng.random(row)
    return multinomial(logits, rngs)


def normalises_in_place(logits: FloatArray, rngs: Rngs) -> IntArray:
    logits -= logits.max(axis=-1, keepdims=True)
    return multinomial(logits, rngs)


def uniform(logits: FloatArray, rngs: Rngs) -> IntArray:
    """Chooses tokens that were ruled out."""
    return np.array([rng.integers(logits.shape[1]) for rng in rngs])


def first_row_for_all(logits: FloatArray, rngs: Rngs) -> IntArray:
    return np.repeat(logits.mean(axis=0, keepdims=True).argmax(axis=-1), len(logits))


def overflows_in_float16(logits: FloatArray, rngs: Rngs) -> IntArray:
    """Calculates in the precision of the logits, where 1000 * 100 is infinite."""
    with np.errstate(over="ignore"):
        scaled = logits * logits.dtype.type(1000)
    ids: IntArray = scaled.argmax(axis=-1)
    return ids


def contiguous_only(logits: FloatArray, rngs: Rngs) -> IntArray:
    """Reads the memory behind an array, and not the array."""
    whole = logits if logits.base is None else logits.base
    return whole.reshape(-1, logits.shape[1])[: len(logits)].argmax(axis=-1)


@pytest.mark.parametrize("test", names_of_tests(SamplerConformance))
def test_a_right_sampler_passes(test: str) -> None:
    getattr(sampler_kit(lambda: multinomial), test)()


@pytest.mark.parametrize(
    ("sampler", "test"),
    [
        (ids_as_column, "test_ids_are_int64_of_the_vocabulary_one_per_row"),
        (ids_as_floats, "test_ids_are_int64_of_the_vocabulary_one_per_row"),
        (ids_as_int32, "test_ids_are_int64_of_the_vocabulary_one_per_row"),
        (ids_as_list, "test_ids_are_int64_of_the_vocabulary_one_per_row"),
        (ids_past_the_vocabulary, "test_ids_are_int64_of_the_vocabulary_one_per_row"),
        (global_randomness, "test_one_seed_gives_one_answer"),
        (normalises_in_place, "test_logits_are_not_written_into"),
        (normalises_in_place, "test_memory_of_logits_does_not_matter"),
        (uniform, "test_ruled_out_tokens_are_not_chosen"),
        (first_row_for_all, "test_a_row_is_sampled_as_it_is_alone"),
        (one_stream_for_all, "test_a_row_is_sampled_as_it_is_alone"),
        (one_stream_for_all, "test_the_order_of_rows_does_not_matter"),
        (streams_by_position, "test_the_order_of_rows_does_not_matter"),
        (overflows_in_float16, "test_float16_logits_are_taken"),
        (contiguous_only, "test_memory_of_logits_does_not_matter"),
    ],
)
def test_a_wrong_sampler_is_caught(sampler: Sampler, test: str) -> None:
    with pytest.raises(CAUGHT):
        getattr(sampler_kit(lambda: sampler), test)()


def sampler_with_a_memory() -> Sampler:
    calls: list[int] = []

    def sample(logits: FloatArray, rngs: Rngs) -> IntArray:
        calls.append(0)
        ranked = np.argsort(-logits, axis=-1, kind="stable")
        return ranked[:, len(calls) % min(2, logits.shape[1])]

    return sample


def test_a_sampler_with_a_memory_is_caught() -> None:
    with pytest.raises(CAUGHT):
        sampler_kit(sampler_with_a_memory).test_one_seed_gives_one_answer()


def halve(history: TokenHistory, logits: FloatArray) -> FloatArray:
    """A right processor: logits / 2, and those of tokens that came before a little less."""
    result = np.asarray(logits, np.float32) / np.float32(2)
    for row in range(len(logits)):
        result[row, history.row(row)] -= np.float32(0.25)
    return result


def halve_in_place(history: TokenHistory, logits: FloatArray) -> FloatArray:
    logits /= 2
    return logits


def sort_tokens(history: TokenHistory, logits: FloatArray) -> FloatArray:
    history.tokens.sort(axis=1)
    return logits.copy()


def unmask(history: TokenHistory, logits: FloatArray) -> FloatArray:
    history.mask[:] = 1
    return logits.copy()


def best_only(history: TokenHistory, logits: FloatArray) -> FloatArray:
    return logits.max(axis=-1, keepdims=True)


def to_double(history: TokenHistory, logits: FloatArray) -> Any:
    return logits.astype(np.float64)


def halve_in_half_precision(history: TokenHistory, logits: FloatArray) -> FloatArray:
    """Calculates in the precision of the logits, and widens too late."""
    return (logits / logits.dtype.type(3)).astype(np.float32)


def rule_out_all(history: TokenHistory, logits: FloatArray) -> FloatArray:
    return np.full_like(logits, -np.inf)


def let_all_back_in(history: TokenHistory, logits: FloatArray) -> FloatArray:
    return np.maximum(logits, np.float32(-1e9))


def centre(history: TokenHistory, logits: FloatArray) -> FloatArray:
    """-inf minus a mean of -inf is NaN."""
    with np.errstate(invalid="ignore"):
        return logits - logits.mean(axis=-1, keepdims=True)


def scale_by_batch(history: TokenHistory, logits: FloatArray) -> FloatArray:
    return logits / np.float32(1 + logits.max())


def penalise_padding(history: TokenHistory, logits: FloatArray) -> FloatArray:
    """Takes padding for text."""
    result = np.asarray(logits, np.float32).copy()
    for row, tokens in enumerate(history.tokens):
        result[row, tokens[(tokens >= 0) & (tokens < logits.shape[1])]] -= 1
    return result


def drops_the_crossing_token(history: TokenHistory, logits: FloatArray) -> FloatArray:
    """top_p off by one: what crosses the threshold is ruled out, so a likely token alone leaves none."""
    scores = np.asarray(logits, np.float32)
    order = np.argsort(-scores, axis=-1, kind="stable")
    reached = np.take_along_axis(probabilities(scores), order, axis=-1).cumsum(axis=-1)
    removed = np.empty(scores.shape, bool)
    np.put_along_axis(removed, order, reached > 0.9, axis=-1)
    return np.where(removed, np.float32(-np.inf), scores)


@pytest.mark.parametrize(
    ("processor", "test"),
    [
        (halve_in_place, "test_inputs_are_not_written_into"),
        (halve_in_place, "test_memory_of_inputs_does_not_matter"),
        (sort_tokens, "test_inputs_are_not_written_into"),
        (unmask, "test_inputs_are_not_written_into"),
        (best_only, "test_shape_stays_and_type_is_float32"),
        (to_double, "test_shape_stays_and_type_is_float32"),
        (halve_in_half_precision, "test_arithmetic_is_that_of_float32"),
        (rule_out_all, "test_a_token_is_left_and_nothing_is_nan"),
        (drops_the_crossing_token, "test_a_token_is_left_and_nothing_is_nan"),
        (centre, "test_a_token_is_left_and_nothing_is_nan"),
        (let_all_back_in, "test_what_is_ruled_out_stays_so"),
        (scale_by_batch, "test_a_row_is_processed_as_it_is_alone"),
        (penalise_padding, "test_a_row_is_processed_as_it_is_alone"),
        (penalise_padding, "test_what_padding_is_does_not_matter"),
    ],
)
def test_a_wrong_logits_processor_is_caught(processor: LogitsProcessor, test: str) -> None:
    with pytest.raises(CAUGHT):
        getattr(processor_kit(lambda: processor), test)()


@pytest.mark.parametrize("test", names_of_tests(LogitsProcessorConformance))
def test_a_right_logits_processor_passes(test: str) -> None:
    getattr(processor_kit(lambda: halve), test)()


def test_a_processor_that_forbids_need_not_leave_a_token() -> None:
    class Kit(LogitsProcessorConformance):
        may_rule_out_all = True

        def create(self) -> LogitsProcessor:
            return rule_out_all

    Kit().test_a_token_is_left_and_nothing_is_nan()


def processor_with_a_memory() -> LogitsProcessor:
    calls: list[int] = []

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        calls.append(0)
        return logits - np.float32(len(calls))

    return process


def test_a_logits_processor_with_a_memory_is_caught() -> None:
    with pytest.raises(CAUGHT):
        processor_kit(processor_with_a_memory).test_no_memory_of_earlier_calls()


def test_without_hypothesis_the_error_says_what_to_install() -> None:
    """And core itself does without it."""
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import miniort.generation.sampling\n"
        "try:\n    import miniort.testing\nexcept ImportError as error:\n    print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "miniort.testing needs hypothesis: pip install hypothesis"
