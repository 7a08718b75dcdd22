"""Which files an ONNX graph's weights lie in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx

from miniort.errors import ModelError


def external_locations(graph: Path) -> list[str]:
    """The locations that tensors of an ONNX file name, each once: paths relative to its folder. ModelError if it's damaged."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.load(graph, load_external_data=False)
    except (DecodeError, OSError) as error:
        raise ModelError(f"{graph} can't be read as ONNX: {error}") from None
    tensors = [*_tensors(model.graph), *(tensor for function in model.functions for tensor in _node_tensors(function.node))]
    external = (tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL)
    return list(dict.fromkeys(entry.value for tensor in external for entry in tensor.external_data if entry.key == "location"))


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    """Those in attributes, sub-graphs included."""
    for node in nodes:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for graph in (attribute.g, *attribute.graphs):
                yield from _tensors(graph)
