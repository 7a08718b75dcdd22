"""`miniort inspect`: a decoder's binding, any model's graph, as text and as JSON; a damaged file is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import Result
from onnx import TensorProto, helper, numpy_helper

Miniort = Callable[..., Result]

DATA = Path(__file__).parents[1] / "data" / "fixtures"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def facts_of(miniort: Miniort, *arguments: str) -> dict[str, Any]:
    result = miniort("inspect", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def lines_of(miniort: Miniort, *arguments: str) -> list[str]:
    result = miniort("inspect", *arguments)
    assert result.exit_code == 0, result.stderr
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_a_decoder(miniort: Miniort) -> None:
    lines = lines_of(miniort, str(DATA / "llama_optimum"))
    for line in (
        "opsets ai.onnx 18",
        "input input_ids tensor(int64) [batch_size, sequence_length]",
        "tokens decoder input_ids tensor(int64) [batch_size, sequence_length]",
        "past.1.value decoder past_key_values.1.value tensor(float) [batch_size, 2, past_sequence_length, 16]",
        "layers 2",
        "kv heads 2",
        "head dim 16",
        "vocabulary 512",
        "cache float32, 512 bytes per token",
        "cache axes in decoder [batch, kv heads, time, head dim]",
        "cache in decoder joined: Concat replaced by an append to the cache",
        "several new tokens at once yes",
        "rows of different lengths yes, padded on the left",
    ):
        assert line in lines


def test_a_decoder_as_json(miniort: Miniort) -> None:
    found = facts_of(miniort, str(DATA / "llama_optimum"))
    decoder, file = found["decoder"], found["files"][0]
    assert found["not_a_decoder"] is None
    assert {"role": "mask", "graph": "decoder", "name": "attention_mask", "type": "tensor(int64)"}.items() <= decoder["roles"][1].items()
    assert (decoder["layers"], decoder["kv_heads"], decoder["head_dim"], decoder["vocabulary_size"]) == (2, 2, 16, 512)
    assert decoder["takes_several_tokens"]
    assert decoder["padding"] is None
    assert file["nodes"] == sum(file["ops"].values()) == 621
    levels = found["graphs"]["decoder"]["ops"]
    assert list(levels) == ["none", "basic", "all"]
    sizes = [sum(ops.values()) for ops in levels.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert levels["all"]["miniort.CacheAppend"] == 2
    assert sum(sum(ops.values()) for ops in found["graphs"]["decoder"]["providers"].values()) == sizes[-1]


def test_a_merged_decoder_that_can_do_less(miniort: Miniort) -> None:
    lines = lines_of(miniort, str(DATA / "gpt2_optimum_legacy" / "decoder_model_merged.onnx"))
    for line in (
        "nodes 1,534, in 2 sub-graphs too",
        "graphs both are branches of one file",
        "tokens prefill input_ids tensor(int64) [batch_size, sequence_length]",
        "past.2.key decode past_key_values.2.key tensor(float) [batch_size, 4, past_sequence_length, 16]",
        "cache in prefill joined: presents stored in the cache as soon as they're computed",
        "several new tokens at once no: the decode graph has no mask between them",
    ):
        assert line in lines
    assert any(line.startswith("rows of different lengths no:") and "takes no position_ids" in line for line in lines)


def test_a_decoder_with_an_op_that_nobody_has(miniort: Miniort, tmp_path: Path) -> None:
    model = onnx.load(DATA / "llama_optimum" / "model.onnx")
    next(each for each in model.graph.node if each.op_type == "Sigmoid").domain = "mine"
    model.opset_import.append(helper.make_opsetid("mine", 1))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    lines = lines_of(miniort, str(path))
    assert "layers 2" in lines
    assert any(line.startswith("can't be run ") and "mine.Sigmoid" in line for line in lines)
    assert any(line.startswith("no kernel for mine.Sigmoid:") for line in lines)


def test_external_data_and_packed_weights(miniort: Miniort) -> None:
    file = facts_of(miniort, str(DATA / "llama_genai_int4_asym" / "model.onnx"))["files"][0]
    assert list(file["external"]) == ["model.onnx.data"]
    assert 0 < file["external"]["model.onnx.data"] <= (DATA / "llama_genai_int4_asym" / "model.onnx.data").stat().st_size
    assert {each["type"] for each in file["weights"]} >= {"float", "uint8"}
    assert file["opsets"]["com.microsoft"] == 1


def test_a_vision_model(miniort: Miniort) -> None:
    path = LIGHT / "light_squeezenet.onnx"
    found = facts_of(miniort, str(path))
    assert found["decoder"] is None
    assert "no input looks like the tokens" in found["not_a_decoder"]
    file = found["files"][0]
    assert file["inputs"] == [{"name": "data_0", "type": "tensor(float)", "shape": [1, 3, 224, 224]}]
    assert file["overridable"] == 52
    assert found["graphs"]["light_squeezenet.onnx"]["ops"]["none"]["Conv"] == 26
    lines = lines_of(miniort, str(path))
    assert not any("not a decoder" in line for line in lines), "nobody thought that it is one"


def test_what_looks_like_a_decoder_and_is_none_is_said(miniort: Miniort) -> None:
    lines = lines_of(miniort, str(DATA / "gpt2_optimum_legacy" / "decoder_model.onnx"))
    assert any(line.startswith("not a decoder: the graph takes no past, though it gives a cache of 3 layers") for line in lines)


def test_functions_sub_graphs_small_types_and_ops_without_a_kernel(miniort: Miniort, tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 21, "mine": 1]>
    example (float[n] x, bool b) => (float[n] y, seq(float) s) {
        d = mine.Twice(x)
        y = If(b) <then_branch = yes () => (float[n] r) { r = Identity(d) }, else_branch = no () => (float[n] r2) { r2 = mine.Nothing(d) }>
        s = SequenceConstruct(x)
    }
    <domain: "mine", opset_import: ["": 21]>
    Twice (a) => (c) { c = Add(a, a) }
    """)
    model.graph.initializer.append(helper.make_tensor("w4", TensorProto.INT4, [5], [1, 2, 3, -4, 5]))
    path = tmp_path / "small.onnx"
    path.write_bytes(model.SerializeToString())
    found = facts_of(miniort, str(path))
    file = found["files"][0]
    assert file["functions"] == [{"name": "mine.Twice", "nodes": 1, "calls": 1}]
    assert (file["nodes"], file["subgraphs"]) == (5, 2)
    assert file["outputs"][1] == {"name": "s", "type": "sequence", "shape": None}
    assert {"type": "int4", "tensors": 1, "parameters": 5, "bytes": 3} in file["weights"]
    assert "mine.Nothing" in found["graphs"]["small.onnx"]["unsupported"]
    assert any(line.startswith("no kernel for mine.Nothing:") for line in lines_of(miniort, str(path)))


def ambiguous(folder: Path) -> Path:
    """A decoder whose tokens can't be told from its names."""
    cache = [(f"past.0.{kind}", f"present.0.{kind}") for kind in "kv"]
    nodes = [helper.make_node("Gather", ["table", "words"], ["logits"])]
    nodes += [helper.make_node("Reshape", ["logits", "shape"], ["new"])]
    nodes += [helper.make_node("Concat", [past, "new"], [present], axis=2) for past, present in cache]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in ("words", "more_words")]
    inputs += [helper.make_tensor_value_info(past, TensorProto.FLOAT, ["batch", 1, "past", 4]) for past, _ in cache]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", 4])]
    outputs += [helper.make_tensor_value_info(present, TensorProto.FLOAT, ["batch", 1, "total", 4]) for _, present in cache]
    weights = [numpy_helper.from_array(np.eye(4, dtype=np.float32), "table"), numpy_helper.from_array(np.array([0, 1, -1, 4]), "shape")]
    model = helper.make_model(helper.make_graph(nodes, "decoder", inputs, outputs, weights), opset_imports=[helper.make_opsetid("", 18)])
    path = folder / "ambiguous.onnx"
    onnx.save(model, path)
    return path


def test_an_ambiguity_is_shown_with_the_option_that_settles_it(miniort: Miniort, tmp_path: Path) -> None:
    path = str(ambiguous(tmp_path))
    assert "several could be the tokens" in facts_of(miniort, path)["not_a_decoder"]
    assert any("--bind tokens=NAME" in line for line in lines_of(miniort, path))
    roles = facts_of(miniort, path, "--bind", "tokens=words", "--bind", "token_type_ids=more_words")["decoder"]["roles"]
    assert {role["role"]: role["name"] for role in roles}["token_type_ids"] == "more_words"
    wrong = miniort("inspect", path, "--bind", "tokens=nothing")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "there is no such name; seen: 'words'" in wrong.stderr
    generated = miniort("generate", "x", "--model", path)
    assert generated.exit_code == 2
    assert "several could be the tokens" in generated.stderr


@pytest.mark.parametrize("content", [b"", b"no model at all", None])
def test_a_damaged_file_is_one_line(miniort: Miniort, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "damaged.onnx"
    path.write_bytes((DATA / "gpt2_optimum" / "model.onnx").read_bytes()[:30_000] if content is None else content)
    result = miniort("inspect", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "damaged.onnx" in result.stderr


def test_a_file_that_is_not_there(miniort: Miniort) -> None:
    result = miniort("inspect", "nothing.onnx")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
