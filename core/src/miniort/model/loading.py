"""Loading a model onto onnx-ir: from a path, from bytes, or from a ModelProto."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from miniort.errors import ModelError
from miniort.model.file_stamps import FileStamp
from miniort.model.plain_form import MAP_TYPES, plain_form
from miniort.model.weights import WeightStore
from miniort.types import dtype_from_onnx

EXTERNAL_FILES = "miniort.external_files"
"""The key in an onnx-ir model's `meta` of the files that its weights lie in: location, as the model names it -> (path, `FileStamp`)."""

ModelLike: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model"

# onnx-ir logs a warning for much of what is an error here, or of no interest. Without a handler Python would print it to stderr.
logging.getLogger("onnx_ir").addHandler(logging.NullHandler())


def load_model(model: ModelLike, base_dir: str | os.PathLike[str] | None = None, weights: WeightStore | None = None) -> ir.Model:
    """An onnx-ir model whose weights in external files are memory-mapped through `weights` (None: a store of its own).

    base_dir: the folder that external data is looked for in; None for the folder of the model's file. A model given as bytes or as a
    ModelProto has no folder, so it needs one if it has external data.
    Raises ModelError if the file is missing or damaged, is no valid ONNX graph, or wants external data from outside of its folder.
    """
    if isinstance(model, ir.Model):
        _name_default_domain(model)
        _name_nodes(model)
        return model
    proto, name = _read(model)
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(f"{name}: no ONNX model: it has no {'opset import' if proto.HasField('graph') else 'graph'}")
    folder = Path(base_dir) if base_dir is not None else Path(model).parent if isinstance(model, str | os.PathLike) else None
    try:
        plain, map_types = plain_form(proto)
        loaded = ir.serde.deserialize_model(plain)
    except Exception as error:
        # Whatever may be wrong with a damaged proto, onnx-ir wraps it, often several times; the innermost says what it was.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ModelError(f"{name}: the graph can't be understood: {type(cause).__name__}: {cause}") from error
    loaded.meta[MAP_TYPES] = map_types
    _map_external_data(loaded, name, folder, WeightStore() if weights is None else weights)
    _name_default_domain(loaded)
    _name_nodes(loaded)
    _forget_question_marks(loaded)
    _make_old_initializers_constant(loaded)
    _sort(loaded, name)
    check_graph(loaded, name)
    return loaded


def _read(model: ModelLike) -> tuple[onnx.ModelProto, str]:
    if isinstance(model, onnx.ModelProto):
        return model, "the given ModelProto"
    name, data = "the given bytes", model
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        try:
            data = Path(model).read_bytes()
        except FileNotFoundError:
            raise ModelError(f"{name}: no such file") from None
        except OSError as error:
            raise ModelError(f"{name}: can't be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelError(f"{name!r}: can't be read: {error}") from error
    if not isinstance(data, bytes):
        raise ModelError(f"a model is a path, bytes, a ModelProto or an onnx-ir model; found {type(model).__name__}")
    if not data:
        raise ModelError(f"{name}: empty (0 bytes)")
    try:
        return onnx.ModelProto.FromString(data), name
    except DecodeError:
        raise ModelError(f"{name}: no ONNX model, or one that was cut short or damaged ({len(data):,} bytes)") from None


def _map_external_data(model: ir.Model, name: str, folder: Path | None, weights: WeightStore) -> None:
    """Replace every external tensor by an array that is mapped from its file."""
    files: dict[str, tuple[Path, FileStamp]] = {}
    model.meta[EXTERNAL_FILES] = files

    def mapped(tensor: ir.ExternalTensor) -> ir.Tensor[Any]:
        if folder is None:
            raise ModelError(
                f"{name}: weight {tensor.name!r} is in the external file {os.fspath(tensor.location)!r}; "
                "give base_dir, the folder that it is in"
            )
        location = os.fspath(tensor.location)
        path = resolve_external_path(folder, location)
        if location not in files:
            with suppress(OSError):  # a missing file is an error with more to say in a moment
                files[location] = path, FileStamp.of(path)
        try:
            shape = tuple(int(size) for size in tensor.shape.numpy())
            dtype = dtype_from_onnx(int(tensor.dtype))
        except (KeyError, TypeError, ValueError):
            raise ModelError(f"{name}: external weight {tensor.name!r} has no fixed shape and element type") from None
        array = weights.map_file(path, tensor.offset or 0, tensor.length, dtype, shape)
        return ir.Tensor(array, dtype=tensor.dtype, shape=ir.Shape(shape), name=tensor.name)

    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = mapped(value.const_value)
    for node in all_nodes(model):
        for attribute in list(node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, mapped(attribute.value))


def resolve_external_path(folder: Path, location: str) -> Path:
    """The file that external data lies in. ModelError if that's outside of the model's folder.

    Symbolic links may lead out of the folder only where a hub cache made them: from `<cache>/models--<name>/snapshots/<revision>/…` to
    `<cache>/models--<name>/blobs/…`, and from there to `<cache>/blobs/…`, which repositories share.
    """
    root = Path(os.path.abspath(folder))
    path = Path(os.path.normpath(root / location))
    if Path(location).is_absolute() or not path.is_relative_to(root) or path == root:
        raise ModelError(f"external data {location!r} is outside of the model's folder {str(root)!r}: refused, as it could be any file")
    real = Path(os.path.realpath(path))
    if real.is_relative_to(os.path.realpath(root)):
        return path
    for ancestor in (root, *root.parents):
        if ancestor.parent.name != "snapshots":
            continue
        repository = ancestor.parent.parent
        shared = [repository.parent] if repository.name.startswith("models--") else []
        if any(real.is_relative_to(os.path.realpath(place / "blobs")) for place in (repository, *shared)):
            return path
    raise ModelError(
        f"external data {location!r} is a link to {str(real)!r}, outside of the model's folder and of a hub cache around it: refused"
    )


def _name_default_domain(model: ir.Model) -> None:
    """Call the default domain "", which some exporters call by its long name."""
    for imports in (model.opset_imports, *(function.opset_imports for function in model.functions.values())):
        if "ai.onnx" in imports:
            imports[""] = imports.pop("ai.onnx")


def _name_nodes(model: ir.Model) -> None:
    """Give nodes without a name one, so that errors and `explain()` can name them: the op and a number."""
    taken = {node.name for node in all_nodes(model)}
    counts: Counter[str] = Counter()
    for node in all_nodes(model):
        while not node.name:
            name = f"{node.op_type}_{counts[node.op_type]}"
            counts[node.op_type] += 1
            if name not in taken:
                node.name = name


def _forget_question_marks(model: ir.Model) -> None:
    """Take a size that is called "?" for one without a name: some exporters call all unknown sizes so, and equal names mean equal sizes."""
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.outputs, *(output for node in graph for output in node.outputs)):
            if value.shape is not None and any(getattr(size, "value", size) == "?" for size in value.shape):
                value.shape = ir.Shape([None if getattr(size, "value", size) == "?" else size for size in value.shape])


FIRST_WITH_CONSTANTS = 4
"""The IR version from which on an initializer needn't be an input as well, and one that is has a value that a feed may replace."""


def _make_old_initializers_constant(model: ir.Model) -> None:
    """Make initializers that are inputs only because an old model had to list them there constants, as onnxruntime does."""
    if model.ir_version < FIRST_WITH_CONSTANTS:
        model.graph.inputs[:] = [value for value in model.graph.inputs if value.const_value is None]
        model.ir_version = FIRST_WITH_CONSTANTS


def _sort(model: ir.Model, name: str) -> None:
    """Put nodes behind what they use; some exporters don't."""
    try:
        model.graph.sort()
        for function in model.functions.values():
            function.sort()
    except ValueError as error:
        raise ModelError(f"{name}: the graph has a cycle: {error}") from error


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node of the model: of its graph, of sub-graphs, and of its functions."""
    yield from ir.traversal.RecursiveGraphIterator(model.graph)
    for function in model.functions.values():
        yield from ir.traversal.RecursiveGraphIterator(function)


def check_graph(model: ir.Model, name: str) -> None:
    """ModelError unless every value that is used is an input, an initializer, or the output of a node before it."""
    _check_scope(model.graph, name, frozenset())
    if not model.graph.outputs:
        raise ModelError(f"{name}: the graph has no outputs")


def _check_scope(graph: ir.Graph, name: str, outer: frozenset[int]) -> None:
    known = set(outer)
    known.update(id(value) for value in graph.inputs)
    known.update(id(value) for value in graph.initializers.values())
    for node in graph:
        for value in node.inputs:
            if value is not None and id(value) not in known:
                raise ModelError(
                    f"{name}: node {node.name!r} ({node.op_type}) uses {value.name!r}, "
                    "which nothing computes before it: no input, initializer or node has this name"
                )
        for attribute in node.attributes.values():
            for body in attribute_graphs(attribute):
                _check_scope(body, name, frozenset(known))
        known.update(id(value) for value in node.outputs)
    for value in graph.outputs:
        if id(value) not in known:
            raise ModelError(f"{name}: nothing computes the output {value.name!r}")


def attribute_graphs(attribute: ir.Attr) -> list[ir.Graph]:
    """The graphs that an attribute holds: none, one or several."""
    if attribute.is_ref():
        return []
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    if attribute.type == ir.AttributeType.GRAPHS:
        return list(attribute.as_graphs())
    return []


def attribute_value(attribute: ir.Attr) -> Any:
    """An attribute as a Python value: int, float, str, a tuple of these, or a NumPy array for a tensor. Graphs are left as they are."""
    kinds = ir.AttributeType
    if attribute.type == kinds.TENSOR:
        return tensor_to_array(attribute.as_tensor())
    if attribute.type == kinds.TENSORS:
        return tuple(tensor_to_array(tensor) for tensor in attribute.as_tensors())
    if attribute.type in (kinds.FLOATS, kinds.INTS, kinds.STRINGS):
        return tuple(attribute.value)
    return attribute.value


def tensor_to_array(tensor: ir.TensorProtocol) -> Any:
    """A tensor as an array of miniort's dtypes; text as an object array of str. ModelError if its bytes don't fit its shape."""
    try:
        array = tensor.numpy()
    except Exception as error:
        # onnx-ir leaves this to NumPy and protobuf, which raise this and that.
        raise ModelError(f"the tensor {tensor.name!r} of the model is damaged: {error}") from error
    if tensor.dtype == ir.DataType.STRING:
        text = np.array([item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item) for item in array.ravel()], object)
        return text.reshape(array.shape)
    return array
