"""The kits for samplers and logits processors: classes to subclass in a test file, whose tests pytest then collects.

from miniort.testing import SamplerConformance

class TestMySampler(SamplerConformance):
    def create(self):
        return my_sampler(strength=2.0)
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from miniort.generation.sampling import LogitsProcessor, Sampler
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
def _tokens_and_logits(draw: st.DrawFn) -> tuple[IntArray, FloatArray]:
    """Tokens [batch, time] out of the vocabulary of logits [batch, vocabulary]."""
    logits = draw(_logits())
    rng = np.random.default_rng(draw(_SEEDS))
    return rng.integers(logits.shape[1], size=(logits.shape[0], draw(st.integers(1, 8)))), logits


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


class SamplerConformance:
    """What every sampler must do. Subclass it and define `create`.

    `rows_are_independent`: with one seed and one batch size, a row's token depends on that row's logits only. A sampler that draws as
    many numbers as it needs, row after row, can't promise that and sets it to False.
    """

    rows_are_independent = True

    def create(self) -> Sampler:
        """A new sampler to be tested."""
        raise NotImplementedError(f"{type(self).__name__} must define create()")

    def _sample(self, logits: Array, seed: int) -> IntArray:
        return self.create()(logits, np.random.default_rng(seed))

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
        """From a new sampler, and from one that has been used: all randomness comes from `rng`."""
        sampler = self.create()
        first, second = (sampler(logits, np.random.default_rng(seed)) for _ in range(2))
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
    @given(logits=_logits(), seed=_SEEDS, other=_SEEDS)
    def test_rows_are_independent(self, logits: FloatArray, seed: int, other: int) -> None:
        if not self.rows_are_independent:
            return
        rng = np.random.default_rng(other)
        row = int(rng.integers(len(logits)))
        changed = rng.standard_normal(logits.shape).astype(np.float32)
        changed[row] = logits[row]
        wanted, found = self._sample(logits, seed)[row], self._sample(changed, seed)[row]
        _check(bool(wanted == found), f"row {row}: wanted {wanted}, found {found} after other rows' logits had changed")


class LogitsProcessorConformance:
    """What every logits processor must do. Subclass it and define `create`."""

    def create(self) -> LogitsProcessor:
        """A new logits processor to be tested."""
        raise NotImplementedError(f"{type(self).__name__} must define create()")

    @_SETTINGS
    @given(example=_tokens_and_logits())
    def test_shape_and_dtype_stay(self, example: tuple[IntArray, FloatArray]) -> None:
        tokens, logits = example
        for dtype in (np.float32, np.float16):
            found = self.create()(tokens, logits.astype(dtype))
            _check(isinstance(found, np.ndarray), f"wanted a NumPy array, found {type(found).__name__}")
            _check(found.shape == logits.shape, f"{dtype.__name__} logits: wanted shape {logits.shape}, found {found.shape}")
            # Half precision may come back as float32, which holds all of it; never the other way round.
            allowed = {np.dtype(dtype), np.dtype(np.float32)}
            _check(found.dtype in allowed, f"{dtype.__name__} logits: wanted {dtype.__name__} or float32, found {found.dtype}")

    @_SETTINGS
    @given(example=_tokens_and_logits())
    def test_inputs_are_not_written_into(self, example: tuple[IntArray, FloatArray]) -> None:
        tokens, logits = example
        given_tokens, given_logits = tokens.copy(), logits.copy()
        self.create()(given_tokens, given_logits)
        _check(np.array_equal(given_tokens, tokens), f"the processor wrote into its tokens: they were\n{tokens}\nand are\n{given_tokens}")
        _check(np.array_equal(given_logits, logits), f"the processor wrote into its logits: they were\n{logits}\nand are\n{given_logits}")

    @_SETTINGS
    @given(example=_tokens_and_logits())
    def test_memory_of_inputs_does_not_matter(self, example: tuple[IntArray, FloatArray]) -> None:
        """Read-only arrays and arrays with gaps are inputs like any others."""
        tokens, logits = example
        wanted = self.create()(tokens.copy(), logits.copy())
        for noun, change in (("read-only", _read_only), ("non-contiguous", _with_gaps)):
            found = self.create()(change(tokens), change(logits))
            _check(np.array_equal(found, wanted), f"{noun} inputs: wanted\n{wanted}\nfound\n{found}")

    @_SETTINGS
    @given(example=_tokens_and_logits())
    def test_no_memory_of_earlier_calls(self, example: tuple[IntArray, FloatArray]) -> None:
        """A rewound or forked text is processed like a new one: the history is in `tokens`, and nowhere else."""
        tokens, logits = example
        process = self.create()
        first, second = process(tokens, logits.copy()), process(tokens, logits.copy())
        _check(np.array_equal(first, second), f"two calls with the same inputs differ:\n{first}\n{second}")

    @_SETTINGS
    @given(example=_tokens_and_logits())
    def test_a_token_is_left_and_nothing_is_nan(self, example: tuple[IntArray, FloatArray]) -> None:
        found = self.create()(*example)
        _check(not bool(np.isnan(found).any()), f"logits became NaN: {found}")
        _check(bool(np.isfinite(found).any(axis=-1).all()), f"a row has no finite logit left: {found}")

    @_SETTINGS
    @given(example=_tokens_and_logits())
    def test_rows_are_independent(self, example: tuple[IntArray, FloatArray]) -> None:
        """A row of a batch is processed as it is alone."""
        tokens, logits = example
        assume(len(logits) > 1)
        together = self.create()(tokens, logits.copy())
        for row in range(len(logits)):
            alone = self.create()(tokens[row : row + 1], logits[row : row + 1].copy())[0]
            # The order of a sum may depend on the batch.
            _check(
                np.allclose(together[row], alone, rtol=1e-5, atol=1e-6),
                f"row {row} alone: wanted\n{alone}\nfound in the batch\n{together[row]}",
            )
