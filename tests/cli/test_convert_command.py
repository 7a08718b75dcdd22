"""`miniort convert`, and weights as `--model`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import Result
from safetensors.numpy import save_file

Miniort = Callable[..., Result]


@pytest.fixture
def weights(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small GPT-2 as Hugging Face has it, with a tokenizer and a chat template."""
    monkeypatch.setenv("MINIORT_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "weights"
    folder.mkdir()
    shutil.copyfile(data / "tokenizer" / "tokenizer.json", folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    config = {"model_type": "gpt2", "vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 4}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "wte.weight": (512, 64),
        "wpe.weight": (64, 64),
        "h.0.attn.c_attn.weight": (64, 192),
        "h.0.attn.c_proj.weight": (64, 64),
        "h.0.mlp.c_fc.weight": (64, 256),
        "h.0.mlp.c_proj.weight": (256, 64),
    }
    shapes |= {name.replace("weight", "bias"): shape[1:] for name, shape in shapes.items() if name.startswith("h.")}
    shapes |= {f"{name}.{part}": (64,) for name in ("h.0.ln_1", "h.0.ln_2", "ln_f") for part in ("weight", "bias")}
    rng = np.random.default_rng(0)
    save_file({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_becomes_a_decoder(weights: Path, tmp_path: Path, miniort: Miniort, generate_json: Callable[..., dict[str, Any]]) -> None:
    out = tmp_path / "out"
    result = miniort("convert", str(weights), "-o", str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    said, use = result.stdout.splitlines()
    assert said.startswith(f"{out}: prefill.onnx ")
    assert "decode.onnx " in said
    assert "weights.bin " in said
    assert use == f"use it with --model {out}"
    assert names(out) == ["chat_template.jinja", "config.json", "decode.onnx", "prefill.onnx", "tokenizer.json", "weights.bin"]
    found = [generate_json("the", "--model", str(model), "--max-new-tokens", "4") for model in (out, weights)]
    assert len(found[0]["tokens"]) == 4
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[0]["joins"]["decode"]["appends"]


def test_options_are_those_of_the_graphs(weights: Path, tmp_path: Path, miniort: Miniort) -> None:
    sizes = {}
    for dtype in ("f32", "f16", "bf16", "int8", "int4"):
        out = tmp_path / dtype
        assert miniort("convert", str(weights), "-o", str(out), "--dtype", dtype, "--opset", "17", "--all-logits").exit_code == 0
        sizes[dtype] = (out / "weights.bin").stat().st_size
        prefill = onnx.load(out / "prefill.onnx", load_external_data=False)
        assert prefill.opset_import[0].version == 17
        assert prefill.graph.output[0].type.tensor_type.shape.dim[1].dim_param == "sequence"
    assert sizes["f32"] > 1.8 * sizes["f16"] > 1.8 * sizes["int8"] > 1.8 * sizes["int4"] * 0.8


def test_what_is_there_is_kept_without_force(weights: Path, tmp_path: Path, miniort: Miniort) -> None:
    out = tmp_path / "out"
    assert miniort("convert", str(weights), "-o", str(out)).exit_code == 0
    before = (out / "weights.bin").read_bytes()
    result = miniort("convert", str(weights), "-o", str(out), "--dtype", "f16")
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert (out / "weights.bin").read_bytes() == before
    assert miniort("convert", str(weights), "-o", str(out), "--dtype", "f16", "--force").exit_code == 0
    assert (out / "weights.bin").stat().st_size < len(before)


def break_config(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "rwkv"}))


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("broken", "said"),
    [(break_config, "architecture 'rwkv'"), (cut_weights, "model.safetensors is damaged"), (pickle_weights, "pickled")],
)
def test_broken_weights_are_one_line_and_leave_nothing(
    broken: Callable[[Path], None], said: str, weights: Path, tmp_path: Path, miniort: Miniort
) -> None:
    broken(weights)
    for command in (["convert", str(weights), "-o", str(tmp_path / "out")], ["generate", "the", "--model", str(weights)]):
        result = miniort(*command)
        assert result.exit_code == 2
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert names(tmp_path) == ["cache", "weights"] or names(tmp_path) == ["weights"]
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != "lock"] == []


@pytest.mark.parametrize(
    ("source", "said"),
    [("nowhere", "no such file or folder: nowhere"), ("a.txt", "a.txt can't be converted; wanted a folder"), (".", "holds no weights")],
)
def test_other_sources_are_refused(source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, miniort: Miniort) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    result = miniort("convert", source, "-o", "out")
    assert result.exit_code == 2
    assert said in result.stderr
    assert names(tmp_path) == ["a.txt"]


def test_a_model_that_was_pulled_is_converted_by_its_name(hub: Any, weights: Path, data: Path, tmp_path: Path, miniort: Miniort) -> None:
    hub.add("tiny/weights", {path.name: path.read_bytes() for path in weights.iterdir()})
    graph = data / "fixtures" / "gpt2_optimum" / "model.onnx"
    hub.add("tiny/graphs", {"model.onnx": graph.read_bytes(), "config.json": (graph.parent / "config.json").read_bytes()})
    for name in ("tiny/weights", "tiny/graphs"):
        assert miniort("pull", name).exit_code == 0
    result = miniort("convert", "tiny/weights", "-o", str(tmp_path / "small"), "--dtype", "int8")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "tokenizer.json" in names(tmp_path / "small")
    for name, said in (("tiny/graphs", "was pulled as ONNX graphs"), ("tiny/other", "`miniort pull tiny/other` gets it")):
        result = miniort("convert", name, "-o", str(tmp_path / "none"))
        assert result.exit_code == 2
        assert said in result.stderr
