"""Weights in GGUF files: what llama.cpp's converter does is done here to random decoders, and must be undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from miniort.errors import ModelError
from miniort.generation import open_decoder
from miniort.types import Array
from miniort_models.conversion import convert
from miniort_models.weights.gguf_file import open_gguf
from miniort_models.weights.source import BlockQuantised

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY, CONTEXT = 32, 64, 2, 4, 2, 40, 64
KEPT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

Shapes = dict[str, tuple[int, ...]]


def dequantised(blocks: BlockQuantised) -> Array:
    """(code - zero point) · scale, by the definition of `BlockQuantised`: [rows, columns] float32."""
    codes = blocks.codes
    if blocks.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1)
    zero_points = 2 ** (blocks.bits - 1) if blocks.zero_points is None else blocks.zero_points[..., None]
    values: Array = (codes.astype(np.float32) - zero_points) * blocks.scales[..., None]
    return values.reshape(len(values), -1)


# ------------------------------------------------------------------------------------------------ quantisation


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int, rng: np.random.Generator) -> Array:
    """Every bit random, but for the float16 scales: [rows, bytes] uint8"""
    block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    places = {"Q6_K": (208,)}.get(kind.name, (0, 2) if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q2_K") else (0,))
    for place in places:
        scales = rng.normal(size=raw.shape[:2]).astype(np.float16)
        scales[0, 0] = 0 if place == 0 else scales[0, 0]  # a block whose values are all the same
        raw[..., place : place + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def llama_file(path: Path, tensors: Mapping[str, tuple[Array, GGMLQuantizationType | None]], vocabulary: int, hidden: int) -> Path:
    """A GGUF file of the least that a llama has in it, and these tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    write(writer)
    return path


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", [*KEPT, "Q2_K", "Q3_K", "IQ4_NL"])
def test_quantised_weights_are_those_of_the_gguf_package(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    raw = random_blocks(kind, 6, 512, np.random.default_rng(3))
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(raw, kind)
    file = open_gguf(llama_file(tmp_path / "model.gguf", {"token_embd.weight": (raw, kind)}, 6, 512))
    assert file.shape("model.embed_tokens.weight") == (6, 512)
    np.testing.assert_array_equal(file.read("model.embed_tokens.weight"), wanted)
    blocks = file.read_blocks("model.embed_tokens.weight")
    if name not in KEPT:
        assert blocks is None
        return
    assert blocks is not None
    assert blocks.bits == (4 if name.startswith("Q4") else 8)
    assert (blocks.scales.dtype, blocks.codes.dtype) == (np.float32, np.uint8)
    # The largest terms of the sum, d·q and m, are rounded where they're added; a few units in their last place.
    np.testing.assert_allclose(dequantised(blocks), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_rows_of_blocks_are_put_in_order_like_those_of_floats(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    rng = np.random.default_rng(5)
    tensors: dict[str, tuple[Array, GGMLQuantizationType | None]] = {
        "token_embd.weight": (rng.normal(size=(8, 64)).astype(np.float32), None),
        "blk.0.attn_q.weight": (random_blocks(kind, 64, 64, rng), kind),
        "blk.0.attn_v.weight": (random_blocks(kind, 64, 64, rng), kind),
    }
    file = open_gguf(llama_file(tmp_path / "model.gguf", tensors, 8, 64))
    for part in ("q_proj", "v_proj"):
        weight = f"model.layers.0.self_attn.{part}.weight"
        blocks = file.read_blocks(weight)
        assert blocks is not None
        np.testing.assert_allclose(dequantised(blocks), file.read(weight), rtol=1e-6, atol=1e-4)


def test_floats_are_views_of_the_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    embedding = rng.normal(size=(8, 64)).astype(np.float32)
    narrow = rng.normal(size=(8, 64)).astype(ml_dtypes.bfloat16)
    half = rng.normal(size=(64, 64)).astype(np.float16)
    tensors: dict[str, tuple[Array, GGMLQuantizationType | None]] = {
        "token_embd.weight": (embedding, None),
        "output.weight": (narrow.view(np.uint8), GGMLQuantizationType.BF16),
        "blk.0.ffn_up.weight": (half, None),
    }
    file = open_gguf(llama_file(tmp_path / "model.gguf", tensors, 8, 64))
    for name, wanted in (
        ("model.embed_tokens.weight", embedding),
        ("lm_head.weight", narrow),
        ("model.layers.0.mlp.up_proj.weight", half),
    ):
        found = file.read(name)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
        assert not found.flags.owndata
        assert file.read_blocks(name) is None
    assert file.config["tie_word_embeddings"] is False
    with pytest.raises(KeyError):
        file.read("model.layers.9.mlp.up_proj.weight")


# ----------------------------------------------------------------------------------------------- architectures
# Each has its `config.json`, the shapes of its weights, their names for ggml, and what the converter does to them.


def llama_shapes(head_dim: int, *, bias: bool = False, norms: bool = False, tied: bool = True) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (HIDDEN,), f"{at}.post_attention_layernorm.weight": (HIDDEN,)}
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{at}.self_attn.{part}_proj.weight"] = (heads * head_dim, HIDDEN)
            if bias:
                shapes[f"{at}.self_attn.{part}_proj.bias"] = (heads * head_dim,)
        if norms:
            shapes |= {f"{at}.self_attn.q_norm.weight": (head_dim,), f"{at}.self_attn.k_norm.weight": (head_dim,)}
        shapes |= {
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * head_dim),
            f"{at}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return shapes


def gemma_shapes(head_dim: int, *, norms: bool = False) -> Shapes:
    more: Shapes = {}
    for layer in range(LAYERS):
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            more[f"model.layers.{layer}.{norm}.weight"] = (HIDDEN,)
    return llama_shapes(head_dim, norms=norms) | more


def phi3_shapes() -> Shapes:
    shapes: Shapes = {}
    for name, shape in llama_shapes(HIDDEN // HEADS, tied=False).items():
        if "k_proj" in name or "v_proj" in name or "up_proj" in name:
            continue
        size = (HEADS + 2 * KV_HEADS) * (HIDDEN // HEADS)
        if "q_proj" in name:
            shapes[name.replace("q_proj", "qkv_proj")] = (size, HIDDEN)
        elif "gate_proj" in name:
            shapes[name.replace("gate_proj", "gate_up_proj")] = (2 * INNER, HIDDEN)
        else:
            shapes[name] = shape
    return shapes


def gpt2_shapes() -> Shapes:
    shapes: Shapes = {"transformer.wte.weight": (VOCABULARY, HIDDEN), "transformer.wpe.weight": (CONTEXT, HIDDEN)}
    for layer in range(LAYERS):
        for part, (rows, columns) in {
            "attn.c_attn": (HIDDEN, 3 * HIDDEN),
            "attn.c_proj": (HIDDEN, HIDDEN),
            "mlp.c_fc": (HIDDEN, INNER),
            "mlp.c_proj": (INNER, HIDDEN),
        }.items():
            shapes |= {f"transformer.h.{layer}.{part}.weight": (rows, columns), f"transformer.h.{layer}.{part}.bias": (columns,)}
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"transformer.h.{layer}.{norm}.{part}": (HIDDEN,) for part in ("weight", "bias")}
    return shapes | {f"transformer.ln_f.{part}": (HIDDEN,) for part in ("weight", "bias")}


def gpt_neox_shapes() -> Shapes:
    shapes: Shapes = {"gpt_neox.embed_in.weight": (VOCABULARY, HIDDEN), "embed_out.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        for part, (rows, columns) in {
            "attention.query_key_value": (3 * HIDDEN, HIDDEN),
            "attention.dense": (HIDDEN, HIDDEN),
            "mlp.dense_h_to_4h": (INNER, HIDDEN),
            "mlp.dense_4h_to_h": (HIDDEN, INNER),
        }.items():
            shapes |= {f"gpt_neox.layers.{layer}.{part}.weight": (rows, columns), f"gpt_neox.layers.{layer}.{part}.bias": (rows,)}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"gpt_neox.layers.{layer}.{norm}.{part}": (HIDDEN,) for part in ("weight", "bias")}
    return shapes | {f"gpt_neox.final_layer_norm.{part}": (HIDDEN,) for part in ("weight", "bias")}


def permuted(weight: Array, heads: int) -> Array:
    """What llama.cpp does to queries and keys."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def as_llama(name: str, weight: Array) -> Array:
    if "q_proj" in name or "k_proj" in name:
        return permuted(weight, HEADS if "q_proj" in name else KV_HEADS)
    return weight


def as_gemma(name: str, weight: Array) -> Array:
    return weight + 1 if name.endswith("norm.weight") else weight


def as_gpt2(name: str, weight: Array) -> Array:
    return weight.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else weight


def as_gpt_neox(name: str, weight: Array) -> Array:
    if "query_key_value" not in name:
        return weight
    parts = weight.reshape(HEADS, 3, HIDDEN // HEADS, *weight.shape[1:])
    return np.concatenate([parts[:, index].reshape(HIDDEN, *weight.shape[1:]) for index in range(3)])


LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = LLAMA_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PHI3_NAMES = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"} | LLAMA_NAMES
GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "transformer.h.": "blk.",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GPT_NEOX_NAMES = {
    "gpt_neox.embed_in": "token_embd",
    "embed_out": "output",
    "gpt_neox.final_layer_norm": "output_norm",
    "gpt_neox.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}

FAMILY = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}


def family(writer: gguf.GGUFWriter, head_dim: int = HIDDEN // HEADS) -> None:
    """The metadata that the Llama family and Gemma have in common."""
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if head_dim != HIDDEN // HEADS:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def llama_metadata(writer: gguf.GGUFWriter) -> None:
    family(writer)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def mistral_metadata(writer: gguf.GGUFWriter) -> None:
    family(writer)
    writer.add_sliding_window(8)


def gemma2_metadata(writer: gguf.GGUFWriter) -> None:
    family(writer, 16)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    writer.add_sliding_window(8)


def gemma3_metadata(writer: gguf.GGUFWriter) -> None:
    family(writer, 16)
    writer.add_rope_freq_base(1000000.0)
    writer.add_sliding_window(8)


def phi3_metadata(writer: gguf.GGUFWriter) -> None:
    family(writer)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_scaling_orig_ctx_len(CONTEXT)
    writer.add_sliding_window(0)


def layer_norms(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)


def gpt_neox_metadata(writer: gguf.GGUFWriter) -> None:
    layer_norms(writer)
    writer.add_rope_dimension_count(4)
    writer.add_parallel_residual(False)


Case = tuple[str, dict[str, Any], Shapes, Mapping[str, str], Callable[[str, Array], Array], Callable[[gguf.GGUFWriter], None]]
CASES: dict[str, Case] = {
    "llama": (
        "llama",
        {**FAMILY, "model_type": "llama", "rope_theta": 50000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        llama_shapes(HIDDEN // HEADS, tied=False),
        LLAMA_NAMES,
        as_llama,
        llama_metadata,
    ),
    "mistral": (
        "llama",
        {**FAMILY, "model_type": "mistral", "sliding_window": 8, "tie_word_embeddings": True},
        llama_shapes(HIDDEN // HEADS),
        LLAMA_NAMES,
        as_llama,
        mistral_metadata,
    ),
    "qwen2": (
        "qwen2",
        {**FAMILY, "model_type": "qwen2", "tie_word_embeddings": True},
        llama_shapes(HIDDEN // HEADS, bias=True),
        LLAMA_NAMES,
        lambda name, weight: weight,
        family,
    ),
    "qwen3": (
        "qwen3",
        {**FAMILY, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        llama_shapes(16, norms=True),
        LLAMA_NAMES,
        lambda name, weight: weight,
        lambda writer: family(writer, 16),
    ),
    "gemma2": (
        "gemma2",
        {
            **FAMILY,
            **GEMMA,
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        gemma_shapes(16),
        GEMMA_NAMES,
        as_gemma,
        gemma2_metadata,
    ),
    "gemma3": (
        "gemma3",
        {
            **FAMILY,
            **GEMMA,
            "model_type": "gemma3_text",
            "rope_theta": 1000000.0,
            "layer_types": ["sliding_attention", "sliding_attention"],
        },
        gemma_shapes(16, norms=True),
        GEMMA_NAMES,
        as_gemma,
        gemma3_metadata,
    ),
    "phi3": (
        "phi3",
        {**FAMILY, "model_type": "phi3", "original_max_position_embeddings": CONTEXT, "sliding_window": None, "tie_word_embeddings": False},
        phi3_shapes(),
        PHI3_NAMES,
        lambda name, weight: weight,
        phi3_metadata,
    ),
    "gpt2": (
        "gpt2",
        {
            "model_type": "gpt2",
            "vocab_size": VOCABULARY,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_inner": INNER,
            "n_positions": CONTEXT,
            "layer_norm_epsilon": 1e-5,
        },
        gpt2_shapes(),
        GPT2_NAMES,
        as_gpt2,
        layer_norms,
    ),
    "gpt_neox": (
        "gptneox",
        {
            "model_type": "gpt_neox",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "max_position_embeddings": CONTEXT,
            "layer_norm_eps": 1e-5,
            "rotary_pct": 0.5,
            "use_parallel_residual": False,
            "tie_word_embeddings": False,
        },
        gpt_neox_shapes(),
        GPT_NEOX_NAMES,
        as_gpt_neox,
        gpt_neox_metadata,
    ),
}


class WeightsInMemory:
    """A `WeightSource` of arrays by Hugging Face's names."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Array]) -> None:
        self.name, self.config, self.weights = "in memory", config, weights

    def names(self) -> Sequence[str]:
        return list(self.weights)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights[name].shape

    def read(self, name: str) -> Array:
        return self.weights[name]

    def read_blocks(self, name: str) -> None:
        return None


def ggml_name(name: str, names: Mapping[str, str]) -> str:
    for ours, said in sorted(names.items(), key=lambda item: -len(item[0])):
        name = name.replace(ours, said)
    return name


def random_weights(shapes: Shapes, seed: int = 11) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: (rng.normal(size=shape) * 0.3 + ("norm" in name or "ln_" in name)).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("case", CASES)
def test_an_architecture(tmp_path: Path, case: str) -> None:
    """All weights come back as they were, and the configuration says the same model: its logits are those of the original."""
    architecture, config, shapes, names, as_stored, metadata = CASES[case]
    weights = random_weights(shapes)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    metadata(writer)
    for name, weight in weights.items():
        writer.add_tensor(ggml_name(name, names), np.ascontiguousarray(as_stored(name, weight)))
    write(writer)

    file = open_gguf(tmp_path / "model.gguf")
    assert sorted(file.names()) == sorted(weights)
    for name, weight in weights.items():
        assert file.shape(name) == weight.shape
        np.testing.assert_allclose(file.read(name), weight, rtol=1e-6, atol=1e-6, err_msg=name)
    convert(file, tmp_path / "of_gguf")
    convert(WeightsInMemory(config, weights), tmp_path / "original")
    np.testing.assert_allclose(logits(tmp_path / "of_gguf"), logits(tmp_path / "original"), rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["gpt2", "gpt_neox", "phi3", "llama", "gemma2"])
def test_an_architecture_whose_weights_are_kept_as_quantised(tmp_path: Path, case: str) -> None:
    """Where rows are in another order, where matrices are stored the other way round, and where several projections are one."""
    architecture, _, shapes, names, as_stored, metadata = CASES[case]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    metadata(writer)
    for name, weight in random_weights(shapes).items():
        stored = np.ascontiguousarray(as_stored(name, weight))
        if stored.ndim == 2 and "wpe" not in name:
            writer.add_tensor(ggml_name(name, names), gguf.quantize(stored, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(ggml_name(name, names), stored)
    write(writer)
    file = open_gguf(tmp_path / "model.gguf")
    convert(file, tmp_path / "kept")
    convert(file, tmp_path / "float", dtype="f32")
    wanted = logits(tmp_path / "float")
    np.testing.assert_allclose(logits(tmp_path / "kept"), wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def logits(folder: Path) -> Array:
    """Of a prompt that is longer than the windows."""
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, (1, 14))
    decoder = open_decoder(folder)
    try:
        return decoder.uncached(tokens, np.ones_like(tokens))[:, -1]
    finally:
        decoder.close()


def test_llama3_scaling_is_told_from_its_table(tmp_path: Path) -> None:
    """The factors of Llama 3.2 1B: 1 where a wave is shorter than 2,048 tokens, 32 where it's longer than 8,192."""
    head_dim, base = 64, 500000.0
    wavelengths = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (8192 / wavelengths - 1) / 3
    factors = np.where(wavelengths < 2048, 1, np.where(wavelengths > 8192, 32, 1 / ((1 - smooth) / 32 + smooth))).astype(np.float32)

    def file(table: Array) -> Path:
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        family(writer, head_dim)
        writer.add_rope_freq_base(base)
        writer.add_tensor("token_embd.weight", np.zeros((VOCABULARY, HIDDEN), np.float32))
        writer.add_tensor("rope_freqs.weight", table)
        write(writer)
        return tmp_path / "model.gguf"

    opened = open_gguf(file(factors))
    assert opened.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in opened.names()
    with pytest.raises(ModelError, match=r"rope_freqs\.weight isn't what Llama 3's scaling gives"):
        open_gguf(file(np.linspace(1, 3, 32).astype(np.float32)))


# ------------------------------------------------------------------------------------------------ broken files


def test_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    embedding = np.zeros((VOCABULARY, HIDDEN), np.float32)

    def file(architecture: str | None, tensors: Sequence[str], *, leave_out: str = "") -> Path:
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture or "llama")
        family(writer)
        for entries in writer.kv_data:
            entries.pop(leave_out, None)
            if architecture is None:
                entries.pop("general.architecture", None)
        for name in tensors:
            writer.add_tensor(name, embedding)
        write(writer)
        return tmp_path / "model.gguf"

    with pytest.raises(ModelError, match=r"architecture 'mamba'; known are gemma2, gemma3, gpt2, gptneox, llama, phi3, qwen2, qwen3"):
        open_gguf(file("mamba", ["token_embd.weight"]))
    with pytest.raises(ModelError, match=r"no general\.architecture"):
        open_gguf(file(None, ["token_embd.weight"]))
    with pytest.raises(ModelError, match=r"no token_embd\.weight"):
        open_gguf(file("llama", ["output.weight"]))
    with pytest.raises(ModelError, match=r"must say a whole number as llama\.block_count; it's missing"):
        open_gguf(file("llama", ["token_embd.weight"], leave_out="llama.block_count"))
    with pytest.raises(ModelError, match=r"has no tensor blk\.0\.ffn_gate_exps\.weight"):
        open_gguf(file("llama", ["token_embd.weight", "blk.0.ffn_gate_exps.weight"]))
    path = file("llama", ["token_embd.weight", "output.weight"])
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelError, match=r"is cut short: output\.weight lies beyond its end"):
        open_gguf(path)


def test_nothing_but_the_header_is_read_to_open_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = llama_file(tmp_path / "model.gguf", {"token_embd.weight": (np.ones((8, 64), np.float32), None)}, 8, 64)
    mapped = []
    memmap = np.memmap
    monkeypatch.setattr(np, "memmap", lambda *arguments, **options: mapped.append(arguments) or memmap(*arguments, **options))
    file = open_gguf(path)
    assert (file.names(), mapped) == (["model.embed_tokens.weight"], [])
    file.read("model.embed_tokens.weight")
    assert len(mapped) == 1
