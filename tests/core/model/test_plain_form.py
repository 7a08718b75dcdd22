"""Forms of a model that onnx-ir doesn't read: sparse tensors, map types. They load, and the model that was given stays as it is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from miniort.model.loading import load_model
from miniort.model.plain_form import MAP_TYPES, plain_form


def sparse(name, values, indices, dims):
    indices = np.array(indices)
    number = helper.np_dtype_to_tensor_dtype(np.array(values).dtype)
    return helper.make_sparse_tensor(
        helper.make_tensor(name, number, [len(values)], values),
        helper.make_tensor("i", TensorProto.INT64, indices.shape, indices.ravel()),
        dims,
    )


def model_of(nodes, inputs=(), outputs=("y",), sparse_initializer=()):
    infos = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph(nodes, "g", list(inputs), infos, sparse_initializer=list(sparse_initializer))
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


SPARSE = [
    (sparse("v", [5.0, 7.0], [1, 3], [4]), [0, 5, 0, 7]),
    (sparse("v", [5.0, 7.0], [[0, 1], [1, 0]], [2, 2]), [[0, 5], [7, 0]]),
    (sparse("v", [5.0, 7.0], [1, 2], [2, 2]), [[0, 5], [7, 0]]),
    (sparse("v", [], np.zeros((0, 2), np.int64), [2, 2]), [[0, 0], [0, 0]]),
]


@pytest.mark.parametrize(("tensor", "want"), SPARSE)
def test_sparse_constants_and_initializers(tensor, want):
    model = model_of([helper.make_node("Constant", [], ["y"], sparse_value=tensor)])
    before = model.SerializeToString()
    (node,) = load_model(model).graph
    assert node.attributes["value"].as_tensor().numpy().tolist() == want
    assert model.SerializeToString() == before
    loaded = load_model(model_of([helper.make_node("Neg", ["v"], ["y"])], sparse_initializer=[tensor]).SerializeToString())
    assert loaded.graph.initializers["v"].const_value.numpy().tolist() == want


def test_sparse_constants_in_branches():
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["b"], sparse_value=SPARSE[0][0])], "b", [], [helper.make_empty_tensor_value_info("b")]
    )
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    (node,) = load_model(model_of([helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)], [condition])).graph
    (constant,) = node.attributes["then_branch"].as_graph()
    assert constant.attributes["value"].as_tensor().numpy().tolist() == SPARSE[0][1]


def test_map_types():
    kind = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.DOUBLE, []))
    kinds = {
        "x": kind,
        "s": helper.make_sequence_type_proto(kind),
        "o": helper.make_optional_type_proto(helper.make_sequence_type_proto(kind)),
    }
    inputs = [helper.make_value_info(name, each) for name, each in kinds.items()]
    node = helper.make_node("DictVectorizer", ["x"], ["y"], domain="ai.onnx.ml", string_vocabulary=["a"])
    model = model_of([node], inputs)
    before = model.SerializeToString()
    text = "map(string,tensor(double))"
    assert load_model(model).meta[MAP_TYPES] == {"x": text, "s": f"seq({text})", "o": f"optional(seq({text}))"}
    assert model.SerializeToString() == before


def test_a_model_without_them_is_not_copied():
    model = model_of([helper.make_node("Neg", ["x"], ["y"])], [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])])
    plain, types = plain_form(model)
    assert plain is model
    assert types == {}
    assert isinstance(plain, onnx.ModelProto)
