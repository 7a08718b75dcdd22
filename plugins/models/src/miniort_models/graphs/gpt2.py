"""GPT-2: "Language Models are Unsupervised Multitask Learners" (Radford et al. 2019).

    x = wte[token] + wpe[position]              embedding
    x = x + attention(norm(x))                  block, n_layer times
    x = x + mlp(norm(x))
    logits = norm(x) @ transpose(wte)           head: the token embedding again ("tied")

The axes in the comments are those of `decoder.py`: E n_embd, H n_head, D = E / H.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miniort_models.graphs import operators
from miniort_models.graphs.config_fields import flag, integer, multiple, number, optional_integer, require

if TYPE_CHECKING:
    from miniort_models.graphs.decoder import DecoderGraph


@dataclass(frozen=True)
class GPT2Config:
    """A GPT-2's size; fields are named as in `config.json`."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None  # None: 4 * n_embd
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        multiple("n_embd", self.n_embd, "n_head", self.n_head)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> GPT2Config:
        """From a parsed `config.json`; a variant of GPT-2 that the graphs don't compute is a ModelError."""
        require(config, {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)})
        sizes = {name: integer(config, name, getattr(cls, name)) for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}
        return cls(
            **sizes,
            n_inner=optional_integer(config, "n_inner"),
            layer_norm_epsilon=number(config, "layer_norm_epsilon", cls.layer_norm_epsilon),
            activation_function=config.get("activation_function", cls.activation_function),
            tie_word_embeddings=flag(config, "tie_word_embeddings", cls.tie_word_embeddings),
        )

    @property
    def head_dim(self) -> int:
        """D"""
        return self.n_embd // self.n_head

    @property
    def inner(self) -> int:
        """The width of a block's hidden layer."""
        return self.n_inner or 4 * self.n_embd


def build(graph: DecoderGraph, config: Mapping[str, Any]) -> None:
    """Write a GPT-2 into one of its graphs."""
    gpt2 = GPT2Config.from_dict(config)
    table = "transformer.wte.weight"
    token = graph.embedding(table, gpt2.vocab_size, gpt2.n_embd, to="wte")
    position = graph.position_embedding("transformer.wpe.weight", gpt2.n_positions, gpt2.n_embd, to="wpe")
    x = graph.add("Add", token, position, to="embedding")
    for layer in range(gpt2.n_layer):
        x = block(graph, gpt2, layer, x)
    x = norm(graph, gpt2, "transformer.ln_f", graph.last_position(x))
    graph.head(x, "lm_head.weight", gpt2.vocab_size, gpt2.n_embd, tied_to=table if gpt2.tie_word_embeddings else None)


def block(graph: DecoderGraph, gpt2: GPT2Config, layer: int, x: str) -> str:
    """One layer: [B, S, E] -> [B, S, E]"""
    name = f"transformer.h.{layer}"
    attended = attention(graph, gpt2, layer, f"{name}.attn", norm(graph, gpt2, f"{name}.ln_1", x))
    x = graph.add("Add", x, attended, to=f"{name}.attn.residual")
    thought = mlp(graph, gpt2, f"{name}.mlp", norm(graph, gpt2, f"{name}.ln_2", x))
    return graph.add("Add", x, thought, to=f"{name}.mlp.residual")


def attention(graph: DecoderGraph, gpt2: GPT2Config, layer: int, name: str, x: str) -> str:
    """Each head mixes the values of the tokens that it sees: [B, S, E] -> [B, S, E]"""
    width, heads, head_dim = gpt2.n_embd, gpt2.n_head, gpt2.head_dim
    joined = graph.linear(x, f"{name}.c_attn", width, 3 * width, bias=True, axes="in out")
    parts = operators.split(graph, joined, [width] * 3, to=[f"{name}.{part}" for part in ("query", "key", "value")])
    names = (f"{layer}.query", *graph.names_of_new(layer))
    for part, to in zip(parts, names, strict=True):
        operators.heads_first(graph, operators.split_heads(graph, part, heads, head_dim, to=f"{part}.split"), to=to)  # [B, H, S, D]
    mixed = graph.attend(layer, names[0], heads=heads, kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5)
    return graph.linear(mixed, f"{name}.c_proj", width, width, bias=True, axes="in out")


def mlp(graph: DecoderGraph, gpt2: GPT2Config, name: str, x: str) -> str:
    """Each token by itself, through a wider layer: [B, S, E] -> [B, S, E]"""
    hidden = graph.linear(x, f"{name}.c_fc", gpt2.n_embd, gpt2.inner, bias=True, axes="in out")
    active = operators.activation(gpt2.activation_function)(graph, hidden, f"{name}.active")
    return graph.linear(active, f"{name}.c_proj", gpt2.inner, gpt2.n_embd, bias=True, axes="in out")


def norm(graph: DecoderGraph, gpt2: GPT2Config, name: str, x: str) -> str:
    """LayerNorm over each token: [B, S, E] -> [B, S, E]"""
    scale, bias = graph.vector(f"{name}.weight", gpt2.n_embd), graph.vector(f"{name}.bias", gpt2.n_embd)
    return operators.layer_norm(graph, x, scale, bias, gpt2.layer_norm_epsilon, to=name)
