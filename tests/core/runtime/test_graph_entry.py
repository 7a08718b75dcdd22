"""What an entry holds is what was put in: also what ONNX's protobuf has no place for."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

from miniort import WeightStore, load_model
from miniort.graph.passes import Change
from miniort.model.constants import initial_array, set_constant
from miniort.model.loading import all_nodes
from miniort.runtime.graph_entry import PreparedGraph, UnusableEntryError, pack, unpack
from miniort.runtime.same_graph import same_model
from miniort.types import Array

TEXT = """<ir_version: 10, opset_import: ["": 21, "test": 1]>
    g (float[n, 4] x, bool b) => (float[m, 4] y, seq(float[k]) s)
    <float[4] bias = {1, 2, 3, 4}, int64[1] axes = {0}, string[2] names = {"a", "b"}>
    {
        z = Add (x, bias)
        first, "", last, "" = test.Many <alpha: float = 0.1, scales: floats = [0.1, 0.5], kind: string = "k"> (z, , names)
        y = If (b) <
            then_branch = t () => (float[n, 4] u) <float[4] inner = {5, 6, 7, 8}> { u = Mul (first, inner) },
            else_branch = e () => (float[n, 4] v) { v = Neg (last) }
        >
        s = SplitToSequence (x)
    }"""


def made(weights: WeightStore) -> ir.Model:
    model = load_model(parser.parse_model(TEXT), weights=weights)
    for name, array in arrays().items():
        value = ir.Value(name=name)
        set_constant(value, weights.intern(array))
        model.graph.register_initializer(value)
    many = next(node for node in all_nodes(model) if node.op_type == "Many")
    many.attributes["alpha"] = ir.AttrFloat32("alpha", 1 / 3)
    many.attributes["scales"] = ir.AttrFloat32s("scales", [1 / 3, 0.5, 1e300, float("nan")])
    many.version = 7
    many.outputs[0].type, many.outputs[0].shape = None, ir.Shape(["n", None, 4])
    return model


def arrays() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    large = rng.standard_normal((100, 30)).astype(np.float32)
    return {
        "large": large,
        "its transposed": large.T,
        "a part of it": large[7:93, 2:20:3],
        "backwards": large[::-1],
        "repeated": np.broadcast_to(large[0], (50, 30)),
        "in another order": np.asfortranarray(rng.standard_normal((40, 20))),
        "of three axes": rng.standard_normal((6, 7, 8)).transpose(1, 2, 0),
        "small, in another order": np.asfortranarray(rng.standard_normal((3, 5)).astype(np.float32)),
        "empty": np.empty((0, 3), np.float32),
        "bfloat16": rng.standard_normal(3000).astype(ml_dtypes.bfloat16),
        "int4": rng.integers(-8, 8, (5000,)).astype(ml_dtypes.int4),
        "few int4": rng.integers(-8, 8, (5,)).astype(ml_dtypes.int4),
        "bool": rng.integers(0, 2, 4000).astype(bool),
    }


def packed(graph: PreparedGraph, weights: WeightStore) -> Array:
    return np.frombuffer(b"".join(pack(graph, [], weights, 1 << 30)), np.uint8)


def test_all_of_a_graph_comes_back() -> None:
    weights, others = WeightStore(), WeightStore()
    model = made(weights)
    before = {value.name: value.const_value for value in model.graph.initializers.values()}
    changes = [Change("a pass", "a node", "a reason"), Change("", "ü", "")]
    notes = {"some": [1, None, {"thing": "else"}]}
    entry = packed(PreparedGraph(model, changes, notes), weights)
    assert all(np.array_equal(value.const_value.numpy(), before[value.name].numpy()) for value in model.graph.initializers.values())
    found = unpack(entry, [], None, others)
    assert found.changes == tuple(changes)
    assert found.notes == notes
    assert same_model(model, found.model, (weights, others))
    for name, array in arrays().items():
        constant = initial_array(found.model.graph.initializers[name], others)
        assert (constant.dtype, constant.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(constant, array, err_msg=name)
    assert initial_array(found.model.graph.initializers["its transposed"], others).strides == (4, 120)
    assert len(entry) < 4 * 3000 + 8 * 800 + 8 * 336 + 2 * 3000 + 5000 + 4000 + 8000, "views are kept as views"


def test_an_entry_beyond_the_limit() -> None:
    weights = WeightStore()
    with pytest.raises(UnusableEntryError, match=r"[\d,]+ bytes.*, where 10,000 are allowed"):
        pack(PreparedGraph(made(weights), [], {}), [], weights, 10_000)
    size = len(packed(PreparedGraph(made(weights), [], {}), weights))
    with pytest.raises(UnusableEntryError, match=f"^{size:,} bytes"):
        pack(PreparedGraph(made(weights), [], {}), [], weights, size - 1)


def first(model: ir.Model, op: str) -> ir.Node:
    return next(node for node in all_nodes(model) if node.op_type == op)


CHANGES: dict[str, Callable[[ir.Model], object]] = {
    "an op": lambda model: setattr(first(model, "Neg"), "op_type", "Abs"),
    "a domain": lambda model: setattr(first(model, "Many"), "domain", "other"),
    "a node's name": lambda model: setattr(first(model, "Mul"), "name", "renamed"),
    "a node's opset": lambda model: setattr(first(model, "Add"), "version", 13),
    "an attribute": lambda model: first(model, "Many").attributes.__setitem__("alpha", ir.AttrFloat32("alpha", float(np.float32(1 / 3)))),
    "one of several numbers": lambda model: first(model, "Many").attributes.__setitem__(
        "scales", ir.AttrFloat32s("scales", [1 / 3, 0.6, 1e300, float("nan")])
    ),
    "a missing attribute": lambda model: first(model, "Many").attributes.pop("kind"),
    "an input": lambda model: first(model, "Add").replace_input_with(1, first(model, "Add").inputs[0]),
    "a missing input": lambda model: first(model, "Many").replace_input_with(2, None),
    "how many outputs": lambda model: first(model, "Many").resize_outputs(3),
    "a value's name": lambda model: setattr(first(model, "Add").outputs[0], "name", "renamed"),
    "a type": lambda model: setattr(first(model, "Add").outputs[0], "dtype", ir.DataType.DOUBLE),
    "a shape": lambda model: setattr(first(model, "Add").outputs[0], "shape", ir.Shape([1, 4])),
    "a size's name": lambda model: setattr(model.graph.inputs[0], "shape", ir.Shape(["batch", 4])),
    "a constant": lambda model: set_constant(model.graph.initializers["bias"], np.array([1, 2, 3, 5], np.float32)),
    "a constant of a branch": lambda model: set_constant(
        next(value for graph in model.graphs() for value in graph.initializers.values() if value.name == "inner"), np.zeros(4, np.float32)
    ),
    "a constant less": lambda model: model.graph.initializers.pop("bool"),
    "the outputs' order": lambda model: model.graph.outputs.reverse(),
    "a shape without a type": lambda model: setattr(first(model, "Many").outputs[0], "shape", None),
    "an opset": lambda model: model.opset_imports.__setitem__("test", 2),
    "the IR version": lambda model: setattr(model, "ir_version", 9),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_tells_two_models_apart(what: str) -> None:
    stores = WeightStore(), WeightStore()
    one, other = (made(store) for store in stores)
    assert same_model(one, other, stores)
    CHANGES[what](other)
    assert not same_model(one, other, stores)
    assert not same_model(other, one, (stores[1], stores[0]))


def test_constants_in_another_order_are_other_constants() -> None:
    array = np.random.default_rng(0).standard_normal((300, 200))
    stores = WeightStore(), WeightStore()
    models = [made(store) for store in stores]
    for model, constant in zip(models, (array, np.asfortranarray(array)), strict=True):
        set_constant(model.graph.initializers["in another order"], constant)
    assert not same_model(models[0], models[1], stores)
