"""The proof that decoding with a cache is the same computation as decoding without one, for one decoder and any cache layouts.

Each check runs the decoder over a cache and compares its logits with those of a run that had none, at every step. The uncached runs are
made once and shared by all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from miniort.errors import GenerationError, MiniortError
from miniort.generation.cache import BlockedView, CacheLayoutInfo, KVCache, View, layer_contents
from miniort.generation.decoder import Decoder
from miniort.generation.generator import Generator, generate, pad_left
from miniort.plugins import collect_mapping, find_named
from miniort.plugins.manager import describe_exception
from miniort.providers import HOST
from miniort.types import Array, FloatArray, IntArray

REFERENCE_LAYOUT = "concat_bhtd"
"""The plainest layout, which every other one is compared with."""

ROUNDING = {"float64": 1e-13, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""How far logits of size 1, by the element type of the cache, may lie apart through another order of additions alone."""

LEAST_SIZE = 10
"""Logits count as being of this size at least: they're sums of larger numbers."""

UNLIMITED_CONTEXT = 512
"""The longest context that is tried where neither the model nor the user sets a limit."""

NOISE_MARGIN = 4
"""How many times the effect of random errors those of a lossy layout may have: they aren't quite random."""

CHUNKS = (2, 3, 7)
"""Sizes of the pieces that a history is given in: an even one, and odd ones that don't divide it."""

BATCH_LENGTHS = (2, 5, 9)
"""Lengths of the rows of the batch that is padded on the left."""


@dataclass(frozen=True)
class LayoutChoice:
    """A cache layout by name, and the options that it's made with."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As it's written on the command line: `window:size=64`."""
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


@dataclass(frozen=True)
class Check:
    """One comparison of logits with those they must equal.

    `max_error`, `mean_error`: the largest and the mean |difference| of all logits that were judged, None if nothing could be compared.
    `first_difference`: the step, from 1, at which another token is the likeliest, None if there's none; a tie within the tolerance may
    fall either way. `by_step`: the largest |difference| of each step that was judged. `note` says what went wrong, or what was not judged.
    """

    name: str
    detail: str
    tolerance: float
    passed: bool
    max_error: float | None = None
    mean_error: float | None = None
    first_difference: int | None = None
    by_step: tuple[float, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class LayerReport:
    """What a cache gives for one layer: shapes, element type, device, and whether they're what the model's cache has."""

    layer: int
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    dtype: str
    device: str
    passed: bool


@dataclass(frozen=True)
class LayoutVerification:
    """All checks of one layout, and its layers after the last of them."""

    layout: str
    checks: tuple[Check, ...]
    layers: tuple[LayerReport, ...]

    @property
    def passed(self) -> bool:
        """Whether every check has passed, and every layer is as it must be."""
        return all(check.passed for check in self.checks) and all(layer.passed for layer in self.layers)


@dataclass(frozen=True)
class _Baseline:
    """What the decoder does without a cache: a prompt [prompt], the tokens after it [steps], and the logits of each [steps, vocabulary]."""

    prompt: IntArray
    tokens: IntArray
    logits: FloatArray


class _Replay:
    """A sampler that gives the tokens of another run, so that two runs stay side by side even after one of them is wrong."""

    def __init__(self, tokens: IntArray) -> None:
        self._tokens = iter(tokens)

    def __call__(self, logits: FloatArray, rngs: Sequence[np.random.Generator]) -> IntArray:
        return np.full(len(logits), next(self._tokens), np.int64)


class _Selected:
    """A cache that keeps all tokens in `whole` and shows those at `kept` alone: what any layout that lets go of tokens must look like.

    noise: each number is kept with a random error of up to that share of the largest magnitude of its head's new tokens.
    """

    min_length = 0

    def __init__(self, whole: KVCache, noise: float = 0.0) -> None:
        self.whole = whole
        self._noise = noise
        self._rng = np.random.default_rng(0)
        self._follow()

    def _disturbed(self, tokens: Array) -> Array:
        """tokens: [batch, kv heads, new, dim]."""
        if not self._noise or not tokens.size:
            return tokens
        largest = np.abs(tokens.astype(np.float32)).max(axis=(2, 3), keepdims=True)
        disturbed: Array = (tokens + largest * self._rng.uniform(-self._noise, self._noise, tokens.shape)).astype(tokens.dtype)
        return disturbed

    def _follow(self) -> None:
        self.length = self.whole.length
        self.kept = self.whole.positions()

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        keys, values = map(np.asarray, self.whole.append(layer, self._disturbed(key), self._disturbed(value)))
        shown = np.concatenate([self.kept, np.arange(self.length, self.length + key.shape[2])])
        return keys[:, :, shown], values[:, :, shown]

    def commit(self, count: int) -> None:
        self.whole.commit(count)
        self._follow()

    def crop(self, length: int) -> None:
        self.whole.crop(length)
        self._follow()

    def reorder(self, rows: IntArray) -> None:
        self.whole.reorder(rows)
        self._follow()

    def fork(self) -> KVCache:
        return _Selected(self.whole.fork(), self._noise)

    def positions(self) -> IntArray:
        return self.kept


class Verifier:
    """Checks layouts of one decoder.

    max_context: the longest context that is tried, None for the model's own (UNLIMITED_CONTEXT where it has none).
    tolerance: the largest |difference| of logits that is let pass; None for the element type's ROUNDING times the largest |logit|, and for
    a layout with a documented `relative_error` NOISE_MARGIN times what random errors of that size do to this decoder's logits.
    steps: how many tokens follow each prompt.
    """

    def __init__(self, decoder: Decoder, *, max_context: int | None = None, tolerance: float | None = None, steps: int = 16) -> None:
        self.decoder = decoder
        self.limit = context_limit(decoder, max_context)
        self.tolerance = tolerance
        self.steps = steps
        self._effects: dict[float, float] = {}
        one = np.zeros((1, 1), np.int64)
        self.vocabulary: int = decoder.uncached(one, one + 1).shape[-1]

    def verify(self, layout: LayoutChoice) -> LayoutVerification:
        """Run every check on one layout. MiniortError if it can't be made at all; what else goes wrong is a failed check."""
        self._cache(layout)
        checks = [
            *(self._cached(layout, baseline) for baseline in self._baselines),
            *(self._chunked(layout, size) for size in CHUNKS),
            *([] if layout == LayoutChoice(REFERENCE_LAYOUT) else [self._as_reference(layout)]),
            self._rewound(layout),
            self._forked(layout),
            self._batched(layout),
        ]
        return LayoutVerification(layout.label, tuple(checks), tuple(self._layers(layout)))

    # The uncached runs

    @cached_property
    def _baselines(self) -> list[_Baseline]:
        """From prompts of one token, of an odd number, and of so many that the last step is that of a full context."""
        lengths = {1, min(7, self.limit), max(1, self.limit - self.steps + 1)}
        return [self._uncached_run(self._random_tokens(length, seed=length)) for length in sorted(lengths)]

    @cached_property
    def _history(self) -> IntArray:
        """Tokens [time] that chunks are cut from."""
        return self._random_tokens(min(self.limit, 24), seed=2)

    @cached_property
    def _history_logits(self) -> FloatArray:
        """Uncached logits after each token of the history, [time, vocabulary]."""
        return np.stack([self._uncached(self._history[: end + 1]) for end in range(len(self._history))])

    @cached_property
    def _detours(self) -> list[tuple[IntArray, FloatArray]]:
        """Two other ways to go on from the history's first half: all tokens [time], and their uncached logits."""
        half = self._history[: len(self._history) // 2]
        others = [np.concatenate([half, self._random_tokens(min(3, self.limit - len(half)), seed)]) for seed in (3, 4)]
        return [(tokens, self._uncached(tokens)) for tokens in others]

    @cached_property
    def _rows(self) -> list[_Baseline]:
        """Rows of several lengths; of one length where the model can't tell padding."""
        padded = self.decoder.padding_obstacle is None
        lengths = [min(length, self.limit - 1) for length in (BATCH_LENGTHS if padded else BATCH_LENGTHS[:1] * len(BATCH_LENGTHS))]
        steps = min(4, self.limit - max(lengths) + 1)
        return [self._uncached_run(self._random_tokens(length, seed=row), steps) for row, length in enumerate(lengths)]

    def _uncached_run(self, prompt: IntArray, steps: int | None = None) -> _Baseline:
        generator = Generator(self.decoder, None, _likeliest, end_tokens=())
        generator.append_tokens(prompt)
        run = list(generate(generator, steps or self.steps))
        return _Baseline(prompt, np.concatenate([each.ids for each in run]), np.concatenate([each.logits for each in run]))

    def _uncached(self, tokens: IntArray) -> FloatArray:
        logits: FloatArray = self.decoder.uncached(tokens[None], np.ones((1, len(tokens)), np.int64))[0, -1].astype(np.float32)
        return logits

    def _random_tokens(self, count: int, seed: int) -> IntArray:
        return np.random.default_rng(seed).integers(0, self.vocabulary, count)

    # The checks

    def _cached(self, layout: LayoutChoice, baseline: _Baseline) -> Check:
        """Cached against uncached at every step. Those for which the cache has let go of tokens by its nature aren't judged."""

        def compare() -> Check:
            cache = self._cache(layout)
            generator = Generator(self.decoder, cache, _Replay(baseline.tokens), end_tokens=())
            generator.append_tokens(baseline.prompt)
            found, complete = self._replay(generator, cache, len(baseline.tokens))
            return self._compare(layout, "cached = uncached", detail, found[:, 0], baseline.logits, *self._judged(layout, complete))

        detail = f"prompt of {len(baseline.prompt)}, {len(baseline.tokens)} steps"
        return self._guard(layout, "cached = uncached", detail, compare)

    def _chunked(self, layout: LayoutChoice, size: int) -> Check:
        """A history given in chunks behind each other, against one run for each of its tokens."""

        def compare() -> Check:
            history = self._history
            cache = self._cache(layout)
            found: list[FloatArray] = []
            places: list[int] = []
            for start in range(0, len(history), size):
                logits = self._advance(cache, history[: start + size])
                places += range(cache.length - len(logits), cache.length)
                found += list(logits)
                if self._info(layout).lets_go and len(cache.positions()) != cache.length:
                    break  # the following ones see another history
            return self._compare(layout, "chunked = single", detail, np.stack(found), self._history_logits[places])

        detail = f"{len(self._history)} tokens, {size} at a time"
        return self._guard(layout, "chunked = single", detail, compare)

    def _as_reference(self, layout: LayoutChoice) -> Check:
        """Side by side with the plainest layout, which is shown to the graph without the tokens that this one has let go of."""

        def compare() -> Check:
            baseline = self._baselines[-1]
            tokens = np.concatenate([baseline.prompt, baseline.tokens[:-1]])
            cache, reference = self._cache(layout), _Selected(self.decoder.new_cache(REFERENCE_LAYOUT))
            found, wanted = [], []
            for end in range(len(baseline.prompt), len(tokens) + 1):
                found.append(self._advance(cache, tokens[:end])[-1])
                wanted.append(self._advance(reference, tokens[:end])[-1])
                reference.kept = cache.positions()
            return self._compare(layout, f"layout = {REFERENCE_LAYOUT}", detail, np.stack(found), np.stack(wanted))

        detail = f"prompt of {len(self._baselines[-1].prompt)}, {len(self._baselines[-1].tokens)} steps"
        return self._guard(layout, f"layout = {REFERENCE_LAYOUT}", detail, compare)

    def _rewound(self, layout: LayoutChoice) -> Check:
        """A step that is abandoned, a rewind, and another way on: nothing may be left of what was taken back."""

        def compare() -> Check:
            tokens, wanted = self._detours[0]
            half = len(self._history) // 2
            cache = self._cache(layout)
            self._advance(cache, self._history[: len(self._history) - 1])
            self._forward(cache, self._history)  # and no commit
            if cache.min_length > half:
                return Check("rewound = uncached", detail, self._limit_of(layout, wanted), True, note="the layout can't rewind so far")
            cache.crop(half)
            found = self._advance(cache, tokens)[-1]
            return self._compare(layout, "rewound = uncached", detail, found[None], self._wanted(layout, tokens, wanted)[None])

        detail = f"{len(self._history)} tokens back to {len(self._history) // 2}"
        return self._guard(layout, "rewound = uncached", detail, compare)

    def _forked(self, layout: LayoutChoice) -> Check:
        """Two caches with a common history, written in turn."""

        def compare() -> Check:
            first = self._cache(layout)
            self._advance(first, self._history[: len(self._history) // 2])
            caches = [first, first.fork()]
            found = []
            for cache, (tokens, _) in zip(caches, self._detours, strict=True):
                found.append(self._advance(cache, tokens)[-1])
            if first.min_length < first.length:
                first.crop(first.length - 1)  # what one takes back, the other keeps
            wanted = [self._wanted(layout, tokens, logits) for tokens, logits in self._detours]
            tokens = self._detours[1][0]
            if caches[1].min_length < len(tokens):
                caches[1].crop(len(tokens) - 1)
                found.append(self._advance(caches[1], tokens)[-1])
                wanted.append(self._wanted(layout, tokens, self._detours[1][1], last_alone=True))
            return self._compare(layout, "forked = uncached", detail, np.stack(found), np.stack(wanted))

        detail = f"two ways on from {len(self._history) // 2} tokens"
        return self._guard(layout, "forked = uncached", detail, compare)

    def _batched(self, layout: LayoutChoice) -> Check:
        """Rows of several lengths in one batch, padded on the left, against each alone."""

        def compare() -> Check:
            tokens, mask = pad_left([row.prompt.tolist() for row in self._rows])
            following = iter(np.stack([row.tokens for row in self._rows], axis=1))
            cache = self._cache(layout, batch=len(self._rows))
            generator = Generator(self.decoder, cache, lambda logits, rngs: next(following), end_tokens=())
            generator.append_tokens(tokens, mask)
            found, complete = self._replay(generator, cache, len(self._rows[0].tokens))
            wanted = np.stack([row.logits for row in self._rows], axis=1)  # [steps, batch, vocabulary]
            return self._compare(layout, "batched = alone", detail, found, wanted, *self._judged(layout, complete))

        detail = f"rows of {', '.join(str(len(row.prompt)) for row in self._rows)} tokens"
        return self._guard(layout, "batched = alone", detail, compare)

    def _layers(self, layout: LayoutChoice) -> Iterator[LayerReport]:
        """Shapes, element type and device of each layer, for the history in a fresh cache."""
        spec = self.decoder.cache_spec(1)
        cache = self._cache(layout)
        try:
            self._advance(cache, self._history)
            kept = len(cache.positions())
            contents = [layer_contents(cache, spec, layer) for layer in range(spec.layers)]
        except Exception:
            return  # the checks have said why
        for layer, views in enumerate(contents):
            shapes = [tuple(int(size) for size in view.shape) for view in views]
            wanted = [(1, spec.kv_heads, kept, dim) for dim in (spec.head_dim, spec.value_head_dim)]
            dtypes = {str(view.dtype) for view in views}
            passed = shapes == wanted and dtypes == {str(spec.dtype)}
            yield LayerReport(layer, shapes[0], shapes[1], ", ".join(sorted(dtypes)), _device_of(views[0]), passed)

    # Their parts

    def _info(self, layout: LayoutChoice) -> CacheLayoutInfo:
        return find_named(self.decoder.plugins, "miniort_cache_layouts", CacheLayoutInfo, layout.name, "cache layout")

    def _cache(self, layout: LayoutChoice, batch: int = 1) -> KVCache:
        return self.decoder.new_cache(layout.name, batch, **layout.options)

    def _forward(self, cache: KVCache, tokens: IntArray) -> FloatArray:
        """Run the tokens [time] that aren't in the cache yet: their logits, [n, vocabulary]."""
        mask = np.ones((1, len(tokens)), np.int64)
        logits: FloatArray = self.decoder.forward(tokens[None, cache.length :], mask, cache, every_logit=True)[0].astype(np.float32)
        return logits

    def _advance(self, cache: KVCache, tokens: IntArray) -> FloatArray:
        """Run these tokens and commit them; one by one where the graph takes no more at a time."""
        new = len(tokens) - cache.length
        if (cache.length or self.decoder.binding.prefill is None) and new > 1 and not self.decoder.takes_several_tokens:
            return np.concatenate([self._advance(cache, tokens[: end + 1]) for end in range(cache.length, len(tokens))])
        logits = self._forward(cache, tokens)
        cache.commit(new)
        return logits

    def _replay(self, generator: Generator, cache: KVCache, steps: int) -> tuple[FloatArray, list[bool]]:
        """Logits of each step, [steps, batch, vocabulary], and whether the cache still had all tokens before it."""
        found, complete = [], []
        for _ in range(steps):
            complete.append(len(cache.positions()) == cache.length)
            found.append(generator.logits())
            generator.step()
        return np.stack(found), complete

    def _judged(self, layout: LayoutChoice, complete: list[bool]) -> tuple[int, str]:
        """How many steps an uncached run can be compared with, and a note if that's not all of them."""
        if all(complete) or not self._info(layout).lets_go:
            return len(complete), ""
        judged = complete.index(False)
        return judged, f"not judged from step {judged + 1} on, where the layout has let go of tokens"

    def _wanted(self, layout: LayoutChoice, tokens: IntArray, uncached: FloatArray, *, last_alone: bool = False) -> FloatArray:
        """Logits [vocabulary] after the history's first half and then these tokens, run straight through.

        Without a cache; but for a layout that lets go of tokens, with a fresh one, which has let go of the same ones. That depends on what
        is run at once, so `last_alone` says that the last token was run by itself.
        """
        if not self._info(layout).lets_go:
            return uncached
        cache = self._cache(layout)
        self._advance(cache, self._history[: len(self._history) // 2])
        if last_alone:
            self._advance(cache, tokens[:-1])
        straight: FloatArray = self._advance(cache, tokens)[-1]
        return straight

    def _limit_of(self, layout: LayoutChoice, wanted: FloatArray) -> float:
        """The largest |difference| that is let pass."""
        if self.tolerance is not None:
            return self.tolerance
        size = max(LEAST_SIZE, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0)))
        rounding = ROUNDING.get(self.decoder.binding.dtype.name, ROUNDING["float32"])
        return rounding * size + NOISE_MARGIN * self._effect_of(self._info(layout).relative_error)

    def _effect_of(self, noise: float) -> float:
        """The largest |difference| that random errors in the cache make in the logits of any baseline."""
        if noise == 0:
            return 0.0
        if noise not in self._effects:
            self._effects[noise] = max(self._noisy_error(baseline, noise) for baseline in self._baselines)
        return self._effects[noise]

    def _noisy_error(self, baseline: _Baseline, noise: float) -> float:
        cache = _Selected(self.decoder.new_cache(REFERENCE_LAYOUT), noise)
        generator = Generator(self.decoder, cache, _Replay(baseline.tokens), end_tokens=())
        generator.append_tokens(baseline.prompt)
        logits = np.concatenate([each.logits for each in generate(generator, len(baseline.tokens))])
        return float(np.abs(logits - baseline.logits).max())

    def _compare(
        self,
        layout: LayoutChoice,
        name: str,
        detail: str,
        found: FloatArray,
        wanted: FloatArray,
        judged: int | None = None,
        note: str = "",
    ) -> Check:
        """Logits [steps, ..., vocabulary] against those they must equal; only the first `judged` steps may fail the check."""
        tolerance = self._limit_of(layout, wanted)
        if found.shape != wanted.shape:
            return Check(name, detail, tolerance, False, note=f"logits are of shape {list(found.shape)}, wanted {list(wanted.shape)}")
        with np.errstate(invalid="ignore"):  # inf - inf, where a logit rules a token out
            error = np.where(found == wanted, 0, np.abs(found.astype(np.float64) - wanted))
        by_step = error.reshape(len(error), -1).max(axis=1)
        judged = len(found) if judged is None else judged
        differing = (found.argmax(axis=-1) != wanted.argmax(axis=-1)).reshape(len(found), -1).any(axis=1)
        worst = float(by_step[:judged].max(initial=0))
        return Check(
            name,
            detail,
            tolerance,
            passed=worst <= tolerance,  # false for NaN
            max_error=worst if judged else None,
            mean_error=float(error[:judged].mean()) if judged else None,
            first_difference=int(differing[:judged].argmax()) + 1 if differing[:judged].any() else None,
            by_step=tuple(by_step[:judged].tolist()),
            note=note,
        )

    def _guard(self, layout: LayoutChoice, name: str, detail: str, compare: Callable[[], Check]) -> Check:
        """A layout that raises has failed the check, whatever it raises: the other checks and layouts still run."""
        try:
            return compare()
        except Exception as error:
            return Check(name, detail, self.tolerance or 0.0, False, note=describe_exception(error))


def _device_of(view: View) -> str:
    """Where an array of a cache lies; NumPy's, and blocks of such, are on the host."""
    return HOST if isinstance(view, np.ndarray | BlockedView) else str(getattr(view, "device", "unknown"))


def _likeliest(logits: FloatArray, rngs: Sequence[np.random.Generator]) -> IntArray:
    ids: IntArray = logits.argmax(axis=-1)
    return ids


def context_limit(decoder: Decoder, max_context: int | None) -> int:
    """The longest context to try, in tokens. GenerationError if it's too short to show anything, or longer than the model's."""
    own = decoder.context_length
    if max_context is not None and max_context < 2:
        raise GenerationError(f"max_context must be at least 2 tokens, found {max_context}")
    if own is not None and max_context is not None and max_context > own:
        raise GenerationError(f"max_context {max_context} is more than the model's context of {own}")
    return max_context or own or UNLIMITED_CONTEXT


def usable_layouts(decoder: Decoder) -> tuple[list[LayoutChoice], dict[str, str]]:
    """Every installed layout that this decoder can be given, and by name why not the others."""
    usable, refused = [], {}
    for name in collect_mapping(decoder.plugins, "miniort_cache_layouts", CacheLayoutInfo):
        try:
            decoder.new_cache(name)
        except MiniortError as error:
            refused[name] = str(error)
        else:
            usable.append(LayoutChoice(name))
    return usable, refused
