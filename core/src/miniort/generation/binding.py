"""What a decoder's inputs and outputs mean: token ids, mask, positions, logits, and the past and present of each layer.

Exporters agree on no names, so meaning is read from names, types, shapes and, where names say nothing, from how data flows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from miniort.errors import BindingError
from miniort.generation.cache_axes import CacheAxes, CacheTensor, find_axes, layer_sizes
from miniort.generation.cache_flow import flows_into, places_by_flow
from miniort.generation.cache_names import LayerNames, group_layers, is_cache_role, kind_of, named_places
from miniort.generation.vocabulary import vocabulary_size
from miniort.model.constants import shape_of
from miniort.types import DType, Shape, dtype_from_onnx, format_shape, type_string

FIXED_FEEDS = (
    "use_cache_branch",
    "cache_position",
    "token_type_ids",
    "num_logits_to_keep",
    "logits_to_keep",
    "seqlens_k",
    "total_sequence_length",
    "past_sequence_length",
)
"""Inputs that are fed what a step implies: whether there is a cache, the places of its tokens, one segment, how many logits, how long."""

ROLES = ("tokens", "mask", "positions", "logits", *FIXED_FEEDS)
"""What a user may name in an override, beside the places of the cache."""

ROLES_TEXT = f"{', '.join(ROLES)}, past.N.key, past.N.value, present.N.key, present.N.value (past.N, present.N where both are packed)"

_CONVENTIONAL = frozenset({"input_ids", "attention_mask", "position_ids", "logits"})


@dataclass(frozen=True)
class GraphBinding:
    """One graph's inputs and outputs by meaning; what it doesn't have is None or empty.

    `past` and `present` are by layer, and `axes` says how they're stored. `extra` are other inputs, by name, and what each is of
    FIXED_FEEDS. `dtypes` and `shapes` are those of all inputs and outputs.
    """

    tokens: str
    logits: str
    mask: str | None
    positions: str | None
    past: tuple[LayerNames, ...]
    present: tuple[LayerNames, ...]
    axes: CacheAxes
    extra: Mapping[str, str]
    dtypes: Mapping[str, DType]
    shapes: Mapping[str, Shape | None] = field(default_factory=dict)


@dataclass(frozen=True)
class DecoderBinding:
    """How the graphs of a decoder are joined to tokens and to a cache.

    `prefill` is the graph for the prompt, None where one graph does both with an empty past. Sizes are those of one layer's cache.
    `vocabulary_size` is how many token ids there are, None where the graphs don't say.
    """

    prefill: GraphBinding | None
    decode: GraphBinding
    layers: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: DType
    vocabulary_size: int | None = None


def bind_decoder(graphs: Sequence[ir.Graph], overrides: Mapping[str, str] | None = None) -> DecoderBinding:
    """The binding of a decoder of one graph with a past, or of two: prefill, then decode.

    overrides: names of inputs and outputs by role, where they can't be told otherwise: `tokens`, `mask`, `positions`, `logits`, one of
    FIXED_FEEDS, or a place in the cache such as `past.0.key`, `present.3.value`.
    BindingError that lists what was seen if something can't be told, or if the two graphs don't agree.
    """
    overrides = overrides or {}
    _check_overrides(graphs, overrides)
    bindings = [bind_graph(graph, overrides) for graph in graphs]
    decode = bindings[-1]
    prefill = bindings[0] if len(bindings) > 1 else None
    if not decode.past:
        raise _no_past(graphs[-1], decode)
    if prefill is not None and len(prefill.present) != len(decode.past):
        raise BindingError(
            f"prefill and decode don't belong together: prefill gives a cache of {len(prefill.present)} layers, "
            f"decode takes one of {len(decode.past)}"
        )
    sizes = [_sizes_of(graphs, bindings, layer) for layer in range(len(decode.past))]
    if len(set(sizes)) > 1:
        different = next(layer for layer, size in enumerate(sizes) if size != sizes[0])
        raise BindingError(
            f"layers have caches of different sizes: layer 0 {_sizes(sizes[0])}, layer {different} {_sizes(sizes[different])}"
        )
    kv_heads, head_dim, value_head_dim = sizes[0]
    return DecoderBinding(
        prefill, decode, len(decode.past), kv_heads, head_dim, value_head_dim, _cache_dtype(bindings), _vocabulary(graphs, bindings)
    )


def _check_overrides(graphs: Sequence[ir.Graph], overrides: Mapping[str, str]) -> None:
    known = {value.name for graph in graphs for value in (*graph.inputs, *graph.outputs)}
    for role, name in overrides.items():
        if role not in ROLES and not is_cache_role(role):
            raise BindingError(f"a binding has no role {role!r}; its roles: {ROLES_TEXT}")
        if name not in known:
            seen = _list(value for graph in graphs for value in (graph.outputs if role.startswith(("logits", "present")) else graph.inputs))
            raise BindingError(f"{role} shall be {name!r}, but there is no such name; seen: {seen}")


def _no_past(graph: ir.Graph, binding: GraphBinding) -> BindingError:
    seen = f"its inputs: {_list(graph.inputs)}"
    if binding.present:
        return BindingError(
            f"the graph takes no past, though it gives a cache of {len(binding.present)} layers, so it's the half that reads the prompt; "
            f"give the folder in which the graph for each step lies beside it; {seen}"
        )
    return BindingError(
        "the graph takes no past and gives no cache, so each step would have to compute the whole history again, which miniort doesn't do; "
        f"export it with a cache (use_cache=True; in optimum the task text-generation-with-past); {seen}"
    )


def _cache_dtype(bindings: Sequence[GraphBinding]) -> DType:
    """The element type of the cache, in which all graphs must agree."""
    seen = {
        binding.dtypes[name]: name
        for binding in bindings
        for layers in (binding.past, binding.present)
        for layer in layers
        for name in (layer.key, layer.value)
        if name in binding.dtypes
    }
    if len(seen) > 1:
        listed = ", ".join(sorted(f"{type_string(dtype)} ({name})" for dtype, name in seen.items()))
        raise BindingError(f"the cache has several element types: {listed}; export prefill and decode, keys and values alike")
    if not seen:
        raise BindingError("nothing says the element type of the cache: its inputs have none")
    return next(iter(seen))


def _vocabulary(graphs: Sequence[ir.Graph], bindings: Sequence[GraphBinding]) -> int | None:
    seen = {
        size for graph, binding in zip(graphs, bindings, strict=True) if (size := vocabulary_size(graph, binding.tokens, binding.logits))
    }
    if len(seen) > 1:
        raise BindingError(f"prefill and decode don't belong together: their vocabularies have {' and '.join(map(str, sorted(seen)))} ids")
    return seen.pop() if seen else None


def bind_graph(graph: ir.Graph, overrides: Mapping[str, str]) -> GraphBinding:
    """What one graph's inputs and outputs mean. BindingError that lists the candidates where that can't be told."""
    inputs = {value.name or "": value for value in graph.inputs if value.const_value is None}  # others have a default, or are weights
    outputs = {value.name or "": value for value in graph.outputs}
    here = {role: name for role, name in overrides.items() if name in inputs or name in outputs}
    named = {name for role, name in here.items() if not is_cache_role(role)}
    past_given, present_given = named_places(here, "past"), named_places(here, "present")
    past = _cache_names([value for name, value in inputs.items() if name not in named], past_given)
    others = [value for name, value in inputs.items() if name not in past]
    tokens = _choose("tokens", others, here, _is_tokens, inputs.values())
    past_layers = _past_layers([inputs[name] for name in past], past_given)
    mask = _choose_optional("mask", [value for value in others if value is not tokens], here, _is_mask)
    positions = _choose_optional("positions", [value for value in others if value is not tokens and value is not mask], here, _is_positions)
    extra = _extra(others, [tokens, mask, positions], here)
    present = _present_layers(inputs, list(outputs.values()), past_layers, named, present_given)
    bound = {name for layer in present for name in (layer.key, layer.value)}
    logits = _choose("logits", [value for name, value in outputs.items() if name not in bound], here, _is_logits, outputs.values())
    if past_layers and len(present) != len(past_layers):
        raise BindingError(
            f"the graph takes a past of {len(past_layers)} layers but gives a present of {len(present)}; "
            f"its outputs: {_list(outputs.values())}"
        )
    _check_ranks(tokens, logits)
    every = {**inputs, **outputs}
    return GraphBinding(
        tokens=tokens.name or "",
        logits=logits.name or "",
        mask=None if mask is None else mask.name,
        positions=None if positions is None else positions.name,
        past=past_layers,
        present=present,
        axes=_axes(inputs, outputs, past_layers, present, tokens),
        extra=extra,
        dtypes={name: dtype_from_onnx(int(value.dtype)) for name, value in every.items() if value.dtype is not None and int(value.dtype)},
        shapes={name: shape_of(value) for name, value in every.items()},
    )


def _past_layers(values: Sequence[ir.Value], given: Mapping[str, tuple[int, str | None]]) -> tuple[LayerNames, ...]:
    """The inputs that hold the cache: what the user named, else what their names say, else what they're used for."""
    try:
        return _layers(values, "past", given)
    except BindingError:
        places = None if given else places_by_flow(values)
        if places is None:
            raise
        return _layers(values, "past", places)


def _layers(values: Sequence[ir.Value], noun: str, given: Mapping[str, tuple[int, str | None]]) -> tuple[LayerNames, ...]:
    packed = bool(values) and all(len(shape_of(value) or ()) == 5 for value in values)
    return group_layers([value.name or "" for value in values], packed, noun, given)


def _extra(others: Sequence[ir.Value], bound: Sequence[ir.Value | None], overrides: Mapping[str, str]) -> dict[str, str]:
    """Inputs beside tokens, mask, positions and cache, and what each is of FIXED_FEEDS. BindingError for one that isn't known."""
    roles = {name: role for role, name in overrides.items() if role in FIXED_FEEDS}
    extra: dict[str, str] = {}
    for value in others:
        name = value.name or ""
        if any(value is each for each in bound):
            continue
        role = roles.get(name, name)
        if role not in FIXED_FEEDS:
            known = ", ".join(
                f"{role} {each.name!r}" for role, each in zip(("tokens", "mask", "positions"), bound, strict=True) if each is not None
            )
            raise BindingError(
                f"input {_describe(value)} is unknown to a decoder; bound beside the cache: {known}. Say what it is: --bind ROLE={name}, "
                f"ROLE one of {', '.join(ROLES)}"
            )
        extra[name] = role
    return extra


def _cache_names(values: Sequence[ir.Value], given: Mapping[str, object]) -> list[str]:
    """Names of what the user gave as cache, or what looks like one: where some are called keys and values, with a number, those alone."""
    names = [value.name or "" for value in values if value.name in given or _may_be_cache(value)]
    called = [name for name in names if name in given or (kind_of(name) is not None and any(map(str.isdigit, name)))]
    return called or names


def _may_be_cache(value: ir.Value) -> bool:
    """A floating-point tensor of rank 4 (or 5, packed), or of unknown rank and called a key or a value: nothing else looks like it."""
    shape = shape_of(value)
    if value.dtype is None or not value.dtype.is_floating_point():
        return False
    if _is_mask(value):
        return False
    if shape is None:
        return kind_of(value.name or "") is not None
    return len(shape) == 4 or (len(shape) == 5 and shape[0] == 2)


def _present_layers(
    inputs: Mapping[str, ir.Value],
    outputs: Sequence[ir.Value],
    past: tuple[LayerNames, ...],
    named: set[str],
    given: Mapping[str, tuple[int, str | None]],
) -> tuple[LayerNames, ...]:
    """The outputs that hold the cache: what the user named, else what each past flows into, else what their names say, else their order."""
    cache = _cache_names([value for value in outputs if value.name not in named], given)
    candidates = [value for value in outputs if value.name in cache]
    if past and not given:
        flowing = [[flows_into(inputs[name]) for name in (layer.key, layer.value)] for layer in past]
        if all(key is not None and value is not None for key, value in flowing):
            return tuple(LayerNames(key or "", value or "") for key, value in flowing)
    try:
        return _layers(candidates, "present", given)
    except BindingError:
        names = [value.name or "" for value in candidates]
        if past and not given and len(names) == (1 if past[0].packed else 2) * len(past):
            order = [name for name in inputs if any(name in (layer.key, layer.value) for layer in past)]
            present_of = dict(zip(order, names, strict=True))
            return tuple(LayerNames(present_of[layer.key], present_of[layer.value]) for layer in past)
        raise


def _axes(
    inputs: Mapping[str, ir.Value],
    outputs: Mapping[str, ir.Value],
    past: tuple[LayerNames, ...],
    present: tuple[LayerNames, ...],
    tokens: ir.Value,
) -> CacheAxes:
    """The axes of layer 0's key and value: no exporter stores layers in different ways."""
    if not past and not present:
        return CacheAxes()
    old, new = (past or (None,))[0], (present or (None,))[0]
    key, value = (
        find_axes(
            None if old is None else inputs[getattr(old, kind)],
            None if new is None else outputs[getattr(new, kind)],
            tokens,
        )
        for kind in ("key", "value")
    )
    return CacheAxes(key, value)


def _is_tokens(value: ir.Value) -> bool:
    name = (value.name or "").lower()
    return _is_integer(value) and not any(word in name for word in ("mask", "pos", "type", "len", "logits", "cache"))


def _is_mask(value: ir.Value) -> bool:
    return "mask" in (value.name or "").lower()


def _is_positions(value: ir.Value) -> bool:
    name = (value.name or "").lower()
    return _is_integer(value) and "cache" not in name and ("position" in name or name.startswith("pos_"))


def _is_logits(value: ir.Value) -> bool:
    return "logit" in (value.name or "").lower() or (
        value.dtype is not None and value.dtype.is_floating_point() and len(shape_of(value) or ()) in (2, 3)
    )


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_integer()


def _choose(
    role: str,
    values: Sequence[ir.Value],
    overrides: Mapping[str, str],
    fits: Callable[[ir.Value], bool],
    seen: Iterable[ir.Value],
) -> ir.Value:
    chosen = _choose_optional(role, values, overrides, fits)
    if chosen is not None:
        return chosen
    embeddings = [value for value in values if "embed" in (value.name or "").lower()]
    if role == "tokens" and embeddings:
        raise BindingError(f"the graph takes embeddings, {_list(embeddings)}, and no token ids; export it with input_ids")
    raise BindingError(
        f"no {'output' if role == 'logits' else 'input'} looks like the {role}; seen: {_list(seen)}. Name it: --bind {role}=NAME"
    )


def _choose_optional(
    role: str, values: Sequence[ir.Value], overrides: Mapping[str, str], fits: Callable[[ir.Value], bool]
) -> ir.Value | None:
    if role in overrides:
        named = [value for value in values if value.name == overrides[role]]
        if not named:
            raise BindingError(f"{role} shall be {overrides[role]!r}, but that can't be it; seen: {_list(values)}")
        return named[0]
    taken = {name for other, name in overrides.items() if other != role}
    candidates = [value for value in values if fits(value) and value.name not in taken and (value.name not in FIXED_FEEDS)]
    if len(candidates) > 1:
        exact = [value for value in candidates if value.name in _CONVENTIONAL]
        candidates = exact if len(exact) == 1 else candidates
    if len(candidates) > 1:
        raise BindingError(f"several could be the {role}: {_list(candidates)}. Name it: --bind {role}=NAME")
    return candidates[0] if candidates else None


def _check_ranks(tokens: ir.Value, logits: ir.Value) -> None:
    for value, ranks, wanted in ((tokens, (2,), "[batch, time]"), (logits, (2, 3), "[batch, time, vocabulary] or [batch, vocabulary]")):
        shape = shape_of(value)
        if shape is not None and len(shape) not in ranks:
            raise BindingError(f"{_describe(value)} must be of the shape {wanted}; export the model with a batch axis")


def _sizes_of(graphs: Sequence[ir.Graph], bindings: Sequence[GraphBinding], layer: int) -> tuple[int, int, int]:
    """(kv heads, head dim, value head dim) of a layer."""
    tensors: list[CacheTensor] = []
    for graph, binding in zip(graphs, bindings, strict=True):
        values = {value.name: value for value in (*graph.inputs, *graph.outputs)}
        for layers in (binding.past, binding.present):
            if layer < len(layers):
                names = layers[layer]
                tensors.append(CacheTensor(graph, values[names.key], binding.axes.key, False))
                tensors.append(CacheTensor(graph, values[names.value], binding.axes.value, True))
    for each in tensors:
        if not each.tensor.is_graph_output() and (length := each.size(2)) is not None:
            raise BindingError(
                f"layer {layer}: {_describe(each.tensor)} has room for {length} tokens and no more or less; "
                "export it with a dynamic time axis"
            )
    return layer_sizes(tensors, layer)


def _sizes(sizes: tuple[int, int, int]) -> str:
    return f"({sizes[0]} kv heads of {sizes[1]}/{sizes[2]})"


def _describe(value: ir.Value) -> str:
    dtype = dtype_from_onnx(int(value.dtype)) if value.dtype is not None and int(value.dtype) else None
    return f"{value.name!r} {type_string(dtype)}{format_shape(shape_of(value))}"


def _list(values: Iterable[ir.Value]) -> str:
    return ", ".join(_describe(value) for value in values) or "none"
