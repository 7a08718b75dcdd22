"""One run of `miniort generate`: a decoder that is opened and goes on from its prompts, row by row as text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from miniort.errors import GenerationError
from miniort.generation import (
    DecoderSource,
    GeneratedToken,
    GenerationStatistics,
    Search,
    Stopwatch,
    Tokenizer,
    generate,
    generate_with_lookup,
    load_cache,
    pad_left,
    save_cache,
    score,
    search,
    tokens_left,
)
from miniort_cli.decoder_setup import DecoderSetup, chosen_processors, new_generator, open_from
from miniort_cli.row_text import RowText, Step


@dataclass(frozen=True)
class Chat:
    """That prompts are a user's messages, and the model answers. system: what it's told before, None for what its template says."""

    system: str | None = None

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """The conversation so far."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": prompt}]


@dataclass(frozen=True)
class Setup(DecoderSetup):
    """What is to be run and how.

    continuations: how many of each prompt. candidates: how many of the likeliest tokens each step is scored for, None for no scores.
    prompt_lookup: the longest draft out of the context, None for none. chat: None where prompts are the beginnings of texts.
    """

    prompts: Sequence[str] = ()
    max_new_tokens: int = 0
    max_length: int | None = None
    stops: Sequence[str] = ()
    continuations: int = 1
    candidates: int | None = None
    prompt_lookup: int | None = None
    load_cache: Path | None = None
    save_cache: Path | None = None
    chat: Chat | None = None


class Run:
    """A decoder that goes on from its prompts. It's opened here and run by `steps`; `rows` are there once that has begun.

    `started`: when loading began, by `time.perf_counter`. `reused`: tokens that a loaded cache spared.
    `sampler` and `processors` are those in use.
    Every kind of MiniortError may be raised, before the first step or, where only a run can tell, in it.
    """

    def __init__(self, setup: Setup, *, started: float) -> None:
        self.setup = setup
        self.rows: list[RowText] = []
        self.reused = 0
        self.sampler = setup.sampler_or_greedy
        self.decoder = open_from(setup)
        self.tokenizer = self.decoder.open_tokenizer()
        self.processors = chosen_processors(self.decoder, setup)
        self.generator = new_generator(self.decoder, setup, len(setup.prompts))
        self.prompt_tokens = self._encode_prompts()
        if setup.load_cache is not None:
            load_cache(self.generator, setup.load_cache)
            self.reused = self.generator.continue_from(self.prompt_tokens[0])
        else:
            self.generator.append_tokens(*pad_left(self.prompt_tokens))
        self._limit = tokens_left(self.generator, setup.max_new_tokens, setup.max_length)
        self.load_time = time.perf_counter() - started
        self._stopwatch = Stopwatch()

    def _encode_prompts(self) -> list[list[int]]:
        if self.setup.chat is None:
            return [_encode(prompt, self.tokenizer, self.decoder.source) for prompt in self.setup.prompts]
        template = self.decoder.open_chat_template()
        texts = [template.render(self.setup.chat.messages(prompt)) for prompt in self.setup.prompts]
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def steps(self) -> Iterator[tuple[RowText, Step]]:
        """Run it: each row's steps, and one more if text was held back that no token completes. Then the cache is saved, if wanted."""
        self._stopwatch = Stopwatch()
        if isinstance(self.generator.sampler, Search):
            yield from self._search(self.generator.sampler)
        else:
            yield from self._generate()
        for row in self.rows:
            yield row, row.finish()
        if self.setup.save_cache is not None:
            if self.generator.cache is not None and self.generator.cache.length == 0:
                self.generator.logits()
            save_cache(self.generator, self.setup.save_cache)

    def _generate(self) -> Iterator[tuple[RowText, Step]]:
        count = self.setup.continuations
        self.rows = [self._row(index) for index in range(len(self.setup.prompts)) for _ in range(count)]
        if count > 1:
            self.generator.logits()  # each prompt is run once, whatever the number of its continuations
            self.generator.reorder(np.repeat(np.arange(len(self.setup.prompts)), count))
        for generated in self._stopwatch.watch(self._tokens()):
            scores = [None] * len(self.rows) if self.setup.candidates is None else score(generated, self.setup.candidates)
            for row, token, scored in zip(self.rows, generated.ids, scores, strict=True):
                if not row.finish_reason:
                    yield row, row.take(int(token), scored)
            if all(row.finish_reason for row in self.rows):
                break

    def _tokens(self) -> Iterator[GeneratedToken]:
        if self.setup.prompt_lookup is None:
            return generate(self.generator, self._limit)
        return generate_with_lookup(self.generator, self.setup.prompt_lookup, self._limit)

    def _search(self, method: Search) -> Iterator[tuple[RowText, Step]]:
        """All rows at once: a search knows what is best when it's done."""
        if self.setup.continuations > method.width:
            raise GenerationError(f"{self.setup.continuations} continuations are more than the {method.width} that the search keeps")
        if self._limit == 0:
            return
        found = search(self.generator, self._limit)
        for index, continuations in enumerate(found):
            for continuation in continuations[: self.setup.continuations]:
                row = self._row(index)
                row.score = continuation.score
                self.rows.append(row)
                for token in continuation.tokens:
                    yield row, row.take(int(token))

    def _row(self, index: int) -> RowText:
        return RowText(
            self.tokenizer, self.setup.prompts[index], self.prompt_tokens[index], self.generator.end_tokens, self.setup.stops, self._limit
        )

    def statistics(self) -> GenerationStatistics:
        """The figures so far; of a search, which has no single steps, only sizes."""
        longest = max(map(len, self.prompt_tokens))
        figures = self._stopwatch.statistics(longest, self.decoder.cache_spec(max(1, len(self.rows))), self.generator.cache)
        if isinstance(self.generator.sampler, Search):
            return replace(figures, new_tokens=max((len(row.tokens) for row in self.rows), default=0))
        return figures

    def close(self) -> None:
        """Give the providers' memory back."""
        self.decoder.close()


def _encode(prompt: str, tokenizer: Tokenizer, source: DecoderSource) -> list[int]:
    """Token ids of a prompt. An empty one starts from what stood in front of texts in training: the begin token, or else the end token."""
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    if source.begin_token is not None:
        return [source.begin_token]
    if len(source.end_tokens) != 1:
        ends = source.end_tokens
        names = "no end token" if not ends else f"several end tokens ({', '.join(map(str, sorted(ends)))})"
        raise GenerationError(f"the prompt is empty, and the model names no begin token and {names} to start from; give a prompt")
    return list(source.end_tokens)
