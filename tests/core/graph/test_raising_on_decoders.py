"""Decoders of real exporters: raised, they give what they gave, with one Attention for each layer and no sizes computed in layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniort import InferenceSession, SessionOptions, WeightStore

MODELS = {  # layers, normalisations
    "llama_optimum/model.onnx": (2, {"RMSNormalization": 5, "Swish": 2}),
    "gpt2_optimum/model.onnx": (3, {"LayerNormalization": 7, "Gelu": 3}),
    "gpt2_optimum_legacy/decoder_model.onnx": (3, {"LayerNormalization": 7, "Gelu": 3}),
    "gpt2_optimum_legacy/decoder_with_past_model.onnx": (3, {"LayerNormalization": 7, "Gelu": 3}),
    "gpt2_optimum_legacy/decoder_model_merged.onnx": (6, {"LayerNormalization": 14, "Gelu": 6}),
}


def feeds(session: InferenceSession, ids: Any, mask: Any, past: dict[str, Any] | None = None) -> dict[str, Any]:
    """Feeds for new tokens, ids [batch, new], behind a past of which `mask` [batch, past + new] tells what is no padding."""
    positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :]
    fed: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    for arg in session.get_inputs():
        if arg.name.startswith("past"):
            empty = 1 if any(each.name == "use_cache_branch" for each in session.get_inputs()) else 0
            fed[arg.name] = past[arg.name] if past else np.zeros((len(ids), arg.shape[1], empty, arg.shape[3]), np.float32)
        if arg.name == "use_cache_branch":
            fed[arg.name] = np.array([past is not None])
    return {arg.name: fed[arg.name] for arg in session.get_inputs()}


@pytest.mark.parametrize("name", MODELS)
def test_raised_decoders(data: Path, name: str) -> None:
    folder = data / "fixtures" / name
    reference = np.load(data / "fixtures" / f"{name.split('_')[0]}_optimum" / "reference.npz")
    store = WeightStore()
    plain, raised = (InferenceSession(folder, SessionOptions(level, strict=True), weights=store) for level in ("none", "all"))
    ids, batch, padding = reference["input_ids"], reference["b2_input_ids"], reference["b2_attention_mask"]
    layers = sum(each.startswith("present") for each in reference.files) // 2
    past = {
        f"past_key_values.{layer}.{part}": reference[f"present.{layer}.{part}"][:, :, :-1]
        for layer in range(layers)
        for part in ("key", "value")
    }
    cases = [feeds(plain, ids[:, -1:], np.ones_like(ids), past)] if name != "gpt2_optimum_legacy/decoder_model.onnx" else []
    if "with_past" not in name:
        cases += [feeds(plain, ids, np.ones_like(ids)), feeds(plain, batch, padding)]
    for case in cases:
        for wanted, actual in zip(plain.run(None, case), raised.run(None, case), strict=True):
            assert actual.shape == wanted.shape
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-4)
    np.testing.assert_allclose(raised.run(["logits"], cases[0])[0][:, -1], reference["logits"][:, -1], rtol=0, atol=1e-4)

    count, others = MODELS[name]
    ops = [node.op for node in raised.explain().nodes]
    assert ops.count("Attention") == count
    assert {op: ops.count(op) for op in others} == others
    assert not {"Softmax", "IsNaN", "ReduceMean", "Pow", "Erf", "Tanh", "Sigmoid", "Gemm"} & set(ops)
    graphs = list(raised.model.graphs())
    last = [node for graph in graphs for node in graph][-1]
    assert last is not None
    for graph in graphs:
        nodes = list(graph)
        first = next((index for index, node in enumerate(nodes) if node.op_type in ("LayerNormalization", "RMSNormalization")), len(nodes))
        assert not {"Shape", "Range", "Expand"} & {node.op_type for node in nodes[first:]}
