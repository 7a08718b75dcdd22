"""`miniort bench` and `miniort memory`: figures for people, as JSON, and errors on one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from click.testing import Result
from onnx import parser

Miniort = Callable[..., Result]

GRAPH = """
<ir_version: 10, opset_import: ["": 18]>
chain (float[rows, 1000] x) => (float[rows, 1000] y) {
  a = Neg(x)
  b = Exp(a)
  y = Sin(b)
}
"""


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    onnx.save(parser.parse_model(GRAPH), tmp_path / "chain.onnx")
    return tmp_path / "chain.onnx"


def test_bench_against_onnxruntime(miniort: Miniort) -> None:
    result = miniort("bench", "demo", "--against", "onnxruntime", "--contexts", "3,20", "--new-tokens", "4", "--rounds", "1", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert [each["context"] for each in found["results"]] == [3, 20]
    for each in found["results"]:
        assert len(each["miniort"]["tokens"]) == 4
        assert each["tokens_agree"] is (each["miniort"]["tokens"] == each["peer"]["tokens"]) is True
        assert each["decode_ratio"] == pytest.approx(each["peer"]["decode_ms"] / each["miniort"]["decode_ms"])


def test_bench_alone_prints_a_table(miniort: Miniort) -> None:
    result = miniort("bench", "demo", "--contexts", "5", "--new-tokens", "2", "--rounds", "1", "--threads", "1")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["context", "prompt", "ms", "token", "ms"]
    assert lines[1].split()[0] == "5"
    assert lines[-1].startswith("loaded in ")


@pytest.mark.parametrize(
    ("new_tokens", "contexts"), [("2", [16]), ("250", [7])], ids=["those that fit", "what fits where none of them does"]
)
def test_bench_chooses_contexts_that_the_model_has_room_for(miniort: Miniort, new_tokens: str, contexts: list[int]) -> None:
    result = miniort("bench", "demo", "--new-tokens", new_tokens, "--rounds", "1", "--json")
    assert result.exit_code == 0, result.stderr
    assert [each["context"] for each in json.loads(result.stdout)["results"]] == contexts


@pytest.mark.parametrize(
    "path",
    ["gpt2/optimum_legacy", "gpt2/optimum_legacy/decoder_model_merged.onnx", "gpt2/ort_convert_fused", "llama/fp16_fp32io"],
    ids=["two graphs", "merged", "packed", "half inside"],
)
def test_bench_of_what_exporters_write(miniort: Miniort, collection: Path, path: str) -> None:
    arguments = ("--against", "onnxruntime", "--contexts", "5", "--new-tokens", "3", "--rounds", "1", "--json")
    result = miniort("bench", str(collection / path), *arguments)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["results"][0]["tokens_agree"] is True


def test_bench_says_what_onnxruntime_can_not_open(miniort: Miniort, collection: Path) -> None:
    result = miniort("bench", str(collection / "llama" / "dynamo_bf16"), "--against", "onnxruntime", "--contexts", "5")
    assert result.exit_code == 2
    assert result.stderr.startswith("miniort: error: onnxruntime can't open the model's graphs: ")
    assert len(result.stderr.splitlines()) == 1


def test_bench_without_onnxruntime(miniort: Miniort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = miniort("bench", "demo", "--against", "onnxruntime", "--contexts", "5")
    assert result.exit_code == 2
    assert result.stderr == "miniort: error: onnxruntime isn't installed, so there's nothing to measure against: pip install onnxruntime\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--contexts", "16,250", "--new-tokens", "20"],
            "250 tokens and 20 new ones are more than the model's context of 256; give --contexts of at most 237, or fewer --new-tokens",
        ),
        (["--new-tokens", "300"], "300 new tokens are more than the model's context of 256; give fewer --new-tokens"),
        (["--contexts", "5,x"], "isn't a list of numbers of tokens"),
        (["--contexts", "0"], "isn't a list of numbers of tokens"),
        (["--contexts", "5", "--cache", "nothing"], "nothing"),
    ],
)
def test_bench_errors(miniort: Miniort, arguments: list[str], message: str) -> None:
    result = miniort("bench", "demo", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_memory_of_a_file(miniort: Miniort, graph: Path) -> None:
    result = miniort("memory", str(graph), "--size", "rows=50", "--optimise", "none")
    assert result.exit_code == 0, result.stderr
    assert "chain.onnx with rows=50: 3 steps" in result.stdout
    assert "peak          0.40 MB in step 1 (Exp)" in result.stdout
    assert "0.40 MB, where 0.60 MB would be needed without reuse" in result.stdout
    assert "▄██" in result.stdout


def test_memory_as_json(miniort: Miniort, graph: Path) -> None:
    found = json.loads(miniort("memory", str(graph), "--size", "rows=50", "--optimise", "none", "--json").stdout)["chain.onnx"]
    assert (found["peak"], found["curve"]) == (400_000, [200_000, 400_000, 400_000])
    assert [each["reuses"] for each in found["values"]] == [None, None, "a"]


def test_memory_of_a_decoder(miniort: Miniort) -> None:
    result = miniort("memory", "demo", "--size", "sequence=64")
    assert result.exit_code == 0, result.stderr
    assert "prefill with batch=1, sequence=64" in result.stdout
    assert "decode with" in result.stdout


@pytest.mark.parametrize("size", ["rows", "rows=", "=3", "rows=-1", "rows=1.5"])
def test_memory_wants_sizes_as_numbers(miniort: Miniort, graph: Path, size: str) -> None:
    result = miniort("memory", str(graph), "--size", size)
    assert result.exit_code == 2
    assert "is not of the form NAME=NUMBER" in result.stderr


def test_memory_of_a_size_that_is_not_there(miniort: Miniort, graph: Path) -> None:
    result = miniort("memory", str(graph), "--size", "columns=3")
    assert result.exit_code == 2
    assert result.stderr == "miniort: error: the model has no size 'columns'; its sizes: rows\n"
