"""Gemma 2 and Gemma 3 (text), by Google (2024, arXiv:2408.00118; 2025, arXiv:2503.19786).

    x = embed_tokens[token] · sqrt(E)
    x = x + norm(attention(norm(x)))            block, num_hidden_layers times
    x = x + norm(mlp(norm(x)))
    logits = norm(x) @ transpose(embed_tokens)

The parts are those of the Llama family, with norms behind them too. Weights of norms are stored less 1. Layers with a sliding window
alternate with others: in Gemma 3, these two kinds have rotary embeddings of their own, and queries and keys are normed; in Gemma 2,
scores and logits are capped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING, Any

from miniort.errors import ModelError
from miniort_models.graphs import llama, operators
from miniort_models.graphs.config_fields import integer, number, optional_number, require
from miniort_models.graphs.llama import LlamaConfig
from miniort_models.graphs.rotary import RotaryEmbedding, rotation

if TYPE_CHECKING:
    from miniort_models.graphs.decoder import DecoderGraph

NORM_OFFSET = 1


def gemma2(config: Mapping[str, Any]) -> LlamaConfig:
    """From a Gemma 2's `config.json`; every other layer has a window, the first one too."""
    every_other = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(integer(config, "num_hidden_layers"))]
    base = _gemma({"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, **config})
    return replace(base, windows=llama.windows_of(config, every_other, integer(config, "sliding_window", 4096)))


def gemma3(config: Mapping[str, Any]) -> LlamaConfig:
    """From the `config.json` of a Gemma 3 for text; five of six layers have a window."""
    require(config, {"use_bidirectional_attention": (False, None)})
    pattern = integer(config, "sliding_window_pattern", integer(config, "_sliding_window_pattern", 6))
    layers = range(integer(config, "num_hidden_layers"))
    most = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in layers]
    base = _gemma({"max_position_embeddings": 131072, **config})
    return replace(
        base,
        attention=replace(base.attention, norms=True, norm_offset=NORM_OFFSET),
        rotary=RotaryEmbedding.from_config(config, base.attention.head_dim, theta=1e6, layers="full_attention"),
        windows=llama.windows_of(config, most, integer(config, "sliding_window", 4096)),
    )


SEEING_DEFAULTS = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
"""What the `text_config` of a Gemma 3 that sees images leaves out."""


def _gemma(config: Mapping[str, Any]) -> LlamaConfig:
    """What both have in common; an entry that is absent means what it means in a Llama's, but for these."""
    meant = {"head_dim": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
    said = {**meant, **config, "mlp_bias": False}
    base = llama.llama({**said, "hidden_act": said["hidden_activation"], "rope_parameters": None, "rope_scaling": None})
    return replace(
        base,
        attention=replace(
            base.attention,
            scale=number(said, "query_pre_attn_scalar", 256) ** -0.5,
            cap=optional_number(said, "attn_logit_softcapping"),
        ),
        rotary=RotaryEmbedding.from_config(said, base.attention.head_dim),
    )


def build_gemma2(graph: DecoderGraph, config: Mapping[str, Any]) -> None:
    """Write a Gemma 2 into one of its graphs."""
    decoder = gemma2(config)
    turns = rotation(graph, decoder.rotary)
    cap = optional_number({"final_logit_softcapping": 30.0, **config}, "final_logit_softcapping")
    _build(graph, decoder, [turns] * len(decoder.windows), cap)


def build_gemma3(graph: DecoderGraph, config: Mapping[str, Any]) -> None:
    """Write a Gemma 3 into one of its graphs."""
    decoder = gemma3(config)
    near = RotaryEmbedding.from_config(
        {**config, "rope_scaling": None, "rope_theta": config.get("rope_local_base_freq")},
        decoder.attention.head_dim,
        layers="sliding_attention",
    )
    turns_near, turns_far = rotation(graph, near, "rotary.near"), rotation(graph, decoder.rotary)
    turns = [turns_far if window is None else turns_near for window in decoder.windows]
    _build(graph, decoder, turns, optional_number(config, "final_logit_softcapping"))


def build_seeing_gemma3(graph: DecoderGraph, config: Mapping[str, Any]) -> None:
    """Write the language model of a Gemma 3 that sees images; what it sees them with is left out."""
    graph.weights.leave_out("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json: text_config must be an object that describes the language model, found {text!r}")
    build_gemma3(graph, {**SEEING_DEFAULTS, **text, "model_type": "gemma3_text"})


def _build(graph: DecoderGraph, decoder: LlamaConfig, turns: list[tuple[str, str]], cap: float | None) -> None:
    """turns: of each layer. cap: of logits."""
    table = "model.embed_tokens.weight"
    token = graph.embedding(table, decoder.vocab_size, decoder.hidden_size, to="embedding")
    x = graph.add("Mul", token, graph.number(sqrt(decoder.hidden_size)), to="embedding.scaled")
    for layer in range(len(decoder.windows)):
        x = block(graph, decoder, layer, x, turns[layer])
    x = norm(graph, decoder, "model.norm", graph.last_position(x))
    graph.head(x, "lm_head.weight", decoder.vocab_size, decoder.hidden_size, tied_to=table if decoder.tied else None, cap=cap)


def block(graph: DecoderGraph, decoder: LlamaConfig, layer: int, x: str, turns: tuple[str, str]) -> str:
    """One layer: [B, S, E] -> [B, S, E]"""
    name = f"model.layers.{layer}"
    attended = llama.attention(graph, decoder, layer, f"{name}.self_attn", norm(graph, decoder, f"{name}.input_layernorm", x), turns)
    x = graph.add("Add", x, norm(graph, decoder, f"{name}.post_attention_layernorm", attended), to=f"{name}.self_attn.residual")
    thought = llama.mlp(graph, decoder, f"{name}.mlp", norm(graph, decoder, f"{name}.pre_feedforward_layernorm", x))
    return graph.add("Add", x, norm(graph, decoder, f"{name}.post_feedforward_layernorm", thought), to=f"{name}.mlp.residual")


def norm(graph: DecoderGraph, decoder: LlamaConfig, name: str, x: str) -> str:
    """RMS norm over each token, its weights stored less 1: [B, S, E] -> [B, S, E]"""
    scale = graph.vector(f"{name}.weight", decoder.hidden_size, NORM_OFFSET)
    return operators.rms_norm(graph, x, scale, decoder.epsilon, to=name)
