"""Record what Hugging Face transformers computes for small decoders of every architecture and variant.

Writes tests/data/architectures: `cases.json` (each case's `config.json`, and the shapes of its weights) and `recordings.npz`. Weights are
not kept: `weights_of` makes them from their names and shapes, in the tests too. Needs torch and transformers:

    uv run --no-project --with torch --with transformers==4.57.6 --with numpy python tools/record_architectures.py

Of each case are recorded, in float32, with eager attention:

    ids [1, 16], logits [1, 16, V]      a prompt
    stepped [1, 10, V]                  the same with a cache: 6 tokens as a prompt, then 4, then one by one; the prompt's are left out
    b2_ids, b2_mask [2, 6], b2_logits   two rows, the first with 3 tokens of padding on its left
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "architectures"
VOCABULARY, LENGTH, CUTS = 24, 16, (6, 10, 11, 12, 13, 14, 15, 16)

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
SHORT = {**GROUPED, "max_position_embeddings": 10}  # less than the text: what a scaling does beyond it shows
GPT2_SIZES = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 4.0, 8.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2_SIZES),
    "gpt2_untied_relu": ("gpt2", {**GPT2_SIZES, "n_inner": 40, "activation_function": "relu", "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", {**SIZES, "rotary_pct": 0.5}),
    "gpt_neox_sequential": ("gpt_neox", {**SIZES, "rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False}),
    "llama": ("llama", GROUPED),
    "llama_biases_tied": ("llama", {**SIZES, "head_dim": 12, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_gelu_one_kv_head": ("llama", {**SIZES, "num_key_value_heads": 1, "hidden_act": "gelu", "rope_theta": 500.0}),
    "llama_linear": ("llama", {**GROUPED, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "llama_dynamic": ("llama", {**SHORT, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}),
    "llama_yarn": ("llama", {**GROUPED, "rope_scaling": YARN}),
    "llama_yarn_mscale": (
        "llama",
        {**GROUPED, "head_dim": 16, "rope_scaling": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "llama_longrope": ("llama", {**SHORT, "rope_scaling": {"rope_type": "longrope", "factor": 4.0, **LONGROPE}}),
    "llama_llama3": ("llama", {**GROUPED, "head_dim": 16, "rope_scaling": LLAMA3}),
    "mistral_window": ("mistral", {**GROUPED, "sliding_window": 5}),
    "mistral_no_window": ("mistral", {**GROUPED, "sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2_window_above": ("qwen2", {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 12}),
    "phi3": ("phi3", {**GROUPED, "sliding_window": 7, "pad_token_id": 0}),
    "phi3_longrope": (
        "phi3",
        {**GROUPED, "original_max_position_embeddings": 10, "rope_scaling": {"type": "longrope", **LONGROPE}, "pad_token_id": 0},
    ),
    "phi3_partial_tied": ("phi3", {**GROUPED, "partial_rotary_factor": 0.5, "tie_word_embeddings": True, "pad_token_id": 0}),
    "gemma2": (
        "gemma2",
        {
            **GROUPED,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": ("gemma3_text", {**GROUPED, "num_hidden_layers": 3, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5}),
    "gemma3_linear": (
        "gemma3_text",
        {**GROUPED, "head_dim": 12, "sliding_window": 5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "attention_bias": True},
    ),
}
LAYER_TYPES = {
    "gemma3": ["sliding_attention", "full_attention", "sliding_attention"],
    "gemma3_linear": ["full_attention", "sliding_attention"],
}


def weights_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Weights that depend on nothing but the order of their names and their shapes, with any version of NumPy."""
    bits = np.random.PCG64(1611)
    weights = {}
    for name in sorted(shapes):
        count = int(np.prod(shapes[name]))
        between = bits.random_raw(count).astype(np.float64) / 2.0**64 - 0.5
        is_scale = len(shapes[name]) == 1 and name.endswith("weight")
        weights[name] = (between + is_scale).reshape(shapes[name]).astype(np.float32)
    return weights


def main() -> None:
    """Record all cases."""
    said, recordings = {}, {}
    for name, (kind, options) in CASES.items():
        layer_types = {"layer_types": LAYER_TYPES[name]} if name in LAYER_TYPES else {}
        config = AutoConfig.for_model(kind, **options, **layer_types, attn_implementation="eager")
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        if config.tie_word_embeddings:
            shapes = {key: shape for key, shape in shapes.items() if key not in ("lm_head.weight", "embed_out.weight")}
        weights = {key: torch.from_numpy(weight) for key, weight in weights_of(shapes).items()}
        lacking = model.load_state_dict(weights, strict=False)
        assert not lacking.unexpected_keys
        assert set(lacking.missing_keys) <= {"lm_head.weight"}
        model.tie_weights()
        written = json.loads(config.to_json_string(use_diff=True))
        said[name] = {"config": {"model_type": kind, **written}, "shapes": shapes}
        recordings |= {f"{name}/{key}": value for key, value in record(model).items()}
        print(name, float(np.abs(recordings[f"{name}/logits"]).max()))
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in said.items()]
    (FOLDER / "cases.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    np.savez_compressed(FOLDER / "recordings.npz", **recordings)
    (FOLDER / "README.md").write_text(
        f"Written by tools/record_architectures.py, which says what is what, with transformers {transformers.__version__} and torch "
        f"{torch.__version__}.\n"
    )


@torch.no_grad()
def record(model: Any) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """What the module's docstring lists."""
    draws = np.random.PCG64(7)
    ids = (draws.random_raw(LENGTH) % VOCABULARY).astype(np.int64)[None]
    padded = np.array([[0, 0, 0, *ids[0, :3]], ids[0, 3:9]])
    mask = np.array([[0, 0, 0, 1, 1, 1], [1] * 6])
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)

    whole = model(torch.from_numpy(ids), position_ids=torch.arange(LENGTH)[None]).logits
    cache, stepped, begin = DynamicCache(config=model.config), [], 0
    fresh = type(model)._from_config(model.config, attn_implementation="eager").eval()  # rotary embeddings may remember the longest text
    fresh.load_state_dict(model.state_dict())
    for end in CUTS:
        where = torch.arange(begin, end)
        given = torch.from_numpy(ids[:, begin:end])
        out = fresh(
            given,
            position_ids=where[None],
            cache_position=where,
            past_key_values=cache,
            attention_mask=torch.ones(1, end, dtype=torch.int64),
        )
        stepped.append(out.logits)
        begin = end
    batch = fresh.__class__._from_config(model.config, attn_implementation="eager").eval()
    batch.load_state_dict(model.state_dict())
    both = batch(torch.from_numpy(padded), attention_mask=torch.from_numpy(mask), position_ids=torch.from_numpy(positions)).logits
    return {
        "ids": ids,
        "logits": whole.numpy(),
        "stepped": torch.cat(stepped[1:], dim=1).numpy(),
        "b2_ids": padded,
        "b2_mask": mask,
        "b2_logits": both.numpy(),
    }


if __name__ == "__main__":
    main()
