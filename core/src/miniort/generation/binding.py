"""What a decoder's inputs and outputs mean: token ids, mask, positions, logits, and the past and present of each layer.

Exporters agree on no names, so meaning is read from names, types, shapes and, where names say nothing, from how data flows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from miniort.errors import BindingError
from miniort.model.constants import shape_of
from miniort.types import DType, Shape, dtype_from_onnx, format_shape, type_string

KEY_WORDS = frozenset({"key", "keys", "k"})
VALUE_WORDS = frozenset({"value", "values", "v"})
FIXED_FEEDS = ("use_cache_branch", "token_type_ids", "num_logits_to_keep", "logits_to_keep")
"""Inputs that are fed what any step needs: a cache is used, one segment, the last position's logits."""

ROLES = ("tokens", "mask", "positions", "logits")
"""What a user may name in an override."""


@dataclass(frozen=True)
class LayerNames:
    """Names of one layer's key and value. Where both are packed in one tensor [2, batch, kv heads, time, head dim] they're equal."""

    key: str
    value: str

    @property
    def packed(self) -> bool:
        """Whether one tensor holds both."""
        return self.key == self.value


@dataclass(frozen=True)
class GraphBinding:
    """One graph's inputs and outputs by meaning; what it doesn't have is None or empty.

    `past` and `present` are by layer. `extra` are inputs of FIXED_FEEDS and `cache_position`. Types are those of the cache and the ids.
    """

    tokens: str
    logits: str
    mask: str | None
    positions: str | None
    past: tuple[LayerNames, ...]
    present: tuple[LayerNames, ...]
    extra: tuple[str, ...]
    dtypes: Mapping[str, DType]


@dataclass(frozen=True)
class DecoderBinding:
    """How the graphs of a decoder are joined to tokens and to a cache.

    `prefill` is the graph for the prompt, None where one graph does both with an empty past. Sizes are those of one layer's cache.
    """

    prefill: GraphBinding | None
    decode: GraphBinding
    layers: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: DType


def bind_decoder(graphs: Sequence[ir.Graph], overrides: Mapping[str, str] | None = None) -> DecoderBinding:
    """The binding of a decoder of one graph with a past, or of two: prefill, then decode.

    overrides: names of inputs and outputs by role (`tokens`, `mask`, `positions`, `logits`), where they can't be told otherwise.
    BindingError that lists what was seen if something can't be told, or if the two graphs don't agree.
    """
    for role in overrides or {}:
        if role not in ROLES:
            raise BindingError(f"a binding has no role {role!r}; its roles: {', '.join(ROLES)}")
    bindings = [bind_graph(graph, overrides or {}) for graph in graphs]
    decode = bindings[-1]
    prefill = bindings[0] if len(bindings) > 1 else None
    if not decode.past:
        raise BindingError(
            f"the graph takes no past, so it can't generate with a cache; its inputs: {_list(graphs[-1].inputs)}. Export it with a cache"
        )
    if prefill is not None and len(prefill.present) != len(decode.past):
        raise BindingError(
            f"prefill and decode don't belong together: prefill gives a cache of {len(prefill.present)} layers, "
            f"decode takes one of {len(decode.past)}"
        )
    sizes = [_layer_sizes(graphs, bindings, layer) for layer in range(len(decode.past))]
    if len(set(sizes)) > 1:
        different = next(layer for layer, size in enumerate(sizes) if size != sizes[0])
        raise BindingError(
            f"layers have caches of different sizes: layer 0 {_sizes(sizes[0])}, layer {different} {_sizes(sizes[different])}"
        )
    kv_heads, head_dim, value_head_dim = sizes[0]
    dtypes = {binding.dtypes[name] for binding in bindings for layer in binding.past for name in (layer.key, layer.value)}
    if len(dtypes) > 1:
        raise BindingError(f"the cache has several element types: {', '.join(sorted(map(type_string, dtypes)))}")
    return DecoderBinding(prefill, decode, len(decode.past), kv_heads, head_dim, value_head_dim, dtypes.pop())


def bind_graph(graph: ir.Graph, overrides: Mapping[str, str]) -> GraphBinding:
    """What one graph's inputs and outputs mean. BindingError that lists the candidates where that can't be told."""
    past = {value.name or "": value for value in graph.inputs if _may_be_cache(value)}
    past_layers = _group_layers(list(past.values()), "past")
    others = [value for value in graph.inputs if (value.name or "") not in past]
    tokens = _choose("tokens", others, overrides, _is_tokens)
    left = [value for value in others if value is not tokens]
    mask = _choose_optional("mask", left, overrides, lambda value: "mask" in (value.name or "").lower())
    positions = _choose_optional("positions", left, overrides, lambda value: "position_id" in (value.name or "").lower())
    extra = [value for value in left if value is not mask and value is not positions and value.const_value is None]
    for value in extra:
        if value.name not in (*FIXED_FEEDS, "cache_position"):
            raise BindingError(
                f"input {_describe(value)} is unknown to a decoder; known beside the cache: tokens {_name(tokens)!r}, "
                f"mask {_name(mask)!r}, positions {_name(positions)!r}, {', '.join(FIXED_FEEDS)}, cache_position"
            )
    present = _present_layers(graph, past_layers)
    bound = {name for layer in present for name in (layer.key, layer.value)}
    logits = _choose("logits", [value for value in graph.outputs if value.name not in bound], overrides, _is_logits)
    if past_layers and len(present) != len(past_layers):
        raise BindingError(
            f"the graph takes a past of {len(past_layers)} layers but gives a present of {len(present)}; "
            f"its outputs: {_list(graph.outputs)}"
        )
    return GraphBinding(
        tokens=_name(tokens) or "",
        logits=_name(logits) or "",
        mask=_name(mask),
        positions=_name(positions),
        past=past_layers,
        present=present,
        extra=tuple(value.name or "" for value in extra),
        dtypes={
            value.name or "": dtype_from_onnx(int(value.dtype))
            for value in (*graph.inputs, *graph.outputs)
            if value.dtype is not None and int(value.dtype)
        },
    )


def _may_be_cache(value: ir.Value) -> bool:
    """A floating-point tensor of rank 4 (or 5, packed): nothing else that a decoder takes looks like it."""
    shape = shape_of(value)
    if value.dtype is None or not value.dtype.is_floating_point() or shape is None:
        return False
    return len(shape) == 4 or (len(shape) == 5 and shape[0] == 2)


def _words(name: str) -> list[str]:
    """`past_key_values.0.key` -> [past, key, values, 0, key]: runs of letters and runs of digits."""
    return re.findall(r"[a-z]+|\d+", name.lower())


def _kind(name: str) -> str | None:
    """`key` or `value` by the last such word of a name; `past_key_values` itself says neither."""
    words = _words(re.sub(r"past_?key_?values?", "past", name.lower()))
    for word in reversed(words):
        if word in KEY_WORDS:
            return "key"
        if word in VALUE_WORDS:
            return "value"
    return None


def _layer_numbers(names: Sequence[str]) -> list[int] | None:
    """The layer that each name speaks of, None if they don't say.

    `qwen2_5.layers.0.key` has three numbers: the layer is the one behind the word layer; else the last one that counts 0, 1, 2, … .
    """
    numbers = [[int(word) for word in _words(name) if word.isdigit()] for name in names]
    after_layer = [re.search(r"layers?[^a-z0-9]*(\d+)", name.lower()) for name in names]
    if names and all(after_layer):
        return [int(match.group(1)) for match in after_layer if match]
    if not numbers or len({len(each) for each in numbers}) != 1:
        return None
    for place in reversed(range(len(numbers[0]))):
        column = [each[place] for each in numbers]
        if sorted(column) == list(range(len(names))):
            return column
    return None


def _group_layers(values: Sequence[ir.Value], noun: str) -> tuple[LayerNames, ...]:
    """Cache tensors by layer, from their names. BindingError if these don't tell layer and kind."""
    if not values:
        return ()
    names = [value.name or "" for value in values]
    if all(len(shape_of(value) or ()) == 5 for value in values):
        layers = _layer_numbers(names)
        if layers is None:
            raise BindingError(f"the layers of the packed {noun} can't be told from the names: {', '.join(names)}")
        return tuple(LayerNames(name, name) for _, name in sorted(zip(layers, names, strict=True)))
    by_kind: dict[str, list[str]] = {"key": [], "value": []}
    for name in names:
        kind = _kind(name)
        if kind is None:
            raise BindingError(f"{noun} {name!r} is called neither key nor value; seen: {', '.join(names)}")
        by_kind[kind].append(name)
    keys, past_values = by_kind["key"], by_kind["value"]
    if len(keys) != len(past_values):
        raise BindingError(f"{noun} has {len(keys)} keys and {len(past_values)} values: {', '.join(names)}")
    key_layers, value_layers = _layer_numbers(keys), _layer_numbers(past_values)
    if key_layers is None or value_layers is None:
        raise BindingError(f"the layers of the {noun} can't be told from the names: {', '.join(names)}")
    key_of = dict(zip(key_layers, keys, strict=True))
    value_of = dict(zip(value_layers, past_values, strict=True))
    if sorted(key_of) != sorted(value_of) or sorted(key_of) != list(range(len(keys))):
        raise BindingError(f"the {noun} doesn't have a key and a value for each layer from 0: {', '.join(names)}")
    return tuple(LayerNames(key_of[layer], value_of[layer]) for layer in sorted(key_of))


def _present_layers(graph: ir.Graph, past: tuple[LayerNames, ...]) -> tuple[LayerNames, ...]:
    """The outputs that hold the cache: what each past flows into, else what their names say."""
    inputs = {value.name: value for value in graph.inputs}
    flowing = []
    for layer in past:
        key, value = (_flows_into(inputs[name]) for name in (layer.key, layer.value))
        if key is None or value is None:
            break
        flowing.append(LayerNames(key, value))
    if past and len(flowing) == len(past):
        return tuple(flowing)
    candidates = [value for value in graph.outputs if _may_be_cache(value)]
    try:
        return _group_layers(candidates, "present")
    except BindingError:
        names = [value.name or "" for value in candidates]
        if past and len(names) == (1 if past[0].packed else 2) * len(past):
            order = [value.name or "" for value in graph.inputs if _may_be_cache(value)]
            present_of = dict(zip(order, names, strict=True))
            return tuple(LayerNames(present_of[layer.key], present_of[layer.value]) for layer in past)
        raise


def _flows_into(past: ir.Value) -> str | None:
    """The output that a past is joined into: behind a `Concat`, or the present of an `Attention`; casts and identities don't matter."""
    found: set[str] = set()
    reached = [past]
    while reached:
        value = reached.pop()
        for node, index in value.uses():
            following: ir.Value | None = None
            if node.op_type == "Attention" and node.domain == "" and index in (4, 5) and len(node.outputs) > index - 3:
                following = node.outputs[index - 3]
            elif node.op_type in ("Cast", "Identity", "Concat"):
                following = node.outputs[0]
            if following is None:
                continue
            if following.is_graph_output():
                found.add(following.name or "")
            elif node.op_type != "Concat":
                reached.append(following)
            else:
                reached += [use.outputs[0] for use, _ in following.uses() if use.op_type in ("Cast", "Identity")]
                found.update(use.outputs[0].name or "" for use, _ in following.uses() if use.outputs[0].is_graph_output())
    return found.pop() if len(found) == 1 else None


def _is_tokens(value: ir.Value) -> bool:
    name = (value.name or "").lower()
    return _is_integer(value) and not any(word in name for word in ("mask", "position", "type", "len", "logits", "cache"))


def _is_logits(value: ir.Value) -> bool:
    return "logit" in (value.name or "").lower() or (
        value.dtype is not None and value.dtype.is_floating_point() and len(shape_of(value) or ()) in (2, 3)
    )


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_integer()


def _choose(role: str, values: Sequence[ir.Value], overrides: Mapping[str, str], fits: Callable[[ir.Value], bool]) -> ir.Value:
    chosen = _choose_optional(role, values, overrides, fits)
    if chosen is None:
        raise BindingError(
            f"no {'output' if role == 'logits' else 'input'} looks like the {role}; seen: {_list(values)}. Name it: --bind {role}=NAME"
        )
    return chosen


def _choose_optional(
    role: str, values: Sequence[ir.Value], overrides: Mapping[str, str], fits: Callable[[ir.Value], bool]
) -> ir.Value | None:
    if role in overrides:
        named = [value for value in values if value.name == overrides[role]]
        if not named:
            raise BindingError(f"{role} shall be {overrides[role]!r}, but there is no such name; seen: {_list(values)}")
        return named[0]
    candidates = [value for value in values if fits(value)]
    if len(candidates) > 1:
        exact = [value for value in candidates if value.name in ("input_ids", "attention_mask", "position_ids", "logits")]
        candidates = exact if len(exact) == 1 else candidates
    if len(candidates) > 1:
        raise BindingError(f"several could be the {role}: {_list(candidates)}. Name it: --bind {role}=NAME")
    return candidates[0] if candidates else None


def _layer_sizes(graphs: Sequence[ir.Graph], bindings: Sequence[GraphBinding], layer: int) -> tuple[int, int, int]:
    """(kv heads, head dim, value head dim) of a layer, from whatever tensor says it."""
    values = {(index, value.name): value for index, graph in enumerate(graphs) for value in (*graph.inputs, *graph.outputs)}
    sizes: list[int] = []
    for kind, axis in (("key", 1), ("key", 3), ("value", 3)):
        names = [
            (index, getattr(layers[layer], kind))
            for index, binding in enumerate(bindings)
            for layers in (binding.past, binding.present)
            if layer < len(layers)
        ]
        seen = {size for name in names if isinstance(size := _cache_shape(values[name])[axis], int)}
        if len(seen) > 1:
            raise BindingError(f"layer {layer}: graphs disagree about the size of axis {axis} of the {kind}: {sorted(seen)}")
        if not seen:
            listed = ", ".join(_describe(values[name]) for name in names)
            raise BindingError(f"layer {layer}: nothing says the size of axis {axis} of the {kind} (axis 1: kv heads): {listed}")
        sizes.append(seen.pop())
    return sizes[0], sizes[1], sizes[2]


def _cache_shape(value: ir.Value) -> Shape:
    shape = shape_of(value) or (None,) * 4
    return shape[1:] if len(shape) == 5 else shape


def _sizes(sizes: tuple[int, int, int]) -> str:
    return f"({sizes[0]} kv heads of {sizes[1]}/{sizes[2]})"


def _name(value: ir.Value | None) -> str | None:
    return None if value is None else value.name


def _describe(value: ir.Value) -> str:
    dtype = dtype_from_onnx(int(value.dtype)) if value.dtype is not None and int(value.dtype) else None
    return f"{value.name!r} {type_string(dtype)}{format_shape(shape_of(value))}"


def _list(values: Iterable[ir.Value]) -> str:
    return ", ".join(_describe(value) for value in values) or "none"
