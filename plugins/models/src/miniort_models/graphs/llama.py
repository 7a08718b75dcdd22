"""The Llama family: Llama (Touvron et al. 2023, arXiv:2302.13971), SmolLM, Mistral, Qwen2, Qwen3, Phi-3.

    x = embed_tokens[token]
    x = x + attention(norm(x))                  block, num_hidden_layers times
    x = x + mlp(norm(x))
    logits = norm(x) @ transpose(lm_head)       lm_head may be embed_tokens again ("tied")

with RMS norms, rotary embeddings, keys and values that several queries share, and a gated mlp. What tells the members of the family
apart: biases (Qwen2), norms of queries and keys (Qwen3), a sliding window (Mistral), projections that are stored as one (Phi-3).

The axes in the comments are those of `decoder.py`: E hidden_size, H num_attention_heads, Hkv num_key_value_heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from miniort.errors import ModelError
from miniort_models.graphs import operators
from miniort_models.graphs.config_fields import flag, integer, multiple, number, optional_integer
from miniort_models.graphs.rotary import RotaryEmbedding, rotation

if TYPE_CHECKING:
    from miniort_models.graphs.decoder import DecoderGraph


@dataclass(frozen=True)
class Attention:
    """What a layer's attention is like.

    rotated: R, how many elements of each head are turned.
    scale: what products of queries and keys are multiplied by.
    cap: see `operators.softcap`; None for none.
    query_names: the projections that give queries, keys and values; a single one gives all three.
    norms: whether each head's query and key go through an RMS norm; norm_offset is added to the weights of these.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    scale: float
    cap: float | None = None
    query_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    query_bias: bool = False
    output_bias: bool = False
    norms: bool = False
    norm_offset: float = 0


@dataclass(frozen=True)
class GatedMLP:
    """What a layer's mlp is like. gate_names: the projections that give the gate and what goes through it; a single one gives both."""

    inner: int
    activation: str
    gate_names: tuple[str, ...] = ("gate_proj", "up_proj")
    bias: bool = False


@dataclass(frozen=True)
class LlamaConfig:
    """A decoder of the family. windows: how many tokens each layer sees, its own among them; None for all."""

    vocab_size: int
    hidden_size: int
    epsilon: float
    tied: bool
    attention: Attention
    mlp: GatedMLP
    rotary: RotaryEmbedding
    windows: tuple[int | None, ...]


# ------------------------------------------------------------------------------------- members of the family


def llama(config: Mapping[str, Any]) -> LlamaConfig:
    """From a Llama's `config.json`. SmolLM is one."""
    heads, width = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    if config.get("head_dim") is None:
        multiple("hidden_size", width, "num_attention_heads", heads)
    head_dim = integer(config, "head_dim", width // heads)
    kv_heads = integer(config, "num_key_value_heads", heads)
    multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    bias = flag(config, "attention_bias", False)
    return LlamaConfig(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=width,
        epsilon=number(config, "rms_norm_eps", 1e-6),
        tied=flag(config, "tie_word_embeddings", False),
        attention=Attention(heads, kv_heads, head_dim, head_dim, scale=head_dim**-0.5, query_bias=bias, output_bias=bias),
        mlp=GatedMLP(integer(config, "intermediate_size"), config.get("hidden_act", "silu"), bias=flag(config, "mlp_bias", False)),
        rotary=RotaryEmbedding.from_config(config, head_dim),
        windows=(None,) * integer(config, "num_hidden_layers"),
    )


def mistral(config: Mapping[str, Any]) -> LlamaConfig:
    """From a Mistral's `config.json`: all layers have a sliding window, unless it's null."""
    base = llama({"num_key_value_heads": 8, **config, "attention_bias": False, "mlp_bias": False})
    window = optional_integer({"sliding_window": 4096, **config}, "sliding_window")
    return replace(base, windows=(window,) * len(base.windows))


def qwen2(config: Mapping[str, Any]) -> LlamaConfig:
    """From a Qwen2's `config.json` (Qwen2.5 is one): biases where queries, keys and values are made; upper layers may have a window."""
    base = llama({"num_key_value_heads": 32, "max_position_embeddings": 32768, **config, "attention_bias": False, "mlp_bias": False})
    return replace(base, attention=replace(base.attention, query_bias=True), windows=_qwen_windows(config, len(base.windows)))


def qwen3(config: Mapping[str, Any]) -> LlamaConfig:
    """From a Qwen3's `config.json`: norms of queries and keys; upper layers may have a window."""
    sizes = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}
    base = llama({**sizes, **config, "mlp_bias": False})
    return replace(base, attention=replace(base.attention, norms=True), windows=_qwen_windows(config, len(base.windows)))


def _qwen_windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    if not flag(config, "use_sliding_window", False):
        return (None,) * layers
    window, first = optional_integer({"sliding_window": 4096, **config}, "sliding_window"), config.get("max_window_layers", 28)
    kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return windows_of(config, kinds, window)


def phi3(config: Mapping[str, Any]) -> LlamaConfig:
    """From a Phi-3's `config.json` (Phi-3.5 and Phi-4-mini are of its kind): projections joined, part of each head turned, a window."""
    base = llama({"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **config, "attention_bias": False, "mlp_bias": False})
    rope = config.get("rope_parameters") or {}
    part = number(config, "partial_rotary_factor", number(rope, "partial_rotary_factor", 1.0))
    rotated = int(base.attention.head_dim * part)
    return replace(
        base,
        attention=replace(base.attention, rotated=rotated, query_names=("qkv_proj",)),
        mlp=replace(base.mlp, gate_names=("gate_up_proj",)),
        rotary=replace(base.rotary, rotated=rotated),
        windows=(optional_integer(config, "sliding_window"),) * len(base.windows),
    )


MEMBERS = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "phi3": phi3}
"""By the `model_type` of their `config.json`."""


def windows_of(config: Mapping[str, Any], kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """How many tokens each layer sees. kinds: of the layers, where the config doesn't say itself (`layer_types`)."""
    said = config.get("layer_types") or kinds
    known = ("full_attention", "sliding_attention")
    if not isinstance(said, Sequence) or len(said) != len(kinds) or any(kind not in known for kind in said):
        raise ModelError(f"config.json: layer_types must name one of {', '.join(known)} for each of {len(kinds)} layers, found {said!r}")
    return tuple(window if kind == "sliding_attention" else None for kind in said)


# ------------------------------------------------------------------------------------------------ the graph


def build(graph: DecoderGraph, config: Mapping[str, Any]) -> None:
    """Write a decoder of the family into one of its graphs."""
    decoder = MEMBERS[config["model_type"]](config)
    table = "model.embed_tokens.weight"
    x = graph.embedding(table, decoder.vocab_size, decoder.hidden_size, to="embedding")
    turns = rotation(graph, decoder.rotary)
    for layer in range(len(decoder.windows)):
        x = block(graph, decoder, layer, x, turns)
    x = norm(graph, decoder, "model.norm", graph.last_position(x))
    graph.head(x, "lm_head.weight", decoder.vocab_size, decoder.hidden_size, tied_to=table if decoder.tied else None)


def block(graph: DecoderGraph, decoder: LlamaConfig, layer: int, x: str, turns: tuple[str, str]) -> str:
    """One layer: [B, S, E] -> [B, S, E]"""
    name = f"model.layers.{layer}"
    attended = attention(graph, decoder, layer, f"{name}.self_attn", norm(graph, decoder, f"{name}.input_layernorm", x), turns)
    x = graph.add("Add", x, attended, to=f"{name}.self_attn.residual")
    thought = mlp(graph, decoder, f"{name}.mlp", norm(graph, decoder, f"{name}.post_attention_layernorm", x))
    return graph.add("Add", x, thought, to=f"{name}.mlp.residual")


def attention(graph: DecoderGraph, decoder: LlamaConfig, layer: int, name: str, x: str, turns: tuple[str, str]) -> str:
    """Each head mixes the values of the tokens that it sees: [B, S, E] -> [B, S, E]"""
    this, width = decoder.attention, decoder.hidden_size
    all_heads, all_kv_heads = this.heads * this.head_dim, this.kv_heads * this.head_dim
    projections = [f"{name}.{projection}" for projection in this.query_names]
    query, key, value = graph.linears(x, projections, width, [all_heads, all_kv_heads, all_kv_heads], bias=this.query_bias)

    new_key, new_value = graph.names_of_new(layer)
    turned_query = by_head(graph, decoder, query, this.heads, f"{name}.q_norm", turns, to=f"{layer}.query")
    by_head(graph, decoder, key, this.kv_heads, f"{name}.k_norm", turns, to=new_key)
    operators.heads_first(graph, operators.split_heads(graph, value, this.kv_heads, this.head_dim, to=f"{value}.split"), to=new_value)
    mixed = graph.attend(
        layer,
        turned_query,
        heads=this.heads,
        kv_heads=this.kv_heads,
        head_dim=this.head_dim,
        scale=this.scale,
        window=decoder.windows[layer],
        cap=this.cap,
    )
    return graph.linear(mixed, f"{name}.o_proj", all_heads, width, bias=this.output_bias)


def by_head(graph: DecoderGraph, decoder: LlamaConfig, x: str, heads: int, norm_name: str, turns: tuple[str, str], to: str) -> str:
    """Queries or keys, normed if that's wanted, and turned: [B, S, H · D] -> [B, H, S, D]"""
    this = decoder.attention
    split = operators.split_heads(graph, x, heads, this.head_dim, to=f"{x}.split")  # [B, S, H, D]
    if this.norms:
        scale = graph.vector(f"{norm_name}.weight", this.head_dim, this.norm_offset)
        split = operators.rms_norm(graph, split, scale, decoder.epsilon, to=norm_name)
    unturned = operators.heads_first(graph, split, to=f"{x}.unturned")
    return operators.rotary_embedding(graph, unturned, *turns, heads, this.head_dim, this.rotated, to=to)


def mlp(graph: DecoderGraph, decoder: LlamaConfig, name: str, x: str) -> str:
    """Each token by itself: down(active(gate(x)) · up(x)), [B, S, E] -> [B, S, E]"""
    this, width = decoder.mlp, decoder.hidden_size
    projections = [f"{name}.{projection}" for projection in this.gate_names]
    gate, up = graph.linears(x, projections, width, [this.inner, this.inner], bias=this.bias)
    active = operators.activation(this.activation)(graph, gate, f"{name}.active")
    gated = graph.add("Mul", active, up, to=f"{name}.gated")
    return graph.linear(gated, f"{name}.down_proj", this.inner, width, bias=this.bias)


def norm(graph: DecoderGraph, decoder: LlamaConfig, name: str, x: str) -> str:
    """RMS norm over each token: [B, S, E] -> [B, S, E]"""
    return operators.rms_norm(graph, x, graph.vector(f"{name}.weight", decoder.hidden_size), decoder.epsilon, to=name)
