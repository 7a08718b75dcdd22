"""One prompt and what a decoder makes of it: opened, run step by step, and turned into text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from miniort.errors import GenerationError
from miniort.generation import (
    GenerationStatistics,
    Generator,
    SamplerInfo,
    Stopwatch,
    StreamingDetokenizer,
    Tokenizer,
    generate,
    open_decoder,
)
from miniort.plugins import create_plugin_manager, find_named
from miniort.types import FloatArray
from miniort_models.tokenizer import open_tokenizer

PROMPT_TAIL = 16
"""Tokens of the prompt that the detokenizer sees first: what follows may need them to be decoded (a character's bytes, a space)."""


@dataclass(frozen=True)
class Setup:
    """What is to be run and how; names are those of plugins. `cache` None recomputes the whole history in every step."""

    model: str
    tokenizer: str | None
    sampler: str
    cache: str | None
    providers: str | Sequence[str]
    prefill_chunk: int | None
    bindings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A token that might come next: its text by itself, its logit, and its probability by the softmax of all logits."""

    id: int
    text: str
    logit: float
    probability: float


@dataclass(frozen=True)
class Step:
    """What one token brought: the text that is certain since, often empty; and the likeliest candidates for it, if asked for."""

    text: str
    candidates: tuple[Candidate, ...] = ()


class Continuation:
    """A decoder that goes on from a prompt. It's opened here and run by `steps`.

    `candidates`: how many of the likeliest tokens each step shows. `started`: when loading began, by `time.perf_counter`.
    Every kind of MiniortError may be raised, before the first step or, where only a run can tell, in it.
    """

    def __init__(self, setup: Setup, prompt: str, max_new_tokens: int, *, candidates: int, started: float) -> None:
        self.setup = setup
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.tokens: list[int] = []
        self.candidates: list[tuple[Candidate, ...]] = []
        self._shown = candidates
        self._pieces: list[str] = []
        plugins = create_plugin_manager()
        # A misspelt sampler is an error at once, not after a large model was loaded.
        find_named(plugins, "miniort_samplers", SamplerInfo, setup.sampler, "sampler")
        self.decoder = open_decoder(setup.model, providers=setup.providers, plugins=plugins, bindings=setup.bindings)
        self.tokenizer = self.decoder.open_tokenizer() if setup.tokenizer is None else open_tokenizer(Path(setup.tokenizer))
        cache = None if setup.cache is None else self.decoder.new_cache(setup.cache)
        self.generator = Generator(self.decoder, cache, self.decoder.new_sampler(setup.sampler), prefill_chunk=setup.prefill_chunk)
        self.prompt_tokens = _encode(prompt, self.tokenizer, self.generator.end_tokens)
        self.generator.append_tokens(self.prompt_tokens)
        self.load_time = time.perf_counter() - started
        self._stopwatch = Stopwatch()

    def steps(self) -> Iterator[Step]:
        """Run it: a step for each token, and one more if text was held back that no token completes. The end token has no text."""
        detokenizer, repeated = self._detokenizer()

        def new_text(text: str) -> str:
            nonlocal repeated
            text, repeated = text[repeated:], max(0, repeated - len(text))
            self._pieces.append(text)
            return text

        self._stopwatch = Stopwatch()
        for generated in self._stopwatch.watch(generate(self.generator, self.max_new_tokens)):
            token = int(generated.ids[0])
            self.tokens.append(token)
            self.candidates.append(likeliest(generated.logits[0], self._shown, self.tokenizer))
            text = "" if token in self.generator.end_tokens else detokenizer.push(token)
            yield Step(new_text(text), self.candidates[-1])
        rest = new_text(detokenizer.flush())
        if rest:
            yield Step(rest)

    def _detokenizer(self) -> tuple[StreamingDetokenizer, int]:
        """One that has seen the end of the prompt, and how much of what it will say next is still the prompt's."""
        detokenizer = StreamingDetokenizer(self.tokenizer.decode)
        tail = self.prompt_tokens[-PROMPT_TAIL:]
        held_back = len(self.tokenizer.decode(tail)) - len(detokenizer.push(tail))
        return detokenizer, held_back

    @property
    def text(self) -> str:
        """What was generated so far, without the prompt."""
        return "".join(self._pieces)

    @property
    def finish_reason(self) -> str:
        """`end`: the model ended the text; `length`: the wanted number of tokens is there; `context`: the model's context is full."""
        if self.tokens and self.tokens[-1] in self.generator.end_tokens:
            return "end"
        return "length" if len(self.tokens) == self.max_new_tokens else "context"

    def statistics(self) -> GenerationStatistics:
        """The figures so far."""
        return self._stopwatch.statistics(len(self.prompt_tokens), self.decoder.cache_spec(1), self.generator.cache)

    def close(self) -> None:
        """Give the providers' memory back."""
        self.decoder.close()


def likeliest(logits: FloatArray, count: int, tokenizer: Tokenizer) -> tuple[Candidate, ...]:
    """The `count` best tokens, best first, of equal ones the lowest id first. logits: [vocabulary]; probability = exp(l) / Σ exp(l)."""
    if count == 0:
        return ()
    exact = logits.astype(np.float64)
    exponentials = np.exp(exact - exact.max())
    probabilities = exponentials / exponentials.sum()
    best = np.argsort(-exact, kind="stable")[:count]
    return tuple(Candidate(int(each), tokenizer.decode([int(each)]), float(exact[each]), float(probabilities[each])) for each in best)


def _encode(prompt: str, tokenizer: Tokenizer, end_tokens: frozenset[int]) -> list[int]:
    """Token ids of a prompt. An empty one starts from the model's end token, which in training stands in front of every text."""
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    if len(end_tokens) != 1:
        names = "no end token" if not end_tokens else f"several end tokens ({', '.join(map(str, sorted(end_tokens)))})"
        raise GenerationError(f"the prompt is empty, and the model names {names}, so there is none to start from; give a prompt")
    return list(end_tokens)
