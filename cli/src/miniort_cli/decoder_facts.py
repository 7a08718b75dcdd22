"""What a decoder's inputs and outputs were found to mean, and how its cache is joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miniort.errors import MiniortError

if TYPE_CHECKING:
    from miniort.generation import Decoder, GraphBinding
    from miniort.generation.cache_axes import Axes

AXES = ("batch", "kv heads", "time", "head dim")


@dataclass(frozen=True)
class RoleFacts:
    """What one input or output is: its role, in which of the decoder's graphs, and its name, type and shape there."""

    role: str
    graph: str
    name: str
    type: str
    shape: list[int | str | None] | None


@dataclass(frozen=True)
class DecoderFacts:
    """A decoder's binding. Sizes are of one layer's cache; `merged`: both graphs are branches of one
    file. `padding` is why a padded batch is refused, None where it isn't. `trouble` is why its graphs can't be run, None where they can.
    """

    roles: list[RoleFacts]
    merged: bool
    layers: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str
    vocabulary_size: int | None
    context_length: int | None
    end_tokens: list[int]
    tokenizer: bool
    cache_axes: dict[str, dict[str, list[str]]]
    cache_bytes_per_token: int
    joins: dict[str, str]
    appends: dict[str, bool]
    takes_several_tokens: bool | None
    padding: str | None
    trouble: str | None


def describe_decoder(decoder: Decoder) -> DecoderFacts:
    """The facts of a decoder that was opened; tries out what its graphs don't say."""
    binding, spec = decoder.binding, decoder.cache_spec(1)
    graphs = {"prefill": binding.prefill, "decode": binding.decode} if binding.prefill is not None else {"decoder": binding.decode}
    bound = {name: graph for name, graph in graphs.items() if graph is not None}
    several, padding, trouble = _tried_out(decoder)
    return DecoderFacts(
        roles=[role for name, graph in bound.items() for role in _roles(name, graph)],
        merged=binding.prefill is not None and len(decoder.source.graphs) == 1,
        layers=binding.layers,
        kv_heads=binding.kv_heads,
        head_dim=binding.head_dim,
        value_head_dim=binding.value_head_dim,
        dtype=str(binding.dtype),
        vocabulary_size=binding.vocabulary_size,
        context_length=decoder.context_length,
        end_tokens=sorted(decoder.source.end_tokens),
        tokenizer=decoder.source.tokenizer is not None,
        cache_axes={
            name: {"key": _axes(graph.axes.key, _packed(graph)), "value": _axes(graph.axes.value, _packed(graph))}
            for name, graph in bound.items()
        },
        cache_bytes_per_token=spec.bytes_per_token(),
        joins={name: join.reason for name, join in decoder.joins.items()},
        appends={name: join.appends for name, join in decoder.joins.items()},
        takes_several_tokens=several,
        padding=padding,
        trouble=trouble,
    )


def _tried_out(decoder: Decoder) -> tuple[bool | None, str | None, str | None]:
    """Whether a step may have several tokens, why rows can't be padded, and why neither can be told."""
    try:
        return decoder.takes_several_tokens, decoder.padding_obstacle, None
    except MiniortError as error:
        return None, None, str(error)


def _packed(graph: GraphBinding) -> bool:
    return any(layer.packed for layer in (*graph.past, *graph.present))


def _axes(axes: Axes, packed: bool) -> list[str]:
    """The cache's axes in the order in which the graph stores them."""
    stored = [AXES[axes.index(axis)] for axis in range(4)]
    return ["key and value", *stored] if packed else stored


def _roles(name: str, graph: GraphBinding) -> list[RoleFacts]:
    from miniort.types import type_string

    places = [("tokens", graph.tokens)]
    places += [(role, value) for role, value in (("mask", graph.mask), ("positions", graph.positions)) if value is not None]
    places += [(role, value) for value, role in graph.extra.items()]
    for noun, layers in (("past", graph.past), ("present", graph.present)):
        for layer, names in enumerate(layers):
            parts = [("", names.key)] if names.packed else [(".key", names.key), (".value", names.value)]
            places += [(f"{noun}.{layer}{kind}", value) for kind, value in parts]
    places.append(("logits", graph.logits))
    facts = []
    for role, value in places:
        dtype, shape = graph.dtypes.get(value), graph.shapes.get(value)
        facts.append(RoleFacts(role, name, value, type_string(dtype), None if shape is None else list(shape)))
    return facts
