"""Rotary position embeddings: by which angles queries and keys are turned, and how those grow beyond the training length.

Element pair i of a head is turned by position · frequency[i], frequency[i] = theta^(-2i/R) for the R elements that are turned (Su et al.
2021, arXiv:2104.09864). The kinds of scaling are those of Hugging Face's `rope_scaling`, or `rope_parameters` since transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from miniort.errors import ModelError
from miniort.types import Array

if TYPE_CHECKING:
    from miniort_models.graphs.decoder import DecoderGraph


@dataclass(frozen=True)
class RotaryEmbedding:
    """How a head's elements are turned.

    rotated: R, how many elements of each head are turned, from the first on.
    theta: the base of the frequencies.
    scaling: the entries of `rope_scaling`; empty for none.
    context: the most tokens that the model can see (max_position_embeddings).
    trained_context: how many it was trained with, where that is less.
    """

    rotated: int
    theta: float
    context: int
    scaling: Mapping[str, Any] = field(default_factory=dict)
    trained_context: int | None = None

    @property
    def kind(self) -> str:
        """The kind of scaling, "default" for none."""
        kind = self.scaling.get("rope_type", self.scaling.get("type")) or "default"
        return {"su": "longrope"}.get(kind, kind)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], rotated: int, *, theta: float = 10000.0, layers: str | None = None) -> RotaryEmbedding:
        """Out of a parsed `config.json`. ModelError for a kind of scaling that the graphs don't compute.

        theta: what a config that doesn't say means. layers: the kind of layers, where the config tells several apart.
        """
        said = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if layers is not None and layers in said:
            said = said[layers] or {}
        if not isinstance(said, Mapping):
            raise ModelError(f"config.json: rope_scaling must be an object, found {said!r}")
        found = cls(
            rotated=rotated,
            theta=float(said.get("rope_theta") or config.get("rope_theta") or theta),
            context=int(config.get("max_position_embeddings", 2048)),
            scaling=said,
            trained_context=said.get("original_max_position_embeddings") or config.get("original_max_position_embeddings"),
        )
        if found.kind not in KINDS:
            raise ModelError(f"config.json asks for rotary embeddings of the kind {found.kind!r}; the graphs compute {', '.join(KINDS)}")
        needed = [name for name in NEEDED.get(found.kind, ()) if said.get(name) is None]
        if needed:
            raise ModelError(f"config.json: rotary embeddings of the kind {found.kind!r} need {', '.join(needed)}; rope_scaling has none")
        return found


KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Which entries a kind can't do without."""


# -------------------------------------------------------------------------------------------- frequencies


def exponents(rotated: int) -> Array:
    """2i / R for each pair of elements: [R/2] float32"""
    return np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)


def frequencies(rotary: RotaryEmbedding) -> Array:
    """Radians per token for each pair of elements, [R/2] float32; for the kinds whose frequencies don't depend on the text."""
    plain = 1 / np.float32(rotary.theta) ** exponents(rotary.rotated)
    match rotary.kind:
        case "linear":  # positions are squeezed
            return plain / np.float32(rotary.scaling["factor"])
        case "yarn":
            return _yarn(plain, rotary)
        case "llama3":
            return _llama3(plain, rotary)
    return plain


def _llama3(plain: Array, rotary: RotaryEmbedding) -> Array:
    """Slow pairs are slowed down by `factor`, fast ones are left alone, and between them it goes over smoothly (Llama 3.1)."""
    factor, low, high = (rotary.scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = rotary.scaling["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the training length
    kept = np.clip((turns - low) / (high - low), 0, 1)  # how much of the plain frequency
    mixed: Array = (1 - kept) * plain / factor + kept * plain
    return mixed.astype(np.float32)


def _yarn(plain: Array, rotary: RotaryEmbedding) -> Array:
    """As for Llama 3, but the way over is a ramp along the pairs (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""
    scaling, size = rotary.scaling, rotary.rotated
    trained = scaling.get("original_max_position_embeddings") or rotary.context

    def pair_with(turns: float) -> float:
        """The pair, not a whole number, that turns so often in the training length."""
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    first, last = pair_with(scaling.get("beta_fast") or 32), pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    slowed = np.clip((np.arange(size // 2) - first) / (max(last - first, 0.001)), 0, 1)
    mixed: Array = slowed * plain / scaling["factor"] + (1 - slowed) * plain
    return mixed.astype(np.float32)


def magnitude(rotary: RotaryEmbedding) -> float:
    """What cosines and sines are multiplied by: 1, or for yarn and longrope a bit more, since attention over more tokens is flatter."""
    scaling, said = rotary.scaling, rotary.scaling.get("attention_factor")
    if rotary.kind not in ("yarn", "longrope"):
        return 1.0
    if said is not None:
        return float(said)
    if rotary.kind == "yarn":
        factor, mscale, mscale_all = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all:
            return _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all)
        return _yarn_magnitude(factor, 1)
    trained = rotary.trained_context
    factor = rotary.context / trained if trained else scaling.get("factor") or 1
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained or rotary.context))


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


# -------------------------------------------------------------------------------------------- in the graph


def rotation(graph: DecoderGraph, rotary: RotaryEmbedding, name: str = "rotary") -> tuple[str, str]:
    """Cosines and sines of the angles of all tokens: 2 x [B, S, R/2]. `name` tells several apart.

    They're computed from `position_ids` in each run, once for all layers: that takes less time than looking them up in each layer, and a
    table for a long context takes more memory than a small model.
    """
    positions = graph.cast("position_ids", np.float32, to="rotary.positions")
    positions = graph.add("Unsqueeze", positions, graph.integers([-1]), to=f"{name}.positions.column")  # [B, S, 1]
    angles = graph.add("Mul", positions, _frequencies_in_graph(graph, rotary, name), to=f"{name}.angles")  # [B, S, R/2]
    return _scaled(graph, "Cos", angles, rotary, f"{name}.cosines"), _scaled(graph, "Sin", angles, rotary, f"{name}.sines")


def _scaled(graph: DecoderGraph, op: str, angles: str, rotary: RotaryEmbedding, to: str) -> str:
    factor = magnitude(rotary)
    if factor == 1:
        return graph.add(op, angles, to=to)
    return graph.add("Mul", graph.add(op, angles, to=f"{to}.plain"), graph.number(factor), to=to)


def _frequencies_in_graph(graph: DecoderGraph, rotary: RotaryEmbedding, name: str) -> str:
    """Frequencies [R/2]: a constant, or for kinds that depend on how long the text has become, the values for that length."""
    match rotary.kind:
        case "longrope":
            return _longrope_in_graph(graph, rotary, name)
        case "dynamic":
            return _dynamic_in_graph(graph, rotary, name)
    return graph.constant(f"{name}.frequencies", frequencies(rotary))


def _length(graph: DecoderGraph, name: str) -> str:
    """How long the longest text of the batch is by now, as a float32 scalar."""
    longest = graph.add("ReduceMax", "rotary.positions", to=f"{name}.last", keepdims=0)
    return graph.add("Add", longest, graph.number(1), to=f"{name}.length")


def _longrope_in_graph(graph: DecoderGraph, rotary: RotaryEmbedding, name: str) -> str:
    """Each pair is slowed down by a factor of its own; another set of factors once the text is longer than in training.

    (Ding et al. 2024, arXiv:2402.13753.) Keys that are cached by then stay turned as they were, as in transformers.
    """
    plain = np.float32(rotary.theta) ** exponents(rotary.rotated)
    sets = []
    for which in ("short_factor", "long_factor"):
        factors = np.array(rotary.scaling[which], np.float32)
        if factors.shape != plain.shape:
            raise ModelError(f"config.json: rope_scaling has {factors.size} numbers in {which}; {plain.size} pairs are turned")
        sets.append(graph.constant(f"{name}.frequencies.{which}", 1 / (factors * plain)))
    limit = graph.number(rotary.trained_context or rotary.context)
    longer = graph.add("Greater", _length(graph, name), limit, to=f"{name}.longer")
    return graph.add("Where", longer, sets[1], sets[0], to=f"{name}.frequencies")


def _dynamic_in_graph(graph: DecoderGraph, rotary: RotaryEmbedding, name: str) -> str:
    """theta grows with the text: theta · (factor · L / context - (factor - 1))^(R / (R - 2)), L the length, at least the context."""
    factor = float(rotary.scaling["factor"])
    length = graph.add("Max", _length(graph, name), graph.number(rotary.context), to=f"{name}.length.at_least_context")
    stretch = graph.add("Mul", length, graph.number(factor / rotary.context), to=f"{name}.stretch.whole")
    stretch = graph.add("Sub", stretch, graph.number(factor - 1), to=f"{name}.stretch")
    growth = graph.add("Pow", stretch, graph.number(rotary.rotated / (rotary.rotated - 2)), to=f"{name}.growth")
    theta = graph.add("Mul", growth, graph.number(rotary.theta), to=f"{name}.theta")
    return graph.add("Pow", theta, graph.constant(f"{name}.exponents", -exponents(rotary.rotated)), to=f"{name}.frequencies")
