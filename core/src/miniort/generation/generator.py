"""The generation loop: a prompt is run once, then each step runs the newest tokens and the cache. History is computed once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from miniort.errors import GenerationError
from miniort.generation.cache import KVCache
from miniort.generation.decoder import Decoder
from miniort.generation.sampling import LogitsProcessor, Sampler, choose
from miniort.types import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class _History:
    """Tokens and mask, [batch, time], and which rows have ended, [batch]. Replaced as a whole, so that an interrupt can't tear it."""

    tokens: IntArray
    mask: IntArray
    ended: npt.NDArray[np.bool_]

    @property
    def length(self) -> int:
        length: int = self.tokens.shape[1]
        return length


class Generator:
    """Continues one batch of token sequences.

    `cache` None recomputes the whole history in every step: the baseline that a cache is checked against.
    `end_tokens` end a row; None for the model's own. `rng` is all the randomness that the sampler has.
    `prefill_chunk` bounds how many tokens one run is given, None for all at once.

    After any error, or an interrupt, the generator goes on from its last committed token.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache | None,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor] = (),
        *,
        end_tokens: Collection[int] | None = None,
        rng: np.random.Generator | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        if prefill_chunk is not None and prefill_chunk < 1:
            raise GenerationError(f"prefill_chunk must be at least 1, found {prefill_chunk}")
        self.decoder = decoder
        self.cache = cache
        self.sampler = sampler
        self.processors = tuple(processors)
        self.end_tokens = frozenset(decoder.source.end_tokens if end_tokens is None else end_tokens)
        self.rng = rng or np.random.default_rng()
        self.prefill_chunk = prefill_chunk
        self._history = _History(np.empty((0, 0), np.int64), np.empty((0, 0), np.int64), np.empty(0, np.bool_))
        self._logits: tuple[_History, FloatArray] | None = None

    @property
    def tokens(self) -> IntArray:
        """All tokens so far, [batch, time], padding on the left included."""
        return self._history.tokens

    @property
    def is_done(self) -> bool:
        """Whether every row has ended, or the context is full."""
        history = self._history
        return history.length > 0 and (bool(history.ended.all()) or self._is_full(history.length))

    def _is_full(self, length: int) -> bool:
        limit = self.decoder.context_length
        return limit is not None and length > limit  # the last token of a full context still has a successor

    def append_tokens(self, tokens: IntArray | Sequence[int] | Sequence[Sequence[int]], mask: IntArray | None = None) -> None:
        """Add tokens, [batch, new] or [new] for one row, behind those there are. They're run in the next step.

        mask: [batch, new], 0 for padding; only the first tokens of a row may be padding.
        GenerationError if there are none, the batch differs, or they're more than the context holds.
        """
        new = np.atleast_2d(np.asarray(tokens, np.int64))
        added = np.ones_like(new) if mask is None else np.atleast_2d(np.asarray(mask, np.int64))
        history = self._history
        if new.size == 0:
            raise GenerationError("there are no tokens to continue from; the prompt is empty")
        if added.shape != new.shape:
            raise GenerationError(f"the mask must be of the tokens' shape {list(new.shape)}, found {list(added.shape)}")
        if history.length == 0:
            if self.cache is not None and self.cache.length:
                raise GenerationError(f"the cache holds {self.cache.length} tokens that this generator doesn't know; give it an empty one")
        elif len(new) != len(history.tokens):
            raise GenerationError(f"the batch has {len(history.tokens)} rows, tokens for {len(new)} were given")
        else:
            new = np.concatenate([history.tokens, new], axis=1)
            added = np.concatenate([history.mask, added], axis=1)
        if (np.diff(added, axis=1) < 0).any() or not added[:, -1].all():
            raise GenerationError("only the first tokens of a row may be padding; pad on the left")
        limit = self.decoder.context_length
        if limit is not None and new.shape[1] > limit:
            raise GenerationError(f"{new.shape[1]} tokens are more than the model's context of {limit}; shorten the prompt")
        self._history = _History(new, added, np.zeros(len(new), np.bool_))

    def logits(self) -> FloatArray:
        """Logits of the next token, [batch, vocabulary], float32. Runs what hasn't been run yet."""
        history = self._history
        if self._logits is None or self._logits[0] is not history:
            self._logits = history, self._run_pending(history)
        return self._logits[1]

    def _run_pending(self, history: _History) -> FloatArray:
        if history.length == 0:
            raise GenerationError("append_tokens must be given a prompt before the first step")
        cache = self.decoder.new_cache(batch=len(history.tokens)) if self.cache is None else self.cache
        if cache.length == history.length:  # it was run, but its logits were lost to an error: run its last token again
            cache.crop(history.length - 1)
        logits: FloatArray | None = None
        while cache.length < history.length:
            start = cache.length
            end = history.length if self.prefill_chunk is None else min(history.length, start + self.prefill_chunk)
            logits = self.decoder.forward(history.tokens[:, start:end], history.mask[:, :end], cache)
            cache.commit(end - start)
        assert logits is not None
        return np.ascontiguousarray(logits[:, -1], np.float32)

    def step(self) -> IntArray:
        """Choose the next token of each row, [batch], and append it. A row that has ended goes on with its end token.

        GenerationError if the context is full.
        """
        history = self._history
        if self._is_full(history.length):
            raise GenerationError(f"the model's context of {self.decoder.context_length} tokens is full")
        ids = choose(self.processors, self.sampler, history.tokens, self.logits(), self.rng)
        ids = np.where(history.ended, history.tokens[:, -1], ids)
        self._history = _History(
            np.concatenate([history.tokens, ids[:, None]], axis=1),
            np.concatenate([history.mask, np.ones_like(ids)[:, None]], axis=1),
            np.isin(ids, list(self.end_tokens)),
        )
        return ids

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens. CacheError if the cache has let go of what would be needed."""
        history = self._history
        if not 0 < length <= history.length:
            raise GenerationError(f"can't rewind to {length}: there are {history.length} tokens, and one has to stay")
        if self.cache is not None and self.cache.length >= length:
            self.cache.crop(length - 1)  # the last token is run again, for the logits that follow it
        kept = _History(history.tokens[:, :length], history.mask[:, :length], np.zeros(len(history.tokens), np.bool_))
        self._history = kept

    def fork(self) -> Generator:
        """A second generator with the same history; each goes its own way from here. The random state is copied as it is."""
        other = object.__new__(Generator)
        other.__dict__.update(self.__dict__)
        other.cache = None if self.cache is None else self.cache.fork()
        other.rng = np.random.Generator(type(self.rng.bit_generator)())
        other.rng.bit_generator.state = self.rng.bit_generator.state
        return other


@dataclass(frozen=True)
class GeneratedToken:
    """One step of generation: ids [batch], and the logits [batch, vocabulary] that they were chosen from, before any processor."""

    ids: IntArray
    logits: FloatArray


def generate(generator: Generator, max_new_tokens: int | None = None) -> Iterator[GeneratedToken]:
    """New tokens, one step at a time, until all rows have ended, the context is full, or there are `max_new_tokens`.

    The end token itself is given too. Stopping the iteration at any point leaves the generator usable.
    """
    if max_new_tokens is not None and max_new_tokens < 0:
        raise GenerationError(f"max_new_tokens must not be negative, found {max_new_tokens}")
    count = 0
    while not generator.is_done and (max_new_tokens is None or count < max_new_tokens):
        logits = generator.logits()
        yield GeneratedToken(generator.step(), logits)
        count += 1


def pad_left(rows: Sequence[Sequence[int]], padding: int = 0) -> tuple[IntArray, IntArray]:
    """Rows of several lengths as one batch: tokens [batch, longest], filled on the left, and the mask that says where."""
    longest = max(map(len, rows), default=0)
    tokens = np.full((len(rows), longest), padding, np.int64)
    mask = np.zeros((len(rows), longest), np.int64)
    for row, ids in enumerate(rows):
        tokens[row, longest - len(ids) :] = ids
        mask[row, longest - len(ids) :] = 1
    return tokens, mask
