"""What onnx-ir doesn't read, put into what it does: sparse tensors become dense ones, map types are taken out and kept as text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx

from miniort.types import dtype_from_onnx, type_string

MAP_TYPES = "miniort.map_types"
"""The key in an onnx-ir model's `meta` of the types that were taken out: name of the value -> ONNX's type string."""


def plain_form(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The model without sparse tensors and map types, a copy if it has any, and its map types by value: `seq(map(int64,tensor(float)))`."""
    if not any(map(_is_special, _graphs(proto))) and next(_sparse_attributes(proto), None) is None:
        return proto, {}
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    types = {}
    for graph in _graphs(copy):
        for info in _infos(graph):
            if _has_map(info.type):
                types[info.name] = _text(info.type)
                info.ClearField("type")
        for sparse in graph.sparse_initializer:
            graph.initializer.append(_dense(sparse))
        del graph.sparse_initializer[:]
    for attribute in _sparse_attributes(copy):
        attribute.t.CopyFrom(_dense(attribute.sparse_tensor))
        attribute.ClearField("sparse_tensor")
        attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
    return copy, types


def _is_special(graph: onnx.GraphProto) -> bool:
    return bool(graph.sparse_initializer) or any(_has_map(info.type) for info in _infos(graph))


def _graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The model's graph and all sub-graphs, of its functions too."""
    pending = [proto.graph]
    nodes = [node for function in proto.functions for node in function.node]
    while pending or nodes:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    pending.append(attribute.g)
                pending.extend(attribute.graphs)
        nodes = []
        if pending:
            graph = pending.pop()
            yield graph
            nodes = list(graph.node)


def _infos(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.output, *graph.value_info)


def _sparse_attributes(proto: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    """The attribute `sparse_value` of each `Constant` that has one."""
    for nodes in (*(graph.node for graph in _graphs(proto)), *(function.node for function in proto.functions)):
        for node in nodes:
            yield from (attribute for attribute in node.attribute if attribute.type == onnx.AttributeProto.SPARSE_TENSOR)


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    """The tensor with zeros in it. Its indices are [values] in row-major order, or [values, rank]."""
    values, indices = onnx.numpy_helper.to_array(sparse.values), onnx.numpy_helper.to_array(sparse.indices)
    dense = np.full(tuple(sparse.dims), "" if values.dtype == object else 0, values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return onnx.numpy_helper.from_array(dense, sparse.values.name)


def _has_map(kind: onnx.TypeProto) -> bool:
    if kind.HasField("sequence_type"):
        return _has_map(kind.sequence_type.elem_type)
    if kind.HasField("optional_type"):
        return _has_map(kind.optional_type.elem_type)
    return bool(kind.HasField("map_type"))


def _text(kind: onnx.TypeProto) -> str:
    if kind.HasField("sequence_type"):
        return f"seq({_text(kind.sequence_type.elem_type)})"
    if kind.HasField("optional_type"):
        return f"optional({_text(kind.optional_type.elem_type)})"
    if kind.HasField("map_type"):
        key = type_string(dtype_from_onnx(kind.map_type.key_type))[len("tensor(") : -1]
        return f"map({key},{_text(kind.map_type.value_type)})"
    return type_string(dtype_from_onnx(kind.tensor_type.elem_type) if kind.tensor_type.elem_type else None)
