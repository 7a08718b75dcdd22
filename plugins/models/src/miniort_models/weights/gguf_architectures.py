"""What llama.cpp's converter did to a decoder's names, configuration and weights, told backwards, for each architecture.

Source: `convert_hf_to_gguf.py` and `gguf-py/gguf/tensor_mapping.py` of llama.cpp. The axes in the comments are

    H attention heads   D head size      E hidden size
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from miniort.errors import ModelError
from miniort.types import IntArray
from miniort_models.weights.gguf_header import GgufHeader

Config = dict[str, Any]


@dataclass(frozen=True)
class GgufArchitecture:
    """How one architecture is told in a GGUF file.

    names: weights by Hugging Face's names, with `{}` for the layer's number, to ggml's names; without `.weight` and `.bias`.
    config: puts the metadata into the words of `config.json`.
    rows: `rows(name, config)` says for each row of a weight which row of the file's tensor it is; None where rows are in order.
    shifted: what the converter added to a weight of that name.
    transposed: ends of names of weights that Hugging Face stores as [in, out]; ggml stores all as [out, in].
    """

    names: Mapping[str, str]
    config: Callable[[GgufHeader], Config]
    rows: Callable[[str, Config], IntArray | None] = lambda name, config: None
    shifted: Callable[[str], float] = lambda name: 0.0
    transposed: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------ names

_LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
}
_HEAD_NORM_NAMES = {
    "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
}
_GEMMA_NAMES = {
    **_LLAMA_NAMES,
    "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
    "model.layers.{}.pre_feedforward_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
}
_PHI3_NAMES = {
    **{name: said for name, said in _LLAMA_NAMES.items() if not name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))},
    "model.layers.{}.self_attn.qkv_proj": "blk.{}.attn_qkv",
    "model.layers.{}.mlp.gate_up_proj": "blk.{}.ffn_up",
}
_GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.h.{}.ln_1": "blk.{}.attn_norm",
    "transformer.h.{}.attn.c_attn": "blk.{}.attn_qkv",
    "transformer.h.{}.attn.c_proj": "blk.{}.attn_output",
    "transformer.h.{}.ln_2": "blk.{}.ffn_norm",
    "transformer.h.{}.mlp.c_fc": "blk.{}.ffn_up",
    "transformer.h.{}.mlp.c_proj": "blk.{}.ffn_down",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
_GPT_NEOX_NAMES = {
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "gpt_neox.layers.{}.attention.query_key_value": "blk.{}.attn_qkv",
    "gpt_neox.layers.{}.attention.dense": "blk.{}.attn_output",
    "gpt_neox.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "gpt_neox.layers.{}.mlp.dense_h_to_4h": "blk.{}.ffn_up",
    "gpt_neox.layers.{}.mlp.dense_4h_to_h": "blk.{}.ffn_down",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
}

CONFIGURING = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that are a part of the configuration."""


# ---------------------------------------------------------------------------------------------- configuration


def _required(header: GgufHeader, key: str) -> int:
    """A whole number under `ARCHITECTURE.key`."""
    full = f"{header.architecture}.{key}"
    value = header.integer(full)
    if value is None:
        found = "it's missing" if full not in header.metadata else f"found {str(header.metadata[full])[:60]}"
        raise ModelError(f"{header.path}: the metadata must say a whole number as {full}; {found}")
    return value


def _integer(header: GgufHeader, key: str) -> int | None:
    return header.integer(f"{header.architecture}.{key}")


def _number(header: GgufHeader, key: str) -> float | None:
    """A number under `ARCHITECTURE.key`; stored as float32, it's the shortest decimal number that rounds to it."""
    value = header.number(f"{header.architecture}.{key}")
    return None if value is None else float(str(np.float32(value)))


def _table(header: GgufHeader, name: str) -> list[float] | None:
    """A small float32 tensor as numbers."""
    tensor = header.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type != 0:
        raise ModelError(f"{header.path}: {name} must be float32, found ggml's type {tensor.type}")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        values: list[float] = np.frombuffer(file.read(4 * tensor.size), "<f4").tolist()
    return values


def _common(header: GgufHeader) -> Config:
    """What is the same for all: the vocabulary, special tokens and whether the head is the embedding again."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{header.path} has no token_embd.weight: the embedding of its tokens is missing; get a complete file")
    config: Config = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for word in ("bos", "eos", "padding"):
        token = header.integer(f"tokenizer.ggml.{word}_token_id")
        if token is not None:
            config[f"{word if word != 'padding' else 'pad'}_token_id"] = token
    return config


def _sizes(header: GgufHeader) -> Config:
    """What Llama and all that came after it call by the same words."""
    heads, hidden = _required(header, "attention.head_count"), _required(header, "embedding_length")
    return {
        **_common(header),
        "hidden_size": hidden,
        "intermediate_size": _required(header, "feed_forward_length"),
        "num_hidden_layers": _required(header, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(header, "attention.head_count_kv") or heads,
        "head_dim": _integer(header, "attention.key_length") or hidden // heads,
        "rms_norm_eps": _number(header, "attention.layer_norm_rms_epsilon") or 1e-6,
        "max_position_embeddings": _required(header, "context_length"),
        "rope_theta": _number(header, "rope.freq_base") or 10000.0,
        "rope_scaling": _rope_scaling(header),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "hidden_act": "silu",
    }


def _rope_scaling(header: GgufHeader) -> Config | None:
    kind = header.string(f"{header.architecture}.rope.scaling.type")
    factor = _number(header, "rope.scaling.factor")
    original = _integer(header, "rope.scaling.original_context_length")
    factors = _table(header, "rope_freqs.weight")
    if factors is not None:
        return _llama3_scaling(header, factors)
    if kind in (None, "none", "longrope"):
        return None
    if factor is None:
        raise ModelError(f"{header.path}: rope.scaling.type is {kind!r}, but there is no rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original is not None:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"{header.path}: rope.scaling.type {kind!r} isn't known; known are none, linear, yarn and longrope")


_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""What all published Llama 3 models have; the file holds only what follows from it."""


def _llama3_scaling(header: GgufHeader, factors: list[float]) -> Config:
    """Llama 3's scaling, whose file has a factor for each frequency: 1 for high ones, `factor` for low ones, and between them a mix.

    The parameters are told from the table, and must give it again.
    """
    base, size = _number(header, "rope.freq_base") or 10000.0, 2 * len(factors)
    factor = max(factors)
    expected = []
    for place in range(len(factors)):
        wavelength = 2 * math.pi * base ** (2 * place / size)
        if wavelength < _LLAMA3_CONTEXT / _LLAMA3_HIGH:
            expected.append(1.0)
        elif wavelength > _LLAMA3_CONTEXT / _LLAMA3_LOW:
            expected.append(factor)
        else:
            smooth = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
            expected.append(1 / ((1 - smooth) / factor + smooth))
    if not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{header.path}: rope_freqs.weight isn't what Llama 3's scaling gives, and no other use of it is known")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama(header: GgufHeader) -> Config:
    window = _integer(header, "attention.sliding_window")
    if window:
        return {**_sizes(header), "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {**_sizes(header), "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def _qwen2(header: GgufHeader) -> Config:
    config = {**_sizes(header), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
    del config["attention_bias"]  # queries, keys and values always have one
    return config


def _qwen3(header: GgufHeader) -> Config:
    return {**_sizes(header), "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}


def _gemma(header: GgufHeader, largest: int, period: int) -> Config:
    """largest: layers of the one size whose queries are scaled by E / H and not by D. period: each so-and-so-many-th layer sees all."""
    sizes = _sizes(header)
    layers = sizes["num_hidden_layers"]
    del sizes["hidden_act"], sizes["mlp_bias"]
    scalar = sizes["hidden_size"] // sizes["num_attention_heads"] if layers == largest else sizes["head_dim"]
    return {
        **sizes,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": _number(header, "attn_logit_softcapping"),
        "final_logit_softcapping": _number(header, "final_logit_softcapping"),
        "sliding_window": _required(header, "attention.sliding_window"),
        "layer_types": ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)],
    }


def _gemma2(header: GgufHeader) -> Config:
    return {**_gemma(header, largest=46, period=2), "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}


def _gemma3(header: GgufHeader) -> Config:
    said = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": _number(header, "rope.freq_base") or 1000000.0,
        "rope_local_base_freq": _number(header, "rope.freq_base_swa") or 10000.0,
    }
    period = _integer(header, "attention.sliding_window_pattern") or 6
    return {**_gemma(header, largest=62, period=period), **said}


def _phi3(header: GgufHeader) -> Config:
    sizes = _sizes(header)
    long, short = _table(header, "rope_factors_long.weight"), _table(header, "rope_factors_short.weight")
    scaling = None
    if long is not None and short is not None:
        scaling = {"rope_type": "longrope", "type": "longrope", "long_factor": long, "short_factor": short}
    return {
        **sizes,
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "rope_scaling": scaling,
        "original_max_position_embeddings": _integer(header, "rope.scaling.original_context_length") or sizes["max_position_embeddings"],
        "partial_rotary_factor": (_integer(header, "rope.dimension_count") or sizes["head_dim"]) / sizes["head_dim"],
        "sliding_window": _integer(header, "attention.sliding_window") or None,
    }


def _gpt2(header: GgufHeader) -> Config:
    return {
        **_common(header),
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": _required(header, "embedding_length"),
        "n_layer": _required(header, "block_count"),
        "n_head": _required(header, "attention.head_count"),
        "n_inner": _required(header, "feed_forward_length"),
        "n_positions": _required(header, "context_length"),
        "layer_norm_epsilon": _number(header, "attention.layer_norm_epsilon") or 1e-5,
        "activation_function": "gelu_new",
    }


def _gpt_neox(header: GgufHeader) -> Config:
    heads, hidden = _required(header, "attention.head_count"), _required(header, "embedding_length")
    return {
        **_common(header),
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": _required(header, "feed_forward_length"),
        "num_hidden_layers": _required(header, "block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": _required(header, "context_length"),
        "layer_norm_eps": _number(header, "attention.layer_norm_epsilon") or 1e-5,
        "rotary_pct": (_integer(header, "rope.dimension_count") or hidden // heads) / (hidden // heads),
        "rotary_emb_base": _number(header, "rope.freq_base") or 10000.0,
        "use_parallel_residual": header.metadata.get("gptneox.use_parallel_residual", True),
        "attention_bias": True,
        "hidden_act": "gelu",
    }


# ------------------------------------------------------------------------------------------------ rows, shifts


def _llama_rows(name: str, config: Config) -> IntArray | None:
    """llama.cpp rotates neighbours, Hugging Face the two halves of a head: rows [H, 2, D/2] were stored as [H, D/2, 2]."""
    part = name.rsplit(".", 2)[-2]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(part)
    if heads is None:
        return None
    stored = np.arange(heads * config["head_dim"]).reshape(heads, config["head_dim"] // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)


def _gpt_neox_rows(name: str, config: Config) -> IntArray | None:
    """Hugging Face has query, key and value of each head together, [H, 3, D]; they were stored as [3, H, D]."""
    if not name.rsplit(".", 1)[0].endswith("query_key_value"):
        return None
    heads = config["num_attention_heads"]
    stored = np.arange(3 * config["hidden_size"]).reshape(3, heads, -1)
    return stored.swapaxes(0, 1).reshape(-1)


def _gemma_shift(name: str) -> float:
    """Gemma scales by 1 + weight; what was stored is that sum."""
    return 1.0 if name.endswith("norm.weight") else 0.0


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(_LLAMA_NAMES, _llama, rows=_llama_rows),
    "qwen2": GgufArchitecture(_LLAMA_NAMES, _qwen2),
    "qwen3": GgufArchitecture({**_LLAMA_NAMES, **_HEAD_NORM_NAMES}, _qwen3),
    "gemma2": GgufArchitecture(_GEMMA_NAMES, _gemma2, shifted=_gemma_shift),
    "gemma3": GgufArchitecture({**_GEMMA_NAMES, **_HEAD_NORM_NAMES}, _gemma3, shifted=_gemma_shift),
    "phi3": GgufArchitecture(_PHI3_NAMES, _phi3),
    "gpt2": GgufArchitecture(_GPT2_NAMES, _gpt2, transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight")),
    "gptneox": GgufArchitecture(_GPT_NEOX_NAMES, _gpt_neox, rows=_gpt_neox_rows),
}
"""By the name under `general.architecture`. Mistral and SmolLM call themselves llama."""
