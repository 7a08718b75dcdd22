"""From the options of a command to a decoder, its tokenizer and a generator over it; what's wrong with an option is said of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from miniort.errors import PluginError
from miniort.generation import (
    CacheLayoutInfo,
    ChatTemplate,
    Decoder,
    DecoderSource,
    Generator,
    LogitsProcessor,
    LogitsProcessorInfo,
    SamplerInfo,
    open_decoder,
)
from miniort.plugins import collect_mapping, create_plugin_manager, find_named
from miniort_cli.options import Named, Providers
from miniort_models.chat_template import read_chat_template
from miniort_models.tokenizer import open_tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class DecoderSetup:
    """Which decoder is opened, and how it chooses tokens. `cache` None recomputes the whole history in every step.

    `sampler` None is greedy, with the processors that the model's makers want if none are given here.
    """

    model: str
    tokenizer: str | None
    sampler: Named | None
    processors: Sequence[Named]
    cache: Named | None
    providers: Providers
    prefill_chunk: int | None
    seed: int | None = None
    stop_tokens: Sequence[int] = ()
    chat_template: Path | None = None
    bindings: Mapping[str, str] = field(default_factory=dict)
    replay: bool = True

    @property
    def sampler_or_greedy(self) -> Named:
        """What chooses tokens."""
        return self.sampler or Named("greedy")


def open_from(setup: DecoderSetup) -> Decoder:
    """The decoder. A misspelt name of a plugin's thing is an error at once, not after a large model was loaded."""
    plugins = create_plugin_manager()
    find_named(plugins, "miniort_samplers", SamplerInfo, setup.sampler_or_greedy.name, "sampler")
    for processor in setup.processors:
        find_named(plugins, "miniort_logits_processors", LogitsProcessorInfo, processor.name, "logits processor")
    if setup.cache is not None:
        find_named(plugins, "miniort_cache_layouts", CacheLayoutInfo, setup.cache.name, "cache layout")
    decoder = open_decoder(setup.model, providers=setup.providers, plugins=plugins, bindings=setup.bindings, replay=setup.replay)
    decoder.source = _with_files_of_the_user(decoder.source, setup)  # there, for processors that want the model's tokenizer, too
    return decoder


def _with_files_of_the_user(source: DecoderSource, setup: DecoderSetup) -> DecoderSource:
    tokenizer, template, own = setup.tokenizer, setup.chat_template, source.chat_template
    if tokenizer is not None:
        source = replace(source, tokenizer=lambda: open_tokenizer(Path(tokenizer)))
    if template is not None:

        def read() -> ChatTemplate:
            # The texts of the special tokens are the model's, whatever template is used.
            return read_chat_template(template, getattr(own(), "special_tokens", {}) if own is not None else {})

        source = replace(source, chat_template=read)
    return source


def chosen_processors(decoder: Decoder, setup: DecoderSetup) -> list[Named]:
    """The logits processors that are asked for, or else, where no sampler is, those that the model's makers want."""
    if setup.sampler is None and not setup.processors:
        return [Named(name, dict(options)) for name, options in decoder.source.processors.items()]
    return list(setup.processors)


def new_generator(decoder: Decoder, setup: DecoderSetup, batch: int = 1) -> Generator:
    """A generator for that many rows. PluginError where an option is one that something can't be made with."""
    cache, sampler = setup.cache, setup.sampler_or_greedy
    return Generator(
        decoder,
        None if cache is None else _made("cache layout", cache, lambda: decoder.new_cache(cache.name, batch, **cache.options)),
        _made("sampler", sampler, lambda: decoder.new_sampler(sampler.name, **sampler.options)),
        _new_processors(decoder, chosen_processors(decoder, setup)),
        end_tokens=decoder.source.end_tokens | set(setup.stop_tokens),
        seed=setup.seed,
        prefill_chunk=setup.prefill_chunk,
    )


def _new_processors(decoder: Decoder, processors: Sequence[Named]) -> list[LogitsProcessor]:
    """Each is made by itself, so that what's wrong with its options is said of it, and in the pipeline's order."""
    order = list(collect_mapping(decoder.plugins, "miniort_logits_processors", LogitsProcessorInfo))
    made = []
    for each in sorted(processors, key=lambda each: order.index(each.name)):
        made += _made("logits processor", each, lambda each=each: decoder.new_processors({each.name: each.options}))  # type: ignore[misc]
    return made


def _made(noun: str, named: Named, make: Callable[[], T]) -> T:
    """What `make` makes. PluginError where an option is of a type that it can't be made with."""
    try:
        return make()
    except (TypeError, ValueError, AttributeError) as error:
        options = ", ".join(f"{key}={value!r}" for key, value in named.options.items())
        raise PluginError(f"{noun} {named.name!r} can't be made with {options or 'no options'}: {error}") from error
