"""The generation loop: a prompt is run once, then each step runs the newest tokens and the cache. History is computed once."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from miniort.errors import CacheError, GenerationError
from miniort.generation.cache import KVCache
from miniort.generation.decoder import Decoder
from miniort.generation.device_choice import DeviceLogits, choose_on_device, chooser_of
from miniort.generation.sampling import Continuation, LogitsProcessor, Sampler, Search, TokenHistory, choose, log_softmax, process
from miniort.types import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class _History:
    """Tokens and mask, [batch, time], which rows have ended, [batch], and how much of `time` was given and not generated.

    Replaced as a whole, so that an interrupt can't tear it.
    """

    tokens: IntArray
    mask: IntArray
    ended: npt.NDArray[np.bool_]
    prompt_length: int

    @property
    def length(self) -> int:
        length: int = self.tokens.shape[1]
        return length

    def take_rows(self, rows: IntArray) -> _History:
        """The history whose row i is row `rows[i]` of this one."""
        return _History(self.tokens[rows], self.mask[rows], self.ended[rows], self.prompt_length)

    def followed_by(self, ids: IntArray, end_tokens: Collection[int]) -> _History:
        """The history with one more token in each row, [batch]."""
        return _History(
            np.concatenate([self.tokens, ids[:, None]], axis=1),
            np.concatenate([self.mask, np.ones_like(ids)[:, None]], axis=1),
            np.array([token in end_tokens for token in ids.tolist()], np.bool_),
            self.prompt_length,
        )


class Generator:
    """Continues one batch of token sequences.

    `cache` None recomputes the whole history in every step: the baseline that a cache is checked against.
    `sampler` chooses each token, or, where it's a `Search`, whole continuations: those are found by `search`, not by `step`.
    `end_tokens` end a row; None for the model's own. `prefill_chunk` bounds how many tokens one run is given, None for all at once.
    `seed` is all the randomness there is, None for a new one. Each row has a stream of random numbers of its own, made from the seed,
    the prompt that the row began with, and how many rows before it began with the same: so a row is continued as it would be alone.

    After any error, or an interrupt, the generator goes on from its last committed token.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache | None,
        sampler: Sampler | Search,
        processors: Sequence[LogitsProcessor] = (),
        *,
        end_tokens: Collection[int] | None = None,
        seed: int | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        if prefill_chunk is not None and prefill_chunk < 1:
            raise GenerationError(f"prefill_chunk must be at least 1, found {prefill_chunk}")
        self.decoder = decoder
        self.cache = cache
        self.sampler = sampler
        self.processors = tuple(processors)
        self.end_tokens = frozenset(decoder.source.end_tokens if end_tokens is None else end_tokens)
        if seed is not None and seed < 0:
            raise GenerationError(f"seed must not be negative, found {seed}")
        self.seed: int = np.random.SeedSequence(seed).entropy  # type: ignore[assignment]  # an int unless several were given
        self.prefill_chunk = prefill_chunk
        self._rngs: tuple[np.random.Generator, ...] = ()
        self._history = _History(np.empty((0, 0), np.int64), np.empty((0, 0), np.int64), np.empty(0, np.bool_), 0)
        chooser = chooser_of(sampler, self.processors)
        self._chooses_on_device = chooser is not None and chooser is decoder.token_chooser
        self._logits: tuple[_History, FloatArray | DeviceLogits] | None = None
        self._shortest = 0  # how short the cache may become, where it was adopted without all of its tokens

    @property
    def tokens(self) -> IntArray:
        """All tokens so far, [batch, time], padding on the left included."""
        return self._history.tokens

    @property
    def mask(self) -> IntArray:
        """0 where a row is padded on the left, else 1: [batch, time]."""
        return self._history.mask

    @property
    def prompt_length(self) -> int:
        """How many of the tokens were given, padding included; what follows was generated."""
        return self._history.prompt_length

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
        new, added = _as_batch(tokens, mask)
        history = self._history
        if history.length == 0:
            if self.cache is not None and self.cache.length:
                raise GenerationError(f"the cache holds {self.cache.length} tokens that this generator doesn't know; give it an empty one")
        elif len(new) != len(history.tokens):
            raise GenerationError(f"the batch has {len(history.tokens)} rows, tokens for {len(new)} were given")
        else:
            new = np.concatenate([history.tokens, new], axis=1)
            added = np.concatenate([history.mask, added], axis=1)
        self._check_prompt(new, added)
        if history.length == 0:
            self._rngs = _random_streams(self.seed, new, added)
        self._history = _History(new, added, np.zeros(len(new), np.bool_), new.shape[1])

    def _check_prompt(self, tokens: IntArray, mask: IntArray) -> None:
        if (np.diff(mask, axis=1) < 0).any() or not mask[:, -1].all():
            raise GenerationError("only the first tokens of a row may be padding; pad on the left")
        self.decoder.check_tokens(tokens)
        if not mask.all() and (obstacle := self.decoder.padding_obstacle) is not None:
            raise GenerationError(f"rows of different lengths can't be in one batch: {obstacle}; or give one row at a time")
        limit = self.decoder.context_length
        if limit is not None and tokens.shape[1] > limit:
            raise GenerationError(f"{tokens.shape[1]} tokens are more than the model's context of {limit}; shorten the prompt")

    def continue_from(self, tokens: IntArray | Sequence[int] | Sequence[Sequence[int]], mask: IntArray | None = None) -> int:
        """Go on from these tokens, [batch, time], whatever the history was: what both begin with isn't computed again.

        So a conversation is given as a whole, each time, and only what is new is run. Random streams begin anew, as for a new generator.
        Returns how many tokens the cache still holds. GenerationError as for `append_tokens`; CacheError if the cache has let go of what
        would be needed.
        """
        new, added = _as_batch(tokens, mask)
        history = self._history
        if history.length == 0:
            self.append_tokens(new, added)
            return 0
        if len(new) != len(history.tokens):
            raise GenerationError(f"the batch has {len(history.tokens)} rows, tokens for {len(new)} were given")
        self._check_prompt(new, added)
        time = min(history.length, new.shape[1])
        same = ((new[:, :time] == history.tokens[:, :time]) & (added[:, :time] == history.mask[:, :time])).all(axis=0)
        common = time if same.all() else int(same.argmin())
        kept = 0
        if self.cache is not None:
            kept = min(common, self.cache.length, new.shape[1] - 1)  # the last token is run again, for the logits that follow it
            self._crop(kept)
        self._history = _History(new, added, np.zeros(len(new), np.bool_), new.shape[1])
        self._rngs = _random_streams(self.seed, new, added)
        return kept

    def adopt(self, cache: KVCache, tokens: IntArray, mask: IntArray, prompt_length: int, shortest: int = 0) -> None:
        """Take over a cache that holds the first of these tokens, [batch, time], but not the last: a history that was computed before.

        shortest: the length below which the cache must not be cropped, for what it then needs was never put in.
        GenerationError if the generator has a history already, or the cache holds as many tokens as there are.
        """
        if self._history.length:
            raise GenerationError(f"only a generator without tokens can take a cache over; this one has {self._history.length}")
        if not cache.length < tokens.shape[1]:
            raise GenerationError(f"the cache must lack the last token at least: it holds {cache.length} of {tokens.shape[1]}")
        ended = np.isin(tokens[:, -1], list(self.end_tokens)) & (tokens.shape[1] > prompt_length)
        self.cache, self._shortest = cache, shortest
        self._history = _History(tokens, mask, ended, prompt_length)
        self._rngs = _random_streams(self.seed, tokens, mask)

    def _crop(self, length: int) -> None:
        """Shorten the cache. CacheError if it has let go of what would be needed, or never had it."""
        assert self.cache is not None
        if length < self._shortest:
            raise CacheError(f"can't go back to {length} tokens: the cache was loaded without what is needed below {self._shortest}")
        self.cache.crop(length)

    def logits(self) -> FloatArray:
        """Logits of the next token, [batch, vocabulary], float32. Runs what hasn't been run yet."""
        logits = self._newest_logits()
        return logits.host if isinstance(logits, DeviceLogits) else logits

    def _newest_logits(self) -> FloatArray | DeviceLogits:
        """Logits of the next token: on the device, where tokens are chosen there."""
        history = self._history
        if self._logits is None or self._logits[0] is not history:
            self._logits = history, self._run_pending(history)
        return self._logits[1]

    def _run_pending(self, history: _History) -> FloatArray | DeviceLogits:
        if history.length == 0:
            raise GenerationError("append_tokens must be given a prompt before the first step")
        if self.cache is None:
            return np.ascontiguousarray(self.decoder.uncached(history.tokens, history.mask)[:, -1], np.float32)
        cache = self.cache
        if cache.length == history.length:  # it was run, but its logits were lost to an error: run its last token again
            self._crop(history.length - 1)
        forward = self.decoder.forward_on_device if self._chooses_on_device else self.decoder.forward
        logits: FloatArray | DeviceLogits | None = None
        while cache.length < history.length:
            start = cache.length
            end = min(history.length, start + (self._most_at_once(start) or history.length))
            logits = forward(history.tokens[:, start:end], history.mask[:, :end], cache)
            cache.commit(end - start)
        assert logits is not None
        return logits if isinstance(logits, DeviceLogits) else np.ascontiguousarray(logits[:, -1], np.float32)

    def _most_at_once(self, start: int) -> int | None:
        """How many tokens the next run may be given behind `start` of them, None for any number."""
        decoder = self.decoder
        if self._history.length - start > 1 and (start or decoder.binding.prefill is None) and not decoder.takes_several_tokens:
            return 1
        return self.prefill_chunk

    def step(self, remaining: int | None = None) -> IntArray:
        """Choose the next token of each row, [batch], and append it. A row that has ended goes on with its end token.

        remaining: how many tokens the caller will ask for, this one included, None for no limit. Logits processors are told the lower of
        this and what the context has room for.
        GenerationError if the context is full, or the generator was given a search.
        """
        history = self._history
        if self._is_full(history.length):
            raise GenerationError(f"the model's context of {self.decoder.context_length} tokens is full")
        if isinstance(self.sampler, Search):
            raise GenerationError("the generator was given a search, which doesn't choose token by token; call search(generator)")
        logits = self._newest_logits()
        ids = choose_on_device(self.processors, self.sampler, logits, self._rngs) if isinstance(logits, DeviceLogits) else None
        if ids is None:
            ids = choose(self.processors, self.sampler, self._seen(history, remaining), self.logits(), self._rngs)
        ids = np.where(history.ended, history.tokens[:, -1], ids)
        self._history = history.followed_by(ids, self.end_tokens)
        return ids

    def next_token(self, remaining: int | None = None) -> GeneratedToken:
        """What `step` chooses, and the logits it was chosen from. Where tokens are chosen on a device, these come when they're read."""
        logits = self._newest_logits()
        return _generated(self.step(remaining), logits)

    def step_with_draft(self, draft: Sequence[int], remaining: int | None = None) -> list[GeneratedToken]:
        """Choose tokens one after the other as `step` does, for as long as they're those of the draft, and one more; all in one run.

        So a draft costs time if it's wrong, and never changes what is chosen, but for the last bits of logits that are computed together.
        draft: ids that might follow, fewer than the context has room for. remaining: as for `step`.
        GenerationError unless there's one row, a sampler, a cache that holds all tokens but the last, and a graph that gives the logits of
        every token.
        """
        history, cache = self._history, self.cache
        if isinstance(self.sampler, Search) or cache is None or len(history.tokens) != 1:
            raise GenerationError("a draft needs one row, a sampler that chooses token by token, and a cache")
        if cache.length != history.length - 1:
            raise GenerationError(
                f"a draft goes behind the last token that isn't in the cache: it holds {cache.length} of {history.length}"
            )
        limit = self.decoder.context_length
        if limit is not None and history.length + len(draft) > limit:
            raise GenerationError(f"a draft of {len(draft)} tokens doesn't fit behind {history.length}: the model's context is {limit}")
        self.decoder.check_tokens(np.asarray(draft, np.int64))
        tokens = np.concatenate([history.tokens[:, -1:], np.asarray([draft], np.int64).reshape(1, -1)], axis=1)
        mask = np.concatenate([history.mask, np.ones((1, len(draft)), np.int64)], axis=1)
        logits = np.ascontiguousarray(self.decoder.forward(tokens, mask, cache, every_logit=True)[0], np.float32)  # [1 + draft, vocabulary]
        if len(logits) != tokens.shape[1]:
            raise GenerationError("a draft can't be verified: the graph gives the logits of the last token alone; export it with all")
        rngs = copy.deepcopy(self._rngs)
        chosen: list[GeneratedToken] = []
        for place in range(len(logits)):
            left = None if remaining is None else remaining - place
            row = logits[place : place + 1]
            ids = choose(self.processors, self.sampler, self._seen(history, left), row, rngs)
            history = history.followed_by(ids, self.end_tokens)
            chosen.append(GeneratedToken(ids, row))
            if history.ended[0] or place == len(draft) or ids[0] != draft[place]:
                break
        self._history, self._rngs = history, rngs  # first, so that an interrupt leaves tokens that aren't in the cache, not the reverse
        cache.commit(len(chosen))
        return chosen

    def _seen(self, history: _History, remaining: int | None) -> TokenHistory:
        """What logits processors are told."""
        limit = self.decoder.context_length
        room = None if limit is None else limit + 1 - history.length
        limits = [each for each in (remaining, room) if each is not None]
        return TokenHistory(history.tokens, history.mask, history.prompt_length, self.end_tokens, min(limits, default=None))

    def reorder(self, rows: IntArray | Sequence[int]) -> None:
        """Make row i what row `rows[i]` was; rows may repeat, and the batch becomes as long as `rows`.

        The first row that was row r keeps its stream of random numbers, each further one gets a new one. GenerationError for a row that
        isn't there.
        """
        chosen = np.asarray(rows, np.int64)
        batch = len(self._history.tokens)
        if chosen.ndim != 1 or ((chosen < 0) | (chosen >= batch)).any():
            raise GenerationError(f"rows to reorder must be a list of numbers from 0 to {batch - 1}, found {chosen.tolist()}")
        logits = self._logits
        history = self._history.take_rows(chosen)
        rngs = []
        for index, row in enumerate(chosen):
            first = bool((chosen[:index] != row).all())
            rngs.append(self._rngs[row] if first else self._rngs[row].spawn(1)[0])
        if self.cache is not None:
            self.cache.reorder(chosen)
        self._logits = None if logits is None or logits[0] is not self._history else (history, self.logits()[chosen])
        self._history, self._rngs = history, tuple(rngs)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens. CacheError if the cache has let go of what would be needed."""
        history = self._history
        if not 0 < length <= history.length:
            raise GenerationError(f"can't rewind to {length}: there are {history.length} tokens, and one has to stay")
        if self.cache is not None and self.cache.length >= length:
            self._crop(length - 1)  # the last token is run again, for the logits that follow it
        self._history = _History(
            history.tokens[:, :length],
            history.mask[:, :length],
            np.zeros(len(history.tokens), np.bool_),
            min(length, history.prompt_length),
        )

    def fork(self) -> Generator:
        """A second generator with the same history; each goes its own way from here. Random states are copied as they are."""
        other = object.__new__(Generator)
        other.__dict__.update(self.__dict__)
        other.cache = None if self.cache is None else self.cache.fork()
        other._rngs = copy.deepcopy(self._rngs)
        return other


def _as_batch(tokens: IntArray | Sequence[int] | Sequence[Sequence[int]], mask: IntArray | None) -> tuple[IntArray, IntArray]:
    """Tokens and mask as arrays [batch, time]. GenerationError if there are none, or the mask is of another shape."""
    new = np.atleast_2d(np.asarray(tokens, np.int64))
    added = np.ones_like(new) if mask is None else np.atleast_2d(np.asarray(mask, np.int64))
    if new.size == 0:
        raise GenerationError("there are no tokens to continue from; the prompt is empty")
    if added.shape != new.shape:
        raise GenerationError(f"the mask must be of the tokens' shape {list(new.shape)}, found {list(added.shape)}")
    return new, added


def _random_streams(seed: int, tokens: IntArray, mask: IntArray) -> tuple[np.random.Generator, ...]:
    """A stream of random numbers for each row, that depends on what the row is and not on where it stands. tokens, mask: [batch, time]."""
    prompts = [tuple(row[kept != 0].astype(np.uint32).tolist()) for row, kept in zip(tokens, mask, strict=True)]
    return tuple(
        np.random.default_rng(np.random.SeedSequence([seed, *prompt], spawn_key=(prompts[:index].count(prompt),)))
        for index, prompt in enumerate(prompts)
    )


@dataclass(frozen=True)
class GeneratedToken:
    """One step of generation: ids [batch], and the logits [batch, vocabulary] that they were chosen from, before any processor."""

    ids: IntArray
    logits: FloatArray


class _ChosenOnDevice(GeneratedToken):
    """One whose logits come to the host when they're first read."""

    def __init__(self, ids: IntArray, logits: DeviceLogits) -> None:
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "_on_device", logits)

    @property
    def logits(self) -> FloatArray:
        on_device: DeviceLogits = self._on_device  # type: ignore[attr-defined]
        return on_device.host


def _generated(ids: IntArray, logits: FloatArray | DeviceLogits) -> GeneratedToken:
    return _ChosenOnDevice(ids, logits) if isinstance(logits, DeviceLogits) else GeneratedToken(ids, logits)


def generate(generator: Generator, max_new_tokens: int | None = None, max_length: int | None = None) -> Iterator[GeneratedToken]:
    """New tokens, one step at a time, until all rows have ended, the context is full, there are `max_new_tokens` new ones, or `max_length`
    with the prompt and its padding.

    The end token itself is given too. Stopping the iteration at any point leaves the generator usable.
    """
    left = tokens_left(generator, max_new_tokens, max_length)
    while not generator.is_done and left != 0:
        yield generator.next_token(left)
        left = None if left is None else left - 1


def tokens_left(generator: Generator, max_new_tokens: int | None = None, max_length: int | None = None) -> int | None:
    """How many tokens may still be generated, None where nothing sets a limit. GenerationError for a limit that's negative or passed."""
    length = generator.tokens.shape[1]
    if max_new_tokens is not None and max_new_tokens < 0:
        raise GenerationError(f"max_new_tokens must not be negative, found {max_new_tokens}")
    if max_length is not None and max_length < length:
        raise GenerationError(f"max_length is {max_length}, and there are {length} tokens already; shorten the prompt")
    limits = [max_new_tokens, None if max_length is None else max_length - length]
    return min((limit for limit in limits if limit is not None), default=None)


def search(generator: Generator, max_new_tokens: int | None = None) -> list[list[Continuation]]:
    """Continuations of each prompt, the best first, that the generator's search finds; of `max_new_tokens` at most.

    The search works on a fork. The generator stays at its prompt, which is run once for all rows of the search.
    GenerationError if the generator was given a sampler, or the context is full.
    """
    method = generator.sampler
    if not isinstance(method, Search):
        raise GenerationError("search needs a generator that was given a search, such as beam; this one has a sampler: call generate")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens must be at least 1 for a search, found {max_new_tokens}")
    if generator._is_full(generator.tokens.shape[1]):
        raise GenerationError(f"the model's context of {generator.decoder.context_length} tokens is full")
    generator.logits()
    prompts = len(generator.tokens)
    run = method.start(prompts)
    beams = generator.fork()
    beams.reorder(np.repeat(np.arange(prompts), method.width))
    count = 0
    while not run.is_done and (max_new_tokens is None or count < max_new_tokens) and not beams._is_full(beams.tokens.shape[1]):
        seen = beams._seen(beams._history, None if max_new_tokens is None else max_new_tokens - count)
        rows, ids = run.step(seen, process(beams.processors, seen, log_softmax(beams.logits())))
        beams.reorder(rows)
        beams._history = beams._history.followed_by(ids, ())
        count += 1
    return run.continuations()


def pad_left(rows: Sequence[Sequence[int]], padding: int = 0) -> tuple[IntArray, IntArray]:
    """Rows of several lengths as one batch: tokens [batch, longest], filled on the left, and the mask that says where."""
    longest = max(map(len, rows), default=0)
    tokens = np.full((len(rows), longest), padding, np.int64)
    mask = np.zeros((len(rows), longest), np.int64)
    for row, ids in enumerate(rows):
        tokens[row, longest - len(ids) :] = ids
        mask[row, longest - len(ids) :] = 1
    return tokens, mask
