"""A decoder: its graphs joined to a cache, over one copy of the weights."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from miniort.default_layout import DEFAULT_LAYOUT
from miniort.errors import CacheError, ChatTemplateError, GenerationError, ModelError, TokenizerError
from miniort.generation.binding import DecoderBinding, GraphBinding
from miniort.generation.cache import CacheLayoutInfo, CacheSpec, KVCache, ReservedTokens, layer_contents
from miniort.generation.device_choice import DeviceLogits, ProcessorOnDevice, SamplerOnDevice, TokenChooser
from miniort.generation.join import CACHE_APPEND, Join
from miniort.generation.joined_graphs import DECODE, PREFILL, DecoderGraphs, JoinedGraph
from miniort.generation.last_logits import with_first_logit
from miniort.generation.probes import heeds_padding, sees_later_tokens
from miniort.generation.prompt_store import CACHE_STORE
from miniort.generation.recorded_steps import RecordedSteps, ReplayCounts
from miniort.generation.sampling import LogitsProcessor, LogitsProcessorInfo, Sampler, SamplerInfo, Search, create_with_options
from miniort.generation.sources import ChatTemplate, DecoderSource, ModelFormat, Tokenizer
from miniort.generation.step_feeds import Step, cache_parts, past_feeds, step_feeds
from miniort.model.weights import WeightStore
from miniort.plugins import PluginManager, collect_mapping, create_plugin_manager, find_named
from miniort.pool import BufferPool
from miniort.providers import HOST, ChoosesTokens, KeepsCaches
from miniort.runtime.session import InferenceSession, SessionOptions
from miniort.types import DType, FloatArray, IntArray

_FREE_CACHE_BYTES = 256 << 20
"""Memory of caches that are gone that's kept for the next ones, at most."""


@dataclass(frozen=True)
class _BoundGraph:
    """A graph's session, its binding as it is now that it's joined, and how it was joined.

    takes_first_logit: whether it's told which logits are wanted. replays: whether its steps of one token may be recorded.
    """

    session: InferenceSession
    binding: GraphBinding
    join: Join
    takes_first_logit: bool
    replays: bool

    @property
    def knows_positions(self) -> bool:
        """Whether it's told where each token stands in its row."""
        return self.binding.positions is not None or self.join.wants_positions

    @cached_property
    def leaving_logits(self) -> tuple[Any, InferenceSession] | None:
        """The provider on whose device tokens can be chosen, and the session that leaves logits there; None where they go to the host."""
        found = self.session.leaving_on_device(self.binding.logits)
        if found is None or not isinstance(found[0].provider, ChoosesTokens):
            return None
        return found[0].provider, found[1]

    @cached_property
    def recorded_steps(self) -> RecordedSteps | None:
        """What records its steps of one token; None where that was turned off, or no provider was asked to."""
        recorder = self.session.recorder if self.replays else None
        if recorder is None:
            return None
        provider = recorder.provider
        if provider.device == HOST:
            return RecordedSteps(provider, self.session, self._recording_obstacle)
        leaving = self.session.leaving_on_device(self.binding.logits)
        return RecordedSteps(provider, None if leaving is None else leaving[1], self._recording_obstacle)

    @property
    def _recording_obstacle(self) -> str | None:
        """Why its steps can't be recorded, as far as that's known before one is run."""
        if not self.join.appends:
            return f"the graph doesn't append to the cache: {self.join.reason}"
        if not self.knows_positions:
            return "the graph takes no positions, so it counts them by the length of its past"
        if not self.knows_padding:
            return "the graph takes no mask, so nothing would hide tokens that aren't there yet"
        return None

    @property
    def knows_padding(self) -> bool:
        """Whether it's told which tokens are padding."""
        return self.binding.mask is not None or bool(self.join.windows)


class _NoCache:
    """A cache that keeps nothing: all that it gives back is what is new."""

    length = min_length = nbytes = 0

    def append(self, layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        return key, value

    def commit(self, count: int) -> None: ...

    def crop(self, length: int) -> None: ...

    def reorder(self, rows: IntArray) -> None: ...

    def fork(self) -> KVCache:
        return self

    def positions(self) -> IntArray:
        return np.empty(0, np.int64)


class Decoder:
    """A decoder-only language model, ready to be given tokens and a cache.

    source: what a model format found; see `open_decoder` for names and paths.
    providers, options: as for `InferenceSession`. weights: a store to share with other sessions.
    bindings: names of inputs and outputs by role, where they can't be told from the graph (see `bind_decoder`).
    replay: whether steps of one token are noted down once and then replayed, where that can be.
    """

    def __init__(
        self,
        source: DecoderSource,
        *,
        providers: str | Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        options: SessionOptions | None = None,
        weights: WeightStore | None = None,
        plugins: PluginManager | None = None,
        bindings: Mapping[str, str] | None = None,
        replay: bool = True,
    ) -> None:
        self.source = source
        self.plugins = plugins or create_plugin_manager()
        self.weights = weights or WeightStore()
        graphs = DecoderGraphs(source.graphs, self.weights, bindings or {})

        def bound(which: str, dtype: DType | None = None) -> tuple[_BoundGraph, DecoderBinding]:
            recipe = graphs.recipe(which, dtype)
            session = InferenceSession(
                recipe, options, providers, weights=self.weights, plugins=self.plugins, kernels=[CACHE_APPEND, CACHE_STORE]
            )
            joined = JoinedGraph.from_notes(session.notes)
            return _BoundGraph(session, joined.graph, joined.join, joined.takes_first_logit, replay), joined.decoder

        self._decode, binding = bound(DECODE)
        appended = self._decode.join.dtype
        # What the steps append is what the cache is made of, also for the prompt.
        self.binding: DecoderBinding = binding if appended is None else replace(binding, dtype=np.dtype(appended))
        self._prefill = self._decode if binding.prefill is None else bound(PREFILL, self.binding.dtype)[0]
        self.context_length = source.context_length
        self._cache_memory = BufferPool(_FREE_CACHE_BYTES)

    @property
    def sessions(self) -> Mapping[str, InferenceSession]:
        """The sessions by what they're for: `decoder` alone, or `prefill` and `decode`."""
        if self._prefill is self._decode:
            return {"decoder": self._decode.session}
        return {"prefill": self._prefill.session, "decode": self._decode.session}

    @property
    def joins(self) -> Mapping[str, Join]:
        """How each graph was joined to the cache, by the names of `sessions`."""
        return {name: (self._decode if name != "prefill" else self._prefill).join for name in self.sessions}

    @property
    def replay_counts(self) -> ReplayCounts | None:
        """How often steps of one token were recorded and replayed; None where that was turned off, or no provider was asked to."""
        return None if self._decode.recorded_steps is None else self._decode.recorded_steps.counts

    def cache_spec(self, batch: int) -> CacheSpec:
        """What a cache layout has to know for a batch of that many rows."""
        binding = self.binding
        return CacheSpec(
            layers=binding.layers,
            batch=batch,
            kv_heads=binding.kv_heads,
            head_dim=binding.head_dim,
            value_head_dim=binding.value_head_dim,
            dtype=binding.dtype,
            capacity=self.context_length,
            allocate=self._cache_memory.allocate,
        )

    def new_cache(self, layout: str = DEFAULT_LAYOUT, batch: int = 1, **options: Any) -> KVCache:
        """An empty cache of the layout of that name. PluginError if there is none, or it has no such option.

        CacheError for one that lets go of old tokens where the model can't be told positions.
        """
        info = find_named(self.plugins, "miniort_cache_layouts", CacheLayoutInfo, layout, "cache layout")
        if info.lets_go and not self._decode.knows_positions:
            raise self._positions_unknown(f"cache layout {layout!r} lets go of old tokens")
        create = (None if self._cache_keeper is None else self._cache_keeper.cache_layout(layout)) or info.create
        cache: KVCache = create_with_options("cache layout", layout, create, [self.cache_spec(batch)], options)
        return cache

    @cached_property
    def _cache_keeper(self) -> KeepsCaches | None:
        """The provider on whose device the graph of each step appends to the cache, if it can keep one there."""
        session = self._decode.session
        names = {step.info.provider for step in session.plan.steps if (step.info.domain, step.info.op) == ("miniort", "CacheAppend")}
        appending = [each.provider for each in session.providers if each.name in names]
        return appending[0] if len(appending) == 1 and isinstance(appending[0], KeepsCaches) else None

    def new_sampler(self, name: str = "greedy", **options: Any) -> Sampler | Search:
        """The sampler or search of that name. PluginError if there is none, or it has no such option."""
        info = find_named(self.plugins, "miniort_samplers", SamplerInfo, name, "sampler")
        sampler: Sampler | Search = create_with_options("sampler", name, info.create, [], options)
        chooser = self.token_chooser
        if chooser is None or isinstance(sampler, Search):
            return sampler
        create = chooser.token_sampler(name)
        return sampler if create is None else SamplerOnDevice(chooser, sampler, create(**options))

    @cached_property
    def token_chooser(self) -> TokenChooser | None:
        """The provider on whose device each graph leaves its logits and tokens can be chosen; None where that's the host."""
        graphs = [self._decode] if self._prefill is self._decode else [self._prefill, self._decode]
        found = [graph.leaving_logits for graph in graphs]
        devices = {None if each is None else each[0].device for each in found}
        chosen = found[-1]
        return None if chosen is None or len(devices) > 1 else chosen[0]

    def new_processors(self, wanted: Mapping[str, Mapping[str, Any]]) -> list[LogitsProcessor]:
        """Logits processors by name with their options, in the pipeline's order: by priority, whatever the order of `wanted`.

        An option `tokenizer` that isn't given is the model's. PluginError if there is no such processor or option, or one is missing.
        """
        for name in wanted:
            find_named(self.plugins, "miniort_logits_processors", LogitsProcessorInfo, name, "logits processor")
        known = collect_mapping(self.plugins, "miniort_logits_processors", LogitsProcessorInfo)
        return [self._new_processor(info, self._complete(info, wanted[name])) for name, info in known.items() if name in wanted]

    def _new_processor(self, info: LogitsProcessorInfo, options: Mapping[str, Any]) -> LogitsProcessor:
        processor: LogitsProcessor = create_with_options("logits processor", info.name, info.create, [], options)
        chooser = self.token_chooser
        if chooser is None:
            return processor
        create = chooser.logits_processor(info.name)
        return processor if create is None else ProcessorOnDevice(chooser, processor, create(**options))

    def _complete(self, info: LogitsProcessorInfo, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Options with the model's tokenizer, where a processor takes one and none is given."""
        if "tokenizer" in options or "tokenizer" not in inspect.signature(info.create).parameters:
            return options
        return {**options, "tokenizer": self.open_tokenizer()}

    def open_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. TokenizerError if there is none beside the model, or it has ids that the model doesn't know."""
        if self.source.tokenizer is None:
            raise TokenizerError(f"{self.source.name}: no tokenizer.json beside the model; name one with --tokenizer FILE")
        tokenizer = self.source.tokenizer()
        known = self.binding.vocabulary_size
        if known is not None and tokenizer.vocabulary_size > known:
            raise TokenizerError(
                f"{self.source.name}: the tokenizer has {tokenizer.vocabulary_size} tokens and the model knows {known}, so they don't "
                "belong together; name the model's own with --tokenizer FILE"
            )
        return tokenizer

    def open_chat_template(self) -> ChatTemplate:
        """How the model wants conversations written down. ChatTemplateError if it says nothing about that."""
        if self.source.chat_template is None:
            raise ChatTemplateError(
                f"{self.source.name} has no chat template: it wasn't trained for conversations; take a model that was, "
                "or name a template with --chat-template FILE"
            )
        return self.source.chat_template()

    @property
    def vocabulary_size(self) -> int | None:
        """How many token ids there are, None where the graphs don't say."""
        return self.binding.vocabulary_size

    def check_tokens(self, tokens: IntArray) -> None:
        """GenerationError for a token id that the model doesn't know. tokens: of any shape."""
        size = self.vocabulary_size
        if tokens.size == 0 or (tokens.min() >= 0 and (size is None or tokens.max() < size)):
            return
        wrong = tokens[(tokens < 0) | (tokens >= (size or np.inf))]
        known = "token ids aren't negative" if size is None else f"{self.source.name} has {size:,} token ids, 0 to {size - 1}"
        raise GenerationError(f"there is no token {int(wrong.flat[0])}: {known}; give it the tokenizer that it was made with")

    @cached_property
    def takes_several_tokens(self) -> bool:
        """Whether the graph of each step may be given several new tokens behind a past: none of them must see a later one.

        A graph that was exported for one token at a time may lack the mask for that, so it's tried out, once.
        """
        graph = self._decode
        batch, new = (graph.binding.shapes.get(graph.binding.tokens) or (None, None))[:2]
        if isinstance(new, int):
            return False
        forward = partial(self._run, graph, every_logit=True)
        return graph.join.causal or not sees_later_tokens(forward, self.cache_spec, 1 if batch == 1 else 2)

    @cached_property
    def padding_obstacle(self) -> str | None:
        """Why rows of different lengths can't be in one batch, padded on the left; None where they can.

        A graph that isn't told positions may count them from the padding, so it's tried out, once.
        """
        graph = self._prefill
        if not graph.knows_padding:
            return f"{self.source.name} takes no attention mask, so it can't tell padding from text"
        if graph.knows_positions and not graph.join.counts_keys:
            return None
        if heeds_padding(partial(self._run, graph), self.cache_spec):
            return None
        if graph.join.counts_keys:
            return f"{self.source.name} wants its rows padded on the right: {graph.join.reason}"
        return f"{self.source.name} takes no position_ids and counts positions from the padding; export it with position_ids"

    def uncached(self, tokens: IntArray, mask: IntArray) -> FloatArray:
        """One run of a whole history, [batch, time], that leaves nothing behind: the baseline. Logits as `forward` gives them."""
        return self.forward(tokens, mask, _NoCache())

    def forward(self, tokens: IntArray, mask: IntArray, cache: KVCache, *, every_logit: bool = False) -> FloatArray:
        """One step: append `tokens` [batch, new] to the cache and give logits [batch, n, vocabulary] of the last n of them.

        mask: [batch, cache.length + new], 0 where a row is padded on the left. n is 1; with `every_logit` it's `new`, or 1 from a graph
        that gives no more. The tokens are appended but not committed: that's the caller's decision.
        GenerationError for several tokens where the graph takes one at a time; see `takes_several_tokens`.
        """
        return self._run(self._graph_for(tokens, cache), tokens, mask, cache, every_logit=every_logit)

    def forward_on_device(self, tokens: IntArray, mask: IntArray, cache: KVCache) -> DeviceLogits:
        """As `forward`, but the logits stay on the device of `token_chooser`, which there must be."""
        graph = self._graph_for(tokens, cache)
        assert self.token_chooser is not None
        assert graph.leaving_logits is not None
        return DeviceLogits(self._logits(graph, graph.leaving_logits[1], tokens, mask, cache), self.token_chooser)

    def _graph_for(self, tokens: IntArray, cache: KVCache) -> _BoundGraph:
        """The graph of the prompt or that of each step. GenerationError for several tokens where the graph takes one at a time."""
        graph = self._prefill if cache.length == 0 else self._decode
        if tokens.shape[1] > 1 and graph is self._decode and not self.takes_several_tokens:
            raise GenerationError(
                f"{self.source.name} takes one new token at a time: with several, each would see those after it, for its graph has no mask "
                "between them; give them one by one, or export it with a causal mask"
            )
        return graph

    def _run(self, graph: _BoundGraph, tokens: IntArray, mask: IntArray, cache: KVCache, *, every_logit: bool = False) -> FloatArray:
        logits = self._logits(graph, graph.session, tokens, mask, cache, every_logit=every_logit)
        steps = graph.recorded_steps
        host: FloatArray = logits if steps is None or isinstance(logits, np.ndarray) else steps.provider.download(logits)
        return host if host.ndim == 3 else host[:, None, :]

    def _logits(
        self,
        graph: _BoundGraph,
        session: InferenceSession,
        tokens: IntArray,
        mask: IntArray,
        cache: KVCache,
        *,
        every_logit: bool = False,
    ) -> Any:
        """Run a session of the graph, or replay its recorded step, and append to the cache.

        Logits, where the session leaves them; those of a replay are on the device.
        """
        step = self._step(graph, tokens, mask, cache, every_logit=every_logit)
        steps = graph.recorded_steps if tokens.shape[1] == 1 and graph is self._decode and not every_logit else None
        batch = len(tokens)
        reserved = None if steps is None else steps.reserved(cache, batch)
        if steps is None or reserved is None:
            return self._run_step(graph, session, step, cache)
        feeds = self._feeds(graph, step.within(reserved.size), reserved)
        logits = steps.replay(cache, feeds)
        if logits is not None:
            return logits
        return steps.record(cache, batch, reserved, feeds, partial(self._run_step, graph, session, step, cache))

    def _step(self, graph: _BoundGraph, tokens: IntArray, mask: IntArray, cache: KVCache, *, every_logit: bool) -> Step:
        """What a run is about. CacheError if the cache has let go of tokens and the graph can't be told positions."""
        new = tokens.shape[1]
        positions = np.clip(np.cumsum(mask, axis=1)[:, -new:] - 1, 0, None)
        kept = cache.positions()
        if len(kept) != cache.length:
            if not graph.knows_positions:
                raise self._positions_unknown(f"the cache has let go of {cache.length - len(kept)} tokens")
            mask = np.concatenate([mask[:, kept], mask[:, -new:]], axis=1)
        places = np.concatenate([kept, np.arange(cache.length, cache.length + new)])
        return Step(tokens, positions, mask, places, every_logit)

    def _feeds(self, graph: _BoundGraph, step: Step, cache: KVCache | ReservedTokens) -> dict[str, Any]:
        """All feeds of a run, apart from a past that isn't joined."""
        past_shape = (len(step.tokens), self.binding.kv_heads, step.kept, self.binding.head_dim)
        feeds = step_feeds(graph.binding, graph.join, step, cache, past_shape)
        return with_first_logit(feeds, step.every_logit) if graph.takes_first_logit else feeds

    def _run_step(self, graph: _BoundGraph, session: InferenceSession, step: Step, cache: KVCache) -> Any:
        """Run a session of the graph and append to the cache. Logits, where the session leaves them."""
        batch, new = step.tokens.shape
        feeds = self._feeds(graph, step, cache)
        if not graph.join.appends:
            feeds |= past_feeds(graph.binding, [layer_contents(cache, self.cache_spec(batch), each) for each in range(self.binding.layers)])
        outputs = session.execute(feeds)
        if not graph.join.appends:
            for layer, (key, value) in enumerate(cache_parts(graph.binding, outputs, new, self.binding.dtype)):
                cache.append(layer, key, value)
        return outputs[graph.binding.logits]

    def _positions_unknown(self, what: str) -> CacheError:
        """A graph without positions counts them by what is kept, so tokens that are let go would shift all that follow."""
        return CacheError(
            f"{what}, but {self.source.name} takes no positions: it counts them by what is kept, and would be wrong once tokens are gone; "
            "use a layout that keeps all tokens, or export the model with position_ids"
        )

    def close(self) -> None:
        """Give the memory of all providers back."""
        for session in self.sessions.values():
            session.close()
        self._cache_memory.clear()


def find_source(model: str | os.PathLike[str], plugins: PluginManager) -> DecoderSource:
    """The decoder that a name or a path stands for, by the model formats that plugins offer.

    ModelError if no format recognises it, that says which there are.
    """
    source = os.fspath(model)
    formats = collect_mapping(plugins, "miniort_model_formats", ModelFormat)
    for each in formats.values():
        if each.recognise(source):
            return each.open(source)
    known = "; ".join(f"{each.name}: {each.summary}" if each.summary else each.name for each in formats.values())
    if not Path(source).exists():
        raise ModelError(f"{source}: no such file or folder, and no model has this name. Known kinds of model: {known or 'none'}")
    raise ModelError(f"{source}: no model format recognises it. Known kinds of model: {known or 'none'}")


def open_decoder(
    model: str | os.PathLike[str] = "demo",
    *,
    providers: str | Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
    options: SessionOptions | None = None,
    weights: WeightStore | None = None,
    plugins: PluginManager | None = None,
    bindings: Mapping[str, str] | None = None,
    replay: bool = True,
) -> Decoder:
    """The decoder that a name or a path stands for; arguments as for `Decoder`."""
    plugins = plugins or create_plugin_manager()
    source = find_source(model, plugins)
    return Decoder(source, providers=providers, options=options, weights=weights, plugins=plugins, bindings=bindings, replay=replay)
