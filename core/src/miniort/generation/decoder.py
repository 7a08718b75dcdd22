"""A decoder: its graphs joined to a cache, over one copy of the weights."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miniort.errors import CacheError, ModelError, TokenizerError
from miniort.generation.binding import DecoderBinding, GraphBinding, bind_decoder
from miniort.generation.cache import CacheLayoutInfo, CacheSpec, KVCache
from miniort.generation.join import CACHE_APPEND, CACHE_INPUT, PAST_SHAPE_INPUT, Join, join_cache
from miniort.generation.sampling import LogitsProcessor, LogitsProcessorInfo, Sampler, SamplerInfo, Search, create_with_options
from miniort.generation.sources import DecoderSource, ModelFormat, Tokenizer
from miniort.model.loading import load_model
from miniort.model.weights import WeightStore
from miniort.plugins import PluginManager, collect_mapping, create_plugin_manager, find_named
from miniort.runtime.session import InferenceSession, SessionOptions
from miniort.types import DType, FloatArray, IntArray


@dataclass(frozen=True)
class _BoundGraph:
    session: InferenceSession
    binding: GraphBinding
    join: Join


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
    ) -> None:
        self.source = source
        self.plugins = plugins or create_plugin_manager()
        self.weights = weights or WeightStore()
        models = [load_model(path, weights=self.weights) for path in source.graphs]
        self.binding: DecoderBinding = bind_decoder([model.graph for model in models], bindings)

        def bound(index: int, binding: GraphBinding) -> _BoundGraph:
            join = join_cache(models[index], binding)
            session = InferenceSession(
                models[index], options, providers, weights=self.weights, plugins=self.plugins, kernels=[CACHE_APPEND]
            )
            return _BoundGraph(session, binding, join)

        self._decode = bound(-1, self.binding.decode)
        self._prefill = self._decode if self.binding.prefill is None else bound(0, self.binding.prefill)
        self.context_length = source.context_length

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
        )

    def new_cache(self, layout: str = "concat_bhtd", batch: int = 1, **options: Any) -> KVCache:
        """An empty cache of the layout of that name. PluginError if there is none, or it has no such option.

        CacheError for one that lets go of old tokens where the model can't be told positions.
        """
        info = find_named(self.plugins, "miniort_cache_layouts", CacheLayoutInfo, layout, "cache layout")
        if info.lets_go and self.binding.decode.positions is None:
            raise self._positions_unknown(f"cache layout {layout!r} lets go of old tokens")
        cache: KVCache = create_with_options("cache layout", layout, info.create, [self.cache_spec(batch)], options)
        return cache

    def new_sampler(self, name: str = "greedy", **options: Any) -> Sampler | Search:
        """The sampler or search of that name. PluginError if there is none, or it has no such option."""
        info = find_named(self.plugins, "miniort_samplers", SamplerInfo, name, "sampler")
        sampler: Sampler | Search = create_with_options("sampler", name, info.create, [], options)
        return sampler

    def new_processors(self, wanted: Mapping[str, Mapping[str, Any]]) -> list[LogitsProcessor]:
        """Logits processors by name with their options, in the pipeline's order: by priority, whatever the order of `wanted`.

        An option `tokenizer` that isn't given is the model's. PluginError if there is no such processor or option, or one is missing.
        """
        for name in wanted:
            find_named(self.plugins, "miniort_logits_processors", LogitsProcessorInfo, name, "logits processor")
        known = collect_mapping(self.plugins, "miniort_logits_processors", LogitsProcessorInfo)
        return [
            create_with_options("logits processor", name, info.create, [], self._complete(info, wanted[name]))
            for name, info in known.items()
            if name in wanted
        ]

    def _complete(self, info: LogitsProcessorInfo, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Options with the model's tokenizer, where a processor takes one and none is given."""
        if "tokenizer" in options or "tokenizer" not in inspect.signature(info.create).parameters:
            return options
        return {**options, "tokenizer": self.open_tokenizer()}

    def open_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. TokenizerError if there is none beside the model."""
        if self.source.tokenizer is None:
            raise TokenizerError(f"{self.source.name}: no tokenizer.json beside the model; name one with --tokenizer FILE")
        return self.source.tokenizer()

    def uncached(self, tokens: IntArray, mask: IntArray) -> FloatArray:
        """One run of a whole history, [batch, time], that leaves nothing behind: the baseline. Logits as `forward` gives them."""
        return self.forward(tokens, mask, _NoCache())

    def forward(self, tokens: IntArray, mask: IntArray, cache: KVCache) -> FloatArray:
        """One step: append `tokens` [batch, new] to the cache and give logits [batch, n, vocabulary] of the last n of them.

        mask: [batch, cache.length + new], 0 where a row is padded on the left. n is what the graph gives: `new`, or 1.
        The tokens are appended but not committed: that's the caller's decision.
        """
        new = tokens.shape[1]
        graph = self._prefill if cache.length == 0 else self._decode
        positions = np.clip(np.cumsum(mask, axis=1)[:, -new:] - 1, 0, None)
        kept = cache.positions()
        if len(kept) != cache.length:
            if graph.binding.positions is None:
                raise self._positions_unknown(f"the cache has let go of {cache.length - len(kept)} tokens")
            mask = np.concatenate([mask[:, kept], mask[:, -new:]], axis=1)
        feeds = self._feeds(graph, tokens, mask, positions, len(kept), cache)
        outputs = graph.session.execute(feeds)
        if not graph.join.appends:
            self._take_present(graph, outputs, cache, new)
        logits: FloatArray = outputs[graph.binding.logits]
        return logits if logits.ndim == 3 else logits[:, None, :]

    def _positions_unknown(self, what: str) -> CacheError:
        """A graph without positions counts them by what is kept, so tokens that are let go would shift all that follow."""
        return CacheError(
            f"{what}, but {self.source.name} takes no positions: it counts them by what is kept, and would be wrong once tokens are gone; "
            "use a layout that keeps all tokens, or export the model with position_ids"
        )

    def _feeds(
        self, graph: _BoundGraph, tokens: IntArray, mask: IntArray, positions: IntArray, kept: int, cache: KVCache
    ) -> dict[str, Any]:
        binding, batch = graph.binding, tokens.shape[0]

        def integers(name: str, values: Any) -> Any:
            return np.ascontiguousarray(values, binding.dtypes[name])

        feeds = {binding.tokens: integers(binding.tokens, tokens)}
        if binding.mask is not None:
            feeds[binding.mask] = integers(binding.mask, mask)
        if binding.positions is not None:
            feeds[binding.positions] = integers(binding.positions, positions)
        for name in binding.extra:
            feeds[name] = integers(name, _extra_feed(name, tokens, kept))
        if graph.join.appends:
            feeds[CACHE_INPUT] = cache
            if graph.join.wants_past_shape:
                feeds[PAST_SHAPE_INPUT] = np.array([batch, self.binding.kv_heads, kept, self.binding.head_dim], np.int64)
            return feeds
        if binding.past:
            for layer, names in enumerate(binding.past):
                key, value = self._past(cache, layer, batch)
                if names.packed:
                    feeds[names.key] = np.stack([key, value])
                else:
                    feeds[names.key], feeds[names.value] = key, value
        return feeds

    def _past(self, cache: KVCache, layer: int, batch: int) -> tuple[Any, Any]:
        """All keys and values of a layer so far: what appending nothing gives."""
        binding = self.binding
        nothing = (
            np.empty((batch, binding.kv_heads, 0, binding.head_dim), binding.dtype),
            np.empty((batch, binding.kv_heads, 0, binding.value_head_dim), binding.dtype),
        )
        keys, values = cache.append(layer, *nothing)
        return np.asarray(keys), np.asarray(values)

    def _take_present(self, graph: _BoundGraph, outputs: Mapping[str, Any], cache: KVCache, new: int) -> None:
        for layer, names in enumerate(graph.binding.present):
            key, value = outputs[names.key] if names.packed else (outputs[names.key], outputs[names.value])
            # Copies, because a view would keep the whole present alive, history and all.
            dtype: DType = self.binding.dtype
            cache.append(layer, *(np.array(part[:, :, -new:], dtype) for part in (key, value)))

    def close(self) -> None:
        """Give the memory of all providers back."""
        for session in self.sessions.values():
            session.close()


def _extra_feed(name: str, tokens: IntArray, kept: int) -> Any:
    if name == "use_cache_branch":
        return [kept > 0]
    if name == "cache_position":
        return np.arange(kept, kept + tokens.shape[1])
    if name == "token_type_ids":
        return np.zeros_like(tokens)
    return 1  # num_logits_to_keep: the last position's


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
) -> Decoder:
    """The decoder that a name or a path stands for; arguments as for `Decoder`."""
    plugins = plugins or create_plugin_manager()
    return Decoder(find_source(model, plugins), providers=providers, options=options, weights=weights, plugins=plugins, bindings=bindings)
