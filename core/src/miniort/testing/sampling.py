"""The kits for samplers and logits processors: classes to subclass in a test file, whose tests pytest then collects.

from miniort.testing import SamplerConformance

class TestMySampler(SamplerConformance):
    def create(self):
        return my_sampler(strength=2.0)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from miniort.generation.sampling import LogitsProcessor, Sampler, TokenHistory
from miniort.types import Array, FloatArray, IntArray

# The tests are inherited, so hypothesis sees one test run by several classes. That's what they are for.
_SETTINGS = settings(
    max_examples=30,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.explain],  # which can say nothing of numbers out of a seed
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)

_SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def _logits(draw: st.DrawFn) -> FloatArray:
    """Logits [batch, vocabulary] with ties, wide and narrow spreads, and some of -inf; each row has one finite logit at least."""
    batch, vocabulary = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(_SEEDS))
    logits = rng.standard_normal((batch, vocabulary)) * draw(st.sampled_from([0.0, 0.1, 3.0, 100.0]))
    if draw(st.booleans()):
        logits = np.round(logits)
    if draw(st.booleans()):
        ruled_out = rng.random(logits.shape) < 0.5
        ruled_out[np.arange(batch), rng.integers(vocabulary, size=batch)] = False
        logits[ruled_out] = -np.inf
    return logits.astype(np.float32)


@st.composite
def histories_and_logits(draw: st.DrawFn) -> tuple[TokenHistory, FloatArray]:
    """A history of 1 … 4 rows, some padded on the left, whose tokens have logits, and logits [batch, vocabulary]."""
    logits = draw(_logits())
    batch, vocabulary = logits.shape
    rng = np.random.default_rng(draw(_SEEDS))
    time = draw(st.integers(1, 8))
    # Each row keeps a token at least.
    mask = (np.arange(time) >= rng.integers(time, size=(batch, 1))).astype(np.int64)
    # Padding comes before the prompt's end.
    prompt_length = int(rng.integers(int((mask == 0).sum(axis=1).max()), time + 1))
    end_tokens = frozenset(rng.integers(vocabulary, size=draw(st.integers(0, 2))).tolist())
    remaining = draw(st.none() | st.integers(1, 20))
    tokens = rng.integers(vocabulary, size=(batch, time))
    return TokenHistory(tokens, mask, prompt_length, end_tokens, remaining), logits


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _read_only(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _with_gaps(array: Array) -> Array:
    """The same values, not contiguous: as the last position of logits [batch, time, vocabulary] are."""
    wide = np.zeros((array.shape[0], 2, array.shape[1]), array.dtype)
    wide[:, -1] = array
    return wide[:, -1]


def _row_alone(history: TokenHistory, row: int) -> TokenHistory:
    """One row as a batch of its own, which needs no padding."""
    padding = int((history.mask[row] == 0).sum())
    return TokenHistory(
        history.tokens[row : row + 1, padding:],
        history.mask[row : row + 1, padding:],
        history.prompt_length - padding,
        history.end_tokens,
        history.remaining,
    )


def _streams(seed: int, batch: int) -> list[np.random.Generator]:
    return [np.random.default_rng([seed, row]) for row in range(batch)]


class SamplerConformance:
    """What every sampler must do. Subclass it and define `create`."""

    def create(self) -> Sampler:
        """A new sampler to be tested."""
        raise NotImplementedError(f"{type(self).__name__} must define create()")

    def _sample(self, logits: Array, seed: int) -> IntArray:
        return self.create()(logits, _streams(seed, len(logits)))

    @_SETTINGS
    @given(logits=_logits(), seed=_SEEDS)
    def test_ids_are_int64_of_the_vocabulary_one_per_row(self, logits: FloatArray, seed: int) -> None:
        batch, vocabulary = logits.shape
        ids = self._sample(logits, seed)
        _check(isinstance(ids, np.ndarray), f"ids: wanted a NumPy array, found {type(ids).__name__}")
        _check(ids.dtype == np.int64, f"ids: wanted int64, found {ids.dtype}")
        _check(ids.shape == (batch,), f"ids: wanted shape {(batch,)}, found {ids.shape}")
        _check(bool(((ids >= 0) & (ids < vocabulary)).all()), f"ids: wanted 0 … {vocabulary - 1}, found {ids}")

    @_SETTINGS
    @given(logits=_logits(), seed=_SEEDS)
    def test_ruled_out_tokens_are_not_chosen(self, logits: FloatArray, seed: int) -> None:
        ids = self._sample(logits, seed)
        chosen = logits[np.arange(len(logits)), ids]
        _check(bool((chosen > -np.inf).all()), f"tokens with a logit of -inf were chosen: ids {ids} have the logits {chosen}")

    @_SETTINGS
    @given(logits=_logits(), seed=_SEEDS)
    def test_one_seed_gives_one_answer(self, logits: FloatArray, seed: int) -> None:
        """From a new sampler, and from one that has been used: all randomness comes from `rngs`."""
        sampler = self.create()
        first, second = (sampler(logits, _streams(seed, len(logits))) for _ in range(2))
        third = self._sample(logits, seed)
        _check(
            np.array_equal(first, second) and np.array_equal(first, third),
            f"three samplings with one seed differ: {first}, {second}, {third}",
        )

    @_SETTINGS
    @given(logits=_logits(), seed=_SEEDS)
    def test_logits_are_not_written_into(self, logits: FloatArray, seed: int) -> None:
        given_logits = logits.copy()
        self._sample(given_logits, seed)
        _check(np.array_equal(given_logits, logits), f"the sampler wrote into its logits: they were\n{logits}\nand are\n{given_logits}")

    @_SETTINGS
    @given(logits=_logits(), seed=_SEEDS)
    def test_memory_of_logits_does_not_matter(self, logits: FloatArray, seed: int) -> None:
        """Read-only arrays and arrays with gaps are logits like any others."""
        wanted = self._sample(logits.copy(), seed)
        for noun, same in (("read-only", _read_only(logits)), ("non-contiguous", _with_gaps(logits))):
            found = self._sample(same, seed)
            _check(np.array_equal(found, wanted), f"{noun} logits: wanted {wanted}, found {found}")

    @_SETTINGS
    @given(logits=_logits(), seed=_SEEDS)
    def test_float16_logits_are_taken(self, logits: FloatArray, seed: int) -> None:
        half = logits.astype(np.float16)
        wanted, found = self._sample(half.astype(np.float32), seed), self._sample(half, seed)
        _check(np.array_equal(found, wanted), f"float16 logits: wanted {wanted} as for float32, found {found}")

    @_SETTINGS
    @given(logits=_logits(), seed=_SEEDS)
    def test_a_row_is_sampled_as_it_is_alone(self, logits: FloatArray, seed: int) -> None:
        """Its token depends on its logits and on its own stream of random numbers, and on nothing of the batch."""
        together = self._sample(logits, seed)
        for row in range(len(logits)):
            [alone] = self.create()(logits[row : row + 1], [_streams(seed, len(logits))[row]])
            _check(bool(together[row] == alone), f"row {row}: alone {alone}, in a batch of {len(logits)} {together[row]}")

    @_SETTINGS
    @given(logits=_logits(), seed=_SEEDS)
    def test_the_order_of_rows_does_not_matter(self, logits: FloatArray, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(logits))
        streams = _streams(seed, len(logits))
        wanted = self._sample(logits, seed)[order]
        found = self.create()(logits[order], [streams[row] for row in order])
        _check(np.array_equal(found, wanted), f"rows in the order {order}: wanted {wanted}, found {found}")


class LogitsProcessorConformance:
    """What every logits processor must do. Subclass it and define `create`.

    `may_rule_out_all`: a processor that rules tokens out for what stands before them can't promise that one is left, and sets it to True.
    """

    may_rule_out_all = False

    def create(self) -> LogitsProcessor:
        """A new logits processor to be tested."""
        raise NotImplementedError(f"{type(self).__name__} must define create()")

    def examples(self) -> st.SearchStrategy[tuple[TokenHistory, FloatArray]]:
        """What the processor is given. Replace it where a processor takes only some histories, or one size of vocabulary."""
        return histories_and_logits()

    @_SETTINGS
    @given(data=st.data())
    def test_shape_stays_and_type_is_float32(self, data: st.DataObject) -> None:
        history, logits = data.draw(self.examples())
        for dtype in (np.float32, np.float16):
            given_logits: Array = logits.astype(dtype)
            found = self.create()(history, given_logits)
            _check(isinstance(found, np.ndarray), f"wanted a NumPy array, found {type(found).__name__}")
            _check(found.shape == logits.shape, f"{dtype.__name__} logits: wanted shape {logits.shape}, found {found.shape}")
            _check(found.dtype == np.float32, f"{dtype.__name__} logits: wanted float32, found {found.dtype}")

    @_SETTINGS
    @given(data=st.data())
    def test_arithmetic_is_that_of_float32(self, data: st.DataObject) -> None:
        """Half precision is widened before anything is calculated."""
        history, logits = data.draw(self.examples())
        half: Array = logits.astype(np.float16)
        wanted, found = self.create()(history, half.astype(np.float32)), self.create()(history, half)
        _check(np.array_equal(found, wanted, equal_nan=True), f"float16 logits: wanted\n{wanted}\nas for float32, found\n{found}")

    @_SETTINGS
    @given(data=st.data())
    def test_inputs_are_not_written_into(self, data: st.DataObject) -> None:
        history, logits = data.draw(self.examples())
        tokens, mask, before = history.tokens.copy(), history.mask.copy(), logits.copy()
        self.create()(history, logits)
        for noun, was, found in (("tokens", tokens, history.tokens), ("mask", mask, history.mask), ("logits", before, logits)):
            _check(np.array_equal(found, was), f"the processor wrote into its {noun}: they were\n{was}\nand are\n{found}")

    @_SETTINGS
    @given(data=st.data())
    def test_memory_of_inputs_does_not_matter(self, data: st.DataObject) -> None:
        """Read-only arrays and arrays with gaps are inputs like any others."""
        history, logits = data.draw(self.examples())
        wanted = self.create()(history, logits.copy())
        for noun, change in (("read-only", _read_only), ("non-contiguous", _with_gaps)):
            same = replace(history, tokens=change(history.tokens), mask=change(history.mask))
            found = self.create()(same, change(logits))
            _check(np.array_equal(found, wanted), f"{noun} inputs: wanted\n{wanted}\nfound\n{found}")

    @_SETTINGS
    @given(data=st.data())
    def test_no_memory_of_earlier_calls(self, data: st.DataObject) -> None:
        """A rewound or forked text is processed like a new one: the history is what's given, and nothing else."""
        history, logits = data.draw(self.examples())
        processor = self.create()
        first, second = processor(history, logits.copy()), processor(history, logits.copy())
        _check(np.array_equal(first, second), f"two calls with the same inputs differ:\n{first}\n{second}")

    @_SETTINGS
    @given(data=st.data())
    def test_a_token_is_left_and_nothing_is_nan(self, data: st.DataObject) -> None:
        history, logits = data.draw(self.examples())
        found = self.create()(history, logits)
        _check(not bool(np.isnan(found).any()), f"logits became NaN: {found}")
        left = np.isfinite(found).any(axis=-1).all()
        _check(self.may_rule_out_all or bool(left), f"a row has no finite logit left: {found}")

    @_SETTINGS
    @given(data=st.data())
    def test_what_is_ruled_out_stays_so(self, data: st.DataObject) -> None:
        history, logits = data.draw(self.examples())
        found = self.create()(history, logits)
        back = np.argwhere((logits == -np.inf) & (found > -np.inf))
        _check(not back.size, f"logits of -inf became others at [row, token] {back.tolist()}")

    @_SETTINGS
    @given(data=st.data())
    def test_a_row_is_processed_as_it_is_alone(self, data: st.DataObject) -> None:
        """Neither other rows nor the padding in front of it change a row."""
        history, logits = data.draw(self.examples())
        together = self.create()(history, logits.copy())
        for row in range(len(logits)):
            alone = self.create()(_row_alone(history, row), logits[row : row + 1].copy())[0]
            # The order of a sum may depend on the batch.
            _check(
                np.allclose(together[row], alone, rtol=1e-5, atol=1e-6),
                f"row {row} alone: wanted\n{alone}\nfound in the batch\n{together[row]}",
            )

    @_SETTINGS
    @given(data=st.data())
    def test_what_padding_is_does_not_matter(self, data: st.DataObject) -> None:
        """Any id may stand where the mask is 0, also one that's no token's."""
        history, logits = data.draw(self.examples())
        wanted = self.create()(history, logits.copy())
        for padding in (0, logits.shape[1] - 1, -1, 10**6):
            other = replace(history, tokens=np.where(history.mask == 0, padding, history.tokens))
            found = self.create()(other, logits.copy())
            _check(np.array_equal(found, wanted), f"padding of {padding}: wanted\n{wanted}\nfound\n{found}")
