"""The table in docs/raising.md is what raising does, and optimised decoders give what unoptimised ones give, caches too."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from miniort import InferenceSession, SessionOptions, WeightStore

ROOT = Path(__file__).parents[3]
EXPORTERS = Path(os.environ.get("MINIORT_FIXTURES", ROOT.parent / "shared" / "fixtures"))
"""Decoders of every exporter, which are too many to be kept here. Those that are kept here are checked always."""
KEPT = {
    "gpt2/optimum": "gpt2_optimum/model",
    "gpt2/optimum_legacy/decoder_model": "gpt2_optimum_legacy/decoder_model",
    "gpt2/optimum_legacy/decoder_model_merged": "gpt2_optimum_legacy/decoder_model_merged",
    "gpt2/optimum_legacy/decoder_with_past_model": "gpt2_optimum_legacy/decoder_with_past_model",
    "gpt2/ort_convert_int8": "gpt2_ort_convert_int8/model",
    "llama/genai_int4_asym": "llama_genai_int4_asym/model",
    "llama/optimum": "llama_optimum/model",
    "qwen2/genai_int4": "qwen2_genai_int4/model",
}
QUANTIZED = ("int4", "int8")
LAYERS = {"gpt2": 3, "gemma3": 3, "llama": 2, "mistral": 2, "qwen2": 2, "opt": 2, "gpt_neox": 2}
CONTRIB_ATTENTION = ("genai", "ort_convert_fused", "ort_convert_int8")
"""Exporters whose attention is onnxruntime's own op already."""


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """tools/raising_table.py, which made the table."""
    spec = importlib.util.spec_from_file_location("raising_table", ROOT / "tools" / "raising_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["raising_table"] = module
    spec.loader.exec_module(module)
    return module


def documented() -> dict[str, str]:
    """The lines of the table by the file's name."""
    lines = (ROOT / "docs" / "raising.md").read_text().splitlines()
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ") and "/" in line.split("|")[1]}


@pytest.mark.parametrize("name", KEPT)
def test_the_row_of_a_kept_decoder(table: ModuleType, data: Path, name: str) -> None:
    assert str(table.row(data / "fixtures" / f"{KEPT[name]}.onnx", name)) == documented()[name]


def test_every_float_decoder_is_raised_as_a_whole() -> None:
    """One Attention for each layer, two where a prompt's graph and a token's are in one file, and nothing left in layers."""
    lines = documented()
    assert len(lines) == 40
    for name, line in lines.items():
        assert line.endswith("| none |")
        if not any(part in name for part in CONTRIB_ATTENTION):
            assert f"| {LAYERS[name.split('/')[0]] * (2 if 'merged' in name else 1)} Attention" in line


if EXPORTERS.is_dir():

    @pytest.mark.slow
    def test_every_row(table: ModuleType) -> None:
        assert {row.name: str(row) for row in table.rows(EXPORTERS)} == documented()

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [path.relative_to(EXPORTERS).as_posix() for path in sorted(EXPORTERS.rglob("*.onnx"))])
    def test_optimised_equals_unoptimised(name: str) -> None:
        check_equal(EXPORTERS / name)


DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
CASES = [(1, 0, 7, [0]), (2, 0, 6, [0, 2]), (1, 5, 1, [0]), (2, 4, 3, [0, 1]), (2, 4, 1, [0, 3])]
"""Rows, tokens in the cache, new tokens, and how many of each row's first tokens are padding."""


def check_equal(path: Path) -> None:
    """Run both forms of a decoder on prompts and on tokens behind a past."""
    store = WeightStore()
    plain, raised = (InferenceSession(path, SessionOptions(level), weights=store) for level in ("none", "all"))
    has_past = any("past" in arg.name for arg in plain.get_inputs())
    ran = 0
    for rows, past, new, padding in CASES:
        if (past and not has_past) or ("with_past" in path.name and (not past or new > 1)):
            continue
        feeds = {arg.name: feed(arg, rows, past, new, padding) for arg in plain.get_inputs()}
        for arg, wanted, actual in zip(plain.get_outputs(), plain.run(None, feeds), raised.run(None, feeds), strict=True):
            assert actual.dtype == wanted.dtype
            assert actual.shape == wanted.shape
            allowed = {np.dtype(np.float32): 1e-4, np.dtype(np.float16): 0.05}.get(wanted.dtype, 0.4)
            if any(part in str(path) for part in ("fp16", *QUANTIZED)):
                allowed = max(allowed, 0.05)
            np.testing.assert_allclose(np.float64(actual), np.float64(wanted), rtol=0, atol=allowed, err_msg=arg.name)
        ran += 1
    assert ran


def feed(arg: Any, rows: int, past: int, new: int, padding: list[int]) -> Any:
    """What a decoder's input is fed, by its name."""
    rng = np.random.default_rng(len(arg.name))
    mask = np.ones((rows, past + new), int)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    match arg.name:
        case "input_ids":
            value: Any = rng.integers(0, 500, (rows, new))
        case "attention_mask":
            value = mask
        case "position_ids":
            value = np.maximum(mask.cumsum(1) - 1, 0)[:, -new:]
        case "use_cache_branch":
            value = np.array([past > 0])
        case _:
            assert "past" in arg.name
            heads, dim = (size if isinstance(size, int) else 16 for size in (arg.shape[-3], arg.shape[-1]))
            packed = (2,) if len(arg.shape) == 5 else ()
            value = rng.standard_normal((*packed, rows, heads, past, dim)) / 2
    return value.astype(DTYPES[arg.type])


@pytest.mark.parametrize("name", ["gpt2/ort_convert_int8", "llama/genai_int4_asym", "qwen2/genai_int4"])
def test_quantized_decoders(data: Path, name: str) -> None:
    check_equal(data / "fixtures" / f"{KEPT[name]}.onnx")
