"""`miniort optimise` says what each pass changed, and writes a model that is valid and gives what the given one gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import Result
from onnx import helper, numpy_helper, parser

from miniort import InferenceSession, SessionOptions
from miniort.runtime.optimise import optimise_model

TEXT = """<ir_version: 7, opset_import: ["": 12]> g (float[n, 4] x) => (float[n, 1] y) {
    i = Identity(x) s = Sigmoid(i) w = Mul(i, s) y = ReduceSum <axes = [1], keepdims = 1>(w) }"""
X = np.random.default_rng(0).standard_normal((3, 4), dtype=np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(TEXT), path)
    return path


def test_writes_a_valid_model(miniort: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    out = tmp_path / "raised.onnx"
    result = miniort("optimise", str(model), "-o", str(out))
    assert result.exit_code == 0, result.stderr
    assert "raise-swish" in result.stdout
    assert "4 nodes before, 2 after; opset ai.onnx 24" in result.stdout
    assert f"wrote {out}" in result.stdout
    onnx.checker.check_model(str(out), full_check=True)
    assert [node.op_type for node in onnx.load(out).graph.node] == ["Swish", "ReduceSum"]
    plain, raised = (InferenceSession(path, SessionOptions("none")).run(None, {"x": X})[0] for path in (model, out))
    np.testing.assert_allclose(raised, plain, rtol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "raised.onnx"]


def test_a_level(miniort: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    out = tmp_path / "basic.onnx"
    assert miniort("optimise", str(model), "-o", str(out), "--level", "basic").exit_code == 0
    assert [node.op_type for node in onnx.load(out).graph.node] == ["Sigmoid", "Mul", "ReduceSum"]
    assert onnx.load(out).opset_import[0].version == 12


def test_ops_of_our_own_are_made_at_the_level_all_alone(miniort: Callable[..., Result], tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 1, 4, 4] x, float[1, 1, 3, 3] w) => (float[1, 1, 2, 2] y) {
        c = Conv(x, w) y = Relu(c) }"""
    path, out = tmp_path / "conv.onnx", tmp_path / "out.onnx"
    onnx.save(parser.parse_model(text), path)
    assert miniort("optimise", str(path), "-o", str(out)).exit_code == 0
    assert [node.op_type for node in onnx.load(out).graph.node] == ["Conv", "Relu"]
    everything = json.loads(miniort("optimise", str(path), "--level", "all", "--json").stdout)
    assert everything["ops"] == {"FusedConv": 1}


def test_every_change_and_json(miniort: Callable[..., Result], model: Path) -> None:
    every = miniort("optimise", str(model), "--changes").stdout
    assert "x · sigmoid(1 x) in 2 nodes made Swish" in every
    found: dict[str, Any] = json.loads(miniort("optimise", str(model), "--json").stdout)
    assert (found["nodes_before"], found["nodes_after"], found["opsets"]) == (4, 2, {"ai.onnx": 24})
    assert found["ops"] == {"Swish": 1, "ReduceSum": 1}
    assert {"clean-up", "raise-swish", "unify-opsets"} <= {change["pass"] for change in found["changes"]}
    assert found["files"] == []


def test_weights_beside_the_model(miniort: Callable[..., Result], tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.arange(4096, dtype=np.float32).reshape(64, 64), "w")
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 64]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    result = miniort("optimise", str(path), "-o", str(out), "--external-data")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "out.onnx.data").stat().st_size == 4096 * 4
    feeds = {"x": np.ones((1, 64), np.float32)}
    np.testing.assert_array_equal(InferenceSession(out).run(None, feeds)[0], InferenceSession(path).run(None, feeds)[0])
    again = miniort("optimise", str(out), "-o", str(out), "--external-data")  # over the very files that it's read from
    assert again.exit_code == 0, again.stderr
    np.testing.assert_array_equal(InferenceSession(out).run(None, feeds)[0], InferenceSession(path).run(None, feeds)[0])


def test_errors_are_one_line_and_write_nothing(miniort: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    for arguments in (
        [str(broken), "-o", str(tmp_path / "out.onnx")],
        [str(model), "-o", str(tmp_path / "missing" / "out.onnx")],
        [str(model), "-o", str(tmp_path / "out.onnx"), "--level", "most"],
        [str(model), "-o", str(tmp_path / "out.onnx"), "--providers", "nobody"],
        [str(tmp_path / "nothing.onnx")],
    ):
        result = miniort("optimise", *arguments)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out.onnx").exists()
    assert not list(tmp_path.glob(".*"))


def test_from_a_program(model: Path) -> None:
    optimised = optimise_model(model, "all", providers=["cpu"])
    assert (optimised.nodes_before, optimised.nodes_after, optimised.opsets) == (4, 2, {"": 24})
