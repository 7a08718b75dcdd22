"""One run of `miniort generate`: a decoder that is opened and goes on from its prompts, row by row as text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from miniort.errors import GenerationError, PluginError
from miniort.generation import (
    CacheLayoutInfo,
    GeneratedToken,
    GenerationStatistics,
    Generator,
    LogitsProcessor,
    LogitsProcessorInfo,
    SamplerInfo,
    Search,
    Stopwatch,
    Tokenizer,
    generate,
    generate_with_lookup,
    load_cache,
    open_decoder,
    pad_left,
    save_cache,
    score,
    search,
    tokens_left,
)
from miniort.plugins import collect_mapping, create_plugin_manager, find_named
from miniort_cli.options import Named
from miniort_cli.row_text import RowText, Step
from miniort_models.tokenizer import open_tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """What is to be run and how. `cache` None recomputes the whole history in every step.

    `sampler` None is greedy, with the processors that the model's makers want if none are given here.

    continuations: how many of each prompt. candidates: how many of the likeliest tokens each step is scored for, None for no scores.
    prompt_lookup: the longest draft out of the context, None for none.
    """

    model: str
    prompts: Sequence[str]
    tokenizer: str | None
    sampler: Named | None
    processors: Sequence[Named]
    cache: Named | None
    providers: str | Sequence[str]
    prefill_chunk: int | None
    max_new_tokens: int
    max_length: int | None = None
    seed: int | None = None
    stops: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    continuations: int = 1
    candidates: int | None = None
    prompt_lookup: int | None = None
    load_cache: Path | None = None
    save_cache: Path | None = None
    bindings: Mapping[str, str] = field(default_factory=dict)


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
        plugins = create_plugin_manager()
        # A misspelt name is an error at once, not after a large model was loaded.
        self.sampler = setup.sampler or Named("greedy")
        find_named(plugins, "miniort_samplers", SamplerInfo, self.sampler.name, "sampler")
        for processor in setup.processors:
            find_named(plugins, "miniort_logits_processors", LogitsProcessorInfo, processor.name, "logits processor")
        if setup.cache is not None:
            find_named(plugins, "miniort_cache_layouts", CacheLayoutInfo, setup.cache.name, "cache layout")
        self.decoder = open_decoder(setup.model, providers=setup.providers, plugins=plugins, bindings=setup.bindings)
        if setup.tokenizer is not None:
            source = replace(self.decoder.source, tokenizer=lambda: open_tokenizer(Path(setup.tokenizer or "")))
            self.decoder.source = source  # for the processors that want the model's tokenizer, too
        self.tokenizer = self.decoder.open_tokenizer()
        self.processors = list(setup.processors)
        if setup.sampler is None and not self.processors:
            self.processors = [Named(name, dict(options)) for name, options in self.decoder.source.processors.items()]
        self.generator = self._new_generator()
        self.prompt_tokens = [_encode(prompt, self.tokenizer, self.decoder.source.end_tokens) for prompt in setup.prompts]
        if setup.load_cache is not None:
            load_cache(self.generator, setup.load_cache)
            self.reused = self.generator.continue_from(self.prompt_tokens[0])
        else:
            self.generator.append_tokens(*pad_left(self.prompt_tokens))
        self._limit = tokens_left(self.generator, setup.max_new_tokens, setup.max_length)
        self.load_time = time.perf_counter() - started
        self._stopwatch = Stopwatch()

    def _new_generator(self) -> Generator:
        setup, decoder = self.setup, self.decoder
        cache = setup.cache
        return Generator(
            decoder,
            None
            if cache is None
            else _made("cache layout", cache, lambda: decoder.new_cache(cache.name, len(setup.prompts), **cache.options)),
            _made("sampler", self.sampler, lambda: decoder.new_sampler(self.sampler.name, **self.sampler.options)),
            self._new_processors(),
            end_tokens=decoder.source.end_tokens | set(setup.stop_tokens),
            seed=setup.seed,
            prefill_chunk=setup.prefill_chunk,
        )

    def _new_processors(self) -> list[LogitsProcessor]:
        """Each is made by itself, so that what's wrong with its options is said of it, and in the pipeline's order."""
        decoder = self.decoder
        order = list(collect_mapping(decoder.plugins, "miniort_logits_processors", LogitsProcessorInfo))
        made = []
        for each in sorted(self.processors, key=lambda each: order.index(each.name)):
            made += _made("logits processor", each, lambda each=each: decoder.new_processors({each.name: each.options}))  # type: ignore[misc]
        return made

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


def _made(noun: str, named: Named, make: Callable[[], T]) -> T:
    """What `make` makes. PluginError where an option is of a type that it can't be made with."""
    try:
        return make()
    except (TypeError, ValueError, AttributeError) as error:
        options = ", ".join(f"{key}={value!r}" for key, value in named.options.items())
        raise PluginError(f"{noun} {named.name!r} can't be made with {options or 'no options'}: {error}") from error


def _encode(prompt: str, tokenizer: Tokenizer, end_tokens: frozenset[int]) -> list[int]:
    """Token ids of a prompt. An empty one starts from the model's end token, which in training stands in front of every text."""
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    if len(end_tokens) != 1:
        names = "no end token" if not end_tokens else f"several end tokens ({', '.join(map(str, sorted(end_tokens)))})"
        raise GenerationError(f"the prompt is empty, and the model names {names}, so there is none to start from; give a prompt")
    return list(end_tokens)
