"""Loading: what is accepted, and that whatever isn't is one clear ModelError."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, parser

from miniort import InferenceSession, SessionOptions, load_model
from miniort.errors import InputError, MiniortError, ModelError

ADD = """<ir_version: 10, opset_import: ["": 18]>
g (float[N] x) => (float[N] y) <float[2] w = {10, 20}> { h = Relu(x)  y = Add(h, w) }"""

FEED = {"x": np.array([-1, 2], np.float32)}


def add_model() -> onnx.ModelProto:
    return parser.parse_model(ADD)


def run(model: object, **options: object) -> list[float]:
    (y,) = InferenceSession(model, **options).run(None, FEED)  # type: ignore[arg-type]
    return list(y)


def test_every_way_to_give_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(add_model(), path)
    for model in (path, str(path), path.read_bytes(), add_model(), load_model(path)):
        assert run(model) == [10, 22]


def test_the_given_proto_is_left_as_it_was() -> None:
    proto = add_model()
    before = proto.SerializeToString(deterministic=True)
    run(proto)
    assert proto.SerializeToString(deterministic=True) == before
    assert run(proto) == [10, 22]


def realistic_model() -> onnx.ModelProto:
    """Inline weights of several kinds, a sub-graph, attributes of several kinds; small enough to cut everywhere."""
    text = """<ir_version: 10, producer_name: "test", opset_import: ["": 18]>
    g (float[N, 4] x, bool c) => (float[N, 4] y)
    <float[4, 4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, int64[2] s = {0, -1}>
    {
        h = MatMul(x, w)
        k = Constant <value = float[4] {1, 2, 3, 4}>()
        r = Reshape(h, s)
        t = Transpose <perm = [0, 1]>(r)
        y = If(c) <then_branch = g1 () => (float[N, 4] a) { a = Add(t, k) }, else_branch = g2 () => (float[N, 4] b) { b = Mul(t, k) }>
    }"""
    return parser.parse_model(text)


def test_a_file_that_was_cut_short_anywhere_is_a_model_error() -> None:
    data = realistic_model().SerializeToString()
    session = InferenceSession(data)
    assert session.run(None, {"x": np.ones((1, 4), np.float32), "c": np.array(True)})[0].tolist() == [[29, 34, 39, 44]]
    for cut in range(len(data)):
        with pytest.raises(ModelError) as caught:
            InferenceSession(data[:cut])
        assert "\n" not in str(caught.value), cut


def test_a_file_with_a_byte_changed_is_a_model_error_or_still_a_model() -> None:
    """Whatever the damage, nothing but MiniortError leaves, and nothing takes down the interpreter."""
    data = realistic_model().SerializeToString()
    rng = np.random.default_rng(0)
    for position in rng.choice(len(data), 150, replace=False):
        broken = bytearray(data)
        broken[position] ^= int(rng.integers(1, 256))
        with contextlib.suppress(MiniortError):
            InferenceSession(bytes(broken))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"This is a readme, not a model.\n", "no ONNX model"),
        (b"\x00" * 100, "no ONNX model"),
        (b"PK\x03\x04" + b"\x14" * 60, "no ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "no ONNX model"),
    ],
)
def test_a_file_of_another_kind(tmp_path: Path, contents: bytes, message: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(contents)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.onnx: no such file"):
        load_model(tmp_path / "nowhere.onnx")
    with pytest.raises(ModelError, match="can't be read"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="path, bytes"):
        load_model(42)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"can't be read|no such file"):
        load_model(f"{tmp_path}/a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(add_model(), path)
    path.chmod(0)
    with pytest.raises(ModelError, match="can't be read"):
        load_model(path)


def test_nodes_in_any_order() -> None:
    proto = add_model()
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes[::-1])
    assert run(proto) == [10, 22]


def test_a_cycle() -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    proto = add_model()
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes, helper.make_node("Relu", ["b"], ["y"])])
    with pytest.raises(ModelError, match="cycle"):
        load_model(proto)


def test_a_value_that_nothing_computes() -> None:
    proto = add_model()
    proto.graph.node[0].input[0] = "ghost"
    with pytest.raises(ModelError, match=r"Relu.*'ghost'.*nothing computes"):
        load_model(proto)


def test_a_value_that_nothing_computes_in_a_body() -> None:
    proto = realistic_model()
    body = next(a.g for a in proto.graph.node[-1].attribute if a.name == "then_branch")
    body.node[0].input[0] = "ghost"
    with pytest.raises(ModelError, match="'ghost'"):
        load_model(proto)


def test_a_body_may_not_read_what_is_inside_of_its_sibling() -> None:
    proto = realistic_model()
    bodies = {a.name: a.g for a in proto.graph.node[-1].attribute}
    bodies["else_branch"].node[0].input[0] = "a"
    with pytest.raises(ModelError, match="'a'"):
        load_model(proto)


def test_an_output_that_nothing_computes() -> None:
    proto = add_model()
    proto.graph.output[0].name = "z"
    with pytest.raises(ModelError, match="nothing computes the output 'z'"):
        load_model(proto)


def test_a_graph_without_outputs() -> None:
    proto = add_model()
    del proto.graph.output[:]
    with pytest.raises(ModelError, match="no outputs"):
        load_model(proto)


def test_a_newer_opset_than_the_installed_onnx_knows() -> None:
    proto = add_model()
    proto.opset_import[0].version = 9999
    with pytest.raises(ModelError, match=r"imports opset 9999.*upgrade onnx"):
        InferenceSession(proto)


def test_the_long_name_of_the_default_domain() -> None:
    proto = add_model()
    proto.opset_import[0].domain = "ai.onnx"
    assert run(proto) == [10, 22]
    proto.graph.node[0].domain = "ai.onnx"
    assert run(proto) == [10, 22]
    proto.opset_import[0].version = 9999
    with pytest.raises(ModelError, match="imports opset 9999"):
        InferenceSession(proto)


def test_initializers_among_the_inputs_are_defaults() -> None:
    proto = add_model()
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, ["M"]))
    session = InferenceSession(proto)
    assert [each.name for each in session.get_inputs()] == ["x"]
    (overridable,) = session.get_overridable_initializers()
    assert (overridable.name, overridable.type, list(overridable.shape)) == ("w", "tensor(float)", ["M"])
    assert session.run(None, FEED)[0].tolist() == [10, 22]
    assert session.run(None, {**FEED, "w": np.array([1, 2], np.float32)})[0].tolist() == [1, 4]
    assert session.run(None, {**FEED, "w": np.array([7], np.float32)})[0].tolist() == [7, 9]
    assert session.run(None, FEED)[0].tolist() == [10, 22], "a feed must not stay"


def test_initializers_among_the_inputs_of_an_old_model() -> None:
    """Before IR version 4 every initializer had to be listed as an input as well."""
    proto = add_model()
    proto.ir_version = 3
    proto.opset_import[0].version = 8
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2]))
    session = InferenceSession(proto)
    assert [each.name for each in session.get_inputs()] == ["x"]
    assert session.run(None, FEED)[0].tolist() == [10, 22]
    assert session.get_overridable_initializers() == [], "they had to be there, so that says nothing"
    with pytest.raises(InputError, match="no input 'w'"):
        session.run(None, {**FEED, "w": np.array([1, 2], np.float32)})


def test_inline_weights_whose_bytes_do_not_fit_their_shape() -> None:
    proto = add_model()
    weight = proto.graph.initializer[0]
    weight.CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, [2], np.ones(2, np.float32).tobytes(), raw=True))
    weight.raw_data = weight.raw_data[:-3]
    with pytest.raises(ModelError, match="'w'"):
        InferenceSession(proto)
    weight.raw_data = b""
    with pytest.raises(ModelError, match="'w'"):
        InferenceSession(proto)


def test_nodes_without_names_get_some() -> None:
    session = InferenceSession(add_model())
    names = [node.name for node in session.explain().nodes]
    assert all(names)
    assert len(set(names)) == len(names) == 2


def test_an_output_without_a_type() -> None:
    proto = add_model()
    proto.graph.output[0].ClearField("type")
    assert run(proto) == [10, 22]
    assert run(proto, sess_options=SessionOptions(graph_optimization_level="none")) == [10, 22]


def test_an_ir_model_is_taken_as_it_is() -> None:
    model = ir.serde.deserialize_model(add_model())
    assert load_model(model) is model
    assert run(model) == [10, 22]


def test_a_branch_that_hands_on_an_outer_value_as_it_is() -> None:
    """Other runtimes refuse this as well: it needs an Identity."""
    text = """<ir_version: 10, opset_import: ["": 18]>
    g (float[2] x, bool c) => (float[2] y) {
        t = Relu(x)
        y = If(c) <then_branch = g1 () => (float[2] t) { unused = Neg(t) }, else_branch = g2 () => (float[2] b) { b = Neg(t) }>
    }"""
    with pytest.raises(ModelError, match="nothing computes the output 't'"):
        load_model(parser.parse_model(text))
