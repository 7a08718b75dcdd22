"""What an ONNX file says of itself, without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniort.errors import ModelError

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class ValueFacts:
    """An input or output: its type as ONNX writes it, and its sizes: numbers, names, or None for one that isn't known."""

    name: str
    type: str
    shape: list[int | str | None] | None


@dataclass(frozen=True)
class WeightFacts:
    """Tensors of one element type that a file holds: how many, of how many numbers, in how many bytes."""

    type: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class FunctionFacts:
    """A function that a model defines: how many nodes it has, and how often it's called."""

    name: str
    nodes: int
    calls: int


@dataclass(frozen=True)
class GraphFacts:
    """One ONNX file. `ops` counts the nodes of all its graphs by op; `overridable` are inputs that have a default."""

    path: str
    bytes: int
    ir_version: int
    producer: str
    opsets: dict[str, int]
    inputs: list[ValueFacts]
    overridable: int
    outputs: list[ValueFacts]
    nodes: int
    subgraphs: int
    functions: list[FunctionFacts]
    weights: list[WeightFacts]
    external: dict[str, int]
    ops: dict[str, int]


def read_facts(path: Path) -> GraphFacts:
    """The facts of a file. ModelError if it can't be read as ONNX."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        data = path.read_bytes()
        proto = onnx.ModelProto.FromString(data)
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror}") from None
    except DecodeError:
        raise ModelError(f"{path}: no ONNX model, or one that was cut short or damaged") from None
    size = len(data)
    del data
    graphs = list(_graphs(proto.graph))
    nodes = [node for graph in graphs for node in graph.node]
    ops = Counter(_op(node) for node in nodes)
    defaults = {tensor.name for tensor in proto.graph.initializer}
    return GraphFacts(
        path=str(path),
        bytes=size,
        ir_version=proto.ir_version,
        producer=" ".join(text for text in (proto.producer_name, proto.producer_version) if text),
        opsets={each.domain or "ai.onnx": each.version for each in proto.opset_import},
        inputs=[_value(value) for value in proto.graph.input if value.name not in defaults],
        overridable=sum(value.name in defaults for value in proto.graph.input),
        outputs=[_value(value) for value in proto.graph.output],
        nodes=len(nodes),
        subgraphs=len(graphs) - 1,
        functions=[_function(function, ops) for function in proto.functions],
        weights=_weights(list(_tensors(graphs))),
        external=_external(graphs),
        ops=dict(ops.most_common()),
    )


def qualified(domain: str, op: str) -> str:
    """`Add`, `com.microsoft.FastGelu`."""
    return op if domain in ("", "ai.onnx") else f"{domain}.{op}"


def _op(node: onnx.NodeProto) -> str:
    return qualified(node.domain, node.op_type)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all that its nodes hold."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graphs(inner)


def _tensors(graphs: Sequence[onnx.GraphProto]) -> Iterator[onnx.TensorProto]:
    """Initializers, what `Constant` nodes hold, and the values of sparse ones."""
    for graph in graphs:
        yield from graph.initializer
        yield from (sparse.values for sparse in graph.sparse_initializer)
        for node in graph.node:
            if node.op_type == "Constant":
                yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))


def _weights(tensors: Sequence[onnx.TensorProto]) -> list[WeightFacts]:
    import onnx_ir as ir

    counts: dict[int, list[int]] = {}
    for tensor in tensors:
        numbers = prod(tensor.dims)
        dtype = ir.DataType(tensor.data_type)
        size = sum(map(len, tensor.string_data)) if dtype == ir.DataType.STRING else ceil(numbers * dtype.bitwidth / 8)
        entry = counts.setdefault(tensor.data_type, [0, 0, 0])
        for place, more in enumerate((1, numbers, size)):
            entry[place] += more
    found = [WeightFacts(ir.DataType(dtype).name.lower(), *entry) for dtype, entry in counts.items()]
    return sorted(found, key=lambda each: -each.bytes)


def _external(graphs: Sequence[onnx.GraphProto]) -> dict[str, int]:
    """Files that weights lie in, and how many bytes of each are used."""
    import onnx

    files: dict[str, int] = {}
    for tensor in _tensors(graphs):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            location = entries.get("location", "?")
            length = entries.get("length", "0")
            files[location] = files.get(location, 0) + (int(length) if length.isdigit() else 0)
    return files


def _function(function: onnx.FunctionProto, ops: Counter[str]) -> FunctionFacts:
    name = qualified(function.domain, function.name)
    return FunctionFacts(name, len(function.node), ops[name])


def _value(value: onnx.ValueInfoProto) -> ValueFacts:
    kind = value.type.WhichOneof("value") or ""
    if kind != "tensor_type":
        return ValueFacts(value.name, kind.removesuffix("_type") or "unknown", None)
    tensor = value.type.tensor_type
    shape = [_size(size) for size in tensor.shape.dim] if tensor.HasField("shape") else None
    return ValueFacts(value.name, f"tensor({_type_name(tensor.elem_type)})", shape)


def _type_name(code: int) -> str:
    from miniort.types import dtype_from_onnx, type_string

    try:
        return type_string(dtype_from_onnx(code)).removeprefix("tensor(").removesuffix(")")
    except (KeyError, ValueError):
        return f"element type {code}"


def _size(size: Any) -> int | str | None:
    kind = size.WhichOneof("value")
    return None if kind is None else int(size.dim_value) if kind == "dim_value" else str(size.dim_param) or None
