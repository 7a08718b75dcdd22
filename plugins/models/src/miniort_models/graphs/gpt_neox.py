"""GPT-NeoX: "GPT-NeoX-20B" (Black et al. 2022, arXiv:2204.06745); Pythia is one too.

    x = embed_in[token]
    x = x + attention(norm(x)) + mlp(norm'(x))        block, with a parallel residual; else as in GPT-2
    logits = norm(x) @ transpose(embed_out)

Attention turns the first part of each head by rotary embeddings. The axes in the comments are those of `decoder.py`: E hidden_size,
H num_attention_heads, D = E / H.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from miniort.types import Array
from miniort_models.graphs import operators
from miniort_models.graphs.config_fields import flag, integer, multiple, number
from miniort_models.graphs.rotary import RotaryEmbedding, rotation

if TYPE_CHECKING:
    from miniort_models.graphs.decoder import DecoderGraph


@dataclass(frozen=True)
class GPTNeoXConfig:
    """A GPT-NeoX's size and variant; fields are named as in `config.json`, where they're there."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float
    hidden_act: str
    attention_bias: bool
    use_parallel_residual: bool
    tie_word_embeddings: bool
    rotary: RotaryEmbedding

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> GPTNeoXConfig:
        """From a parsed `config.json`; a variant that the graphs don't compute is a ModelError."""
        width, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        multiple("hidden_size", width, "num_attention_heads", heads)
        part = number(config, "rotary_pct", number(config.get("rope_parameters") or {}, "partial_rotary_factor", 0.25))
        return cls(
            vocab_size=integer(config, "vocab_size"),
            hidden_size=width,
            intermediate_size=integer(config, "intermediate_size"),
            num_hidden_layers=integer(config, "num_hidden_layers"),
            num_attention_heads=heads,
            layer_norm_eps=number(config, "layer_norm_eps", 1e-5),
            hidden_act=config.get("hidden_act", "gelu"),
            attention_bias=flag(config, "attention_bias", True),
            use_parallel_residual=flag(config, "use_parallel_residual", True),
            tie_word_embeddings=flag(config, "tie_word_embeddings", False),
            rotary=RotaryEmbedding.from_config(config, int(width // heads * part), theta=number(config, "rotary_emb_base", 10000.0)),
        )

    @property
    def head_dim(self) -> int:
        """D"""
        return self.hidden_size // self.num_attention_heads


def build(graph: DecoderGraph, config: Mapping[str, Any]) -> None:
    """Write a GPT-NeoX into one of its graphs."""
    neox = GPTNeoXConfig.from_dict(config)
    table = "gpt_neox.embed_in.weight"
    x = graph.embedding(table, neox.vocab_size, neox.hidden_size, to="embedding")
    turns = rotation(graph, neox.rotary)
    for layer in range(neox.num_hidden_layers):
        x = block(graph, neox, layer, x, turns)
    x = norm(graph, neox, "gpt_neox.final_layer_norm", graph.last_position(x))
    graph.head(x, "embed_out.weight", neox.vocab_size, neox.hidden_size, tied_to=table if neox.tie_word_embeddings else None)


def block(graph: DecoderGraph, neox: GPTNeoXConfig, layer: int, x: str, turns: tuple[str, str]) -> str:
    """One layer: [B, S, E] -> [B, S, E]"""
    name = f"gpt_neox.layers.{layer}"
    attended = attention(graph, neox, layer, f"{name}.attention", norm(graph, neox, f"{name}.input_layernorm", x), turns)
    after = graph.add("Add", x, attended, to=f"{name}.attention.residual")
    seen = x if neox.use_parallel_residual else after
    thought = mlp(graph, neox, f"{name}.mlp", norm(graph, neox, f"{name}.post_attention_layernorm", seen))
    return graph.add("Add", after, thought, to=f"{name}.mlp.residual")


def attention(graph: DecoderGraph, neox: GPTNeoXConfig, layer: int, name: str, x: str, turns: tuple[str, str]) -> str:
    """Each head mixes the values of the tokens that it sees: [B, S, E] -> [B, S, E]"""
    width, heads, head_dim = neox.hidden_size, neox.num_attention_heads, neox.head_dim
    joined = graph.linear(x, f"{name}.query_key_value", width, 3 * width, bias=neox.attention_bias, order=_query_key_value(heads, head_dim))
    parts = operators.split(graph, joined, [width] * 3, to=[f"{name}.{part}" for part in ("query", "key", "value")])
    new_key, new_value = graph.names_of_new(layer)
    query, key, value = (operators.split_heads(graph, part, heads, head_dim, to=f"{part}.split") for part in parts)  # [B, S, H, D]
    operators.heads_first(graph, value, to=new_value)
    for unturned, to in ((query, f"{layer}.query"), (key, new_key)):
        by_head = operators.heads_first(graph, unturned, to=f"{unturned}.unturned")  # [B, H, S, D]
        operators.rotary_embedding(graph, by_head, *turns, heads, head_dim, neox.rotary.rotated, to=to)
    mixed = graph.attend(layer, f"{layer}.query", heads=heads, kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5)
    return graph.linear(mixed, f"{name}.dense", width, width, bias=neox.attention_bias)


def _query_key_value(heads: int, head_dim: int) -> Array:
    """The order of rows that puts all queries first, then all keys, then all values: the source has all three of one head together."""
    return np.arange(3 * heads * head_dim).reshape(heads, 3, head_dim).transpose(1, 0, 2).reshape(-1)


def mlp(graph: DecoderGraph, neox: GPTNeoXConfig, name: str, x: str) -> str:
    """Each token by itself, through a wider layer: [B, S, E] -> [B, S, E]"""
    hidden = graph.linear(x, f"{name}.dense_h_to_4h", neox.hidden_size, neox.intermediate_size, bias=True)
    active = operators.activation(neox.hidden_act)(graph, hidden, f"{name}.active")
    return graph.linear(active, f"{name}.dense_4h_to_h", neox.intermediate_size, neox.hidden_size, bias=True)


def norm(graph: DecoderGraph, neox: GPTNeoXConfig, name: str, x: str) -> str:
    """LayerNorm over each token: [B, S, E] -> [B, S, E]"""
    scale, bias = graph.vector(f"{name}.weight", neox.hidden_size), graph.vector(f"{name}.bias", neox.hidden_size)
    return operators.layer_norm(graph, x, scale, bias, neox.layer_norm_eps, to=name)
