"""Decoders of well-known sizes with random weights: as ONNX graphs by miniort-models, as checkpoints, and built for onnxruntime-genai."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from miniort_models.conversion import convert

GPT2_SMALL: Mapping[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "n_positions": 1024,
    "n_ctx": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "eos_token_id": 50256,
    "tie_word_embeddings": True,
}
LLAMA_135M: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 2048,
    "vocab_size": 49152,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {"gpt2-small": GPT2_SMALL, "llama-135m": LLAMA_135M}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights that a Hugging Face checkpoint of this config has, with tied heads left out."""
    if config["model_type"] == "gpt2":
        width, inner = config["n_embd"], 4 * config["n_embd"]
        found: dict[str, tuple[int, ...]] = {"wte.weight": (config["vocab_size"], width), "wpe.weight": (config["n_positions"], width)}
        for layer in range(config["n_layer"]):
            for name, shape in {
                "ln_1": (width,),
                "attn.c_attn": (width, 3 * width),
                "attn.c_proj": (width, width),
                "ln_2": (width,),
                "mlp.c_fc": (width, inner),
                "mlp.c_proj": (inner, width),
            }.items():
                found[f"h.{layer}.{name}.weight"] = shape
                found[f"h.{layer}.{name}.bias"] = shape[-1:]
        return {**found, "ln_f.weight": (width,), "ln_f.bias": (width,)}
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    found = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (width,),
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, width),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }.items():
            found[f"model.layers.{layer}.{name}.weight"] = shape
    return {**found, "model.norm.weight": (width,)}


@dataclass(frozen=True)
class RandomWeights:
    """A weight source whose numbers come from each weight's name, with a spread that keeps logits apart."""

    name: str
    config: Mapping[str, Any]

    def names(self) -> Sequence[str]:
        return list(shapes(self.config))

    def shape(self, name: str) -> tuple[int, ...]:
        return shapes(self.config)[name]

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        shape = self.shape(name)
        drawn = np.random.default_rng([*name.encode()]).standard_normal(prod(shape), dtype=np.float32).reshape(shape)
        if "ln_" in name or "norm" in name:
            return np.float32(name.endswith("weight")) + np.float32(0.05) * drawn
        return np.float32(0.02 if name.endswith("bias") else 0.06) * drawn

    def read_blocks(self, name: str) -> None:
        """None: nothing is quantised."""


def write(config: Mapping[str, Any], folder: Path, name: str) -> Path:
    """The decoder's graphs and weights in a folder, which is left as it is if it's there already."""
    if not folder.exists():
        convert(RandomWeights(name, config), folder)
    return folder


def write_checkpoint(config: Mapping[str, Any], folder: Path, name: str) -> Path:
    """The same weights as Hugging Face stores them, with a tokenizer of single bytes; left as it is if it's there already."""
    if not folder.exists():
        folder.mkdir(parents=True)
        weights = RandomWeights(name, config)
        save_file({each: weights.read(each) for each in weights.names()}, folder / "model.safetensors", {"format": "pt"})
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()  # type: ignore[assignment]
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def build_genai(checkpoint: Path, folder: Path) -> Path:
    """What onnxruntime-genai's builder makes of a checkpoint, in float32; left as it is if it's there already. Needs torch as well."""
    if not folder.exists():
        builder = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-m",
            str(checkpoint),
            "-o",
            str(folder),
            "-p",
            "fp32",
            "-e",
            "cpu",
        ]
        done = subprocess.run(builder, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False)
        if done.returncode:
            raise SystemExit(f"onnxruntime-genai's builder failed:\n{done.stderr}")
    return folder
