"""An optimised graph as one file: ONNX's protobuf, JSON for what that has no place for, and the constants that folding made.

    8 bytes    b"miniort" and the number of the format
    32 bytes   SHA-256 of all that follows
    2 × 8      lengths of the JSON and of the protobuf, little-endian
    ...        JSON, protobuf, then constants, each at a multiple of 64 bytes

Weights aren't copied: the protobuf has where they lie in the files that they came in.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.lib.array_utils import byte_bounds

from miniort.graph.passes import Change
from miniort.model.constants import initial_array, shape_of
from miniort.model.file_stamps import FileStamp, digest_of_samples
from miniort.model.loading import EXTERNAL_FILES, all_nodes, resolve_external_path
from miniort.model.plain_form import MAP_TYPES
from miniort.model.raw_data import raw_data_places
from miniort.model.weights import WeightKey, WeightStore, content_key
from miniort.types import STRING, Array, DType, dtype_from_onnx, dtype_to_onnx

_MAGIC = b"miniort\x01"
_HEAD = struct.Struct("<8s32s")
_LENGTHS = struct.Struct("<QQ")
_ALIGNMENT = 64

_SMALL = 1024
"""Bytes of a constant that stays in the protobuf."""

_ENTRY, _MODEL, _DATA = "entry", "model", "data"
"""What a constant's location begins with: where its bytes are. The number of a model file, or the location of external data, follows."""

_DIGEST, _VIEW = "miniort.digest", "miniort.view"
"""What a tensor's metadata says of its array: the digest of its content; and of a view, what of: type, shape, offset in bytes, strides."""


@dataclass(frozen=True)
class PreparedGraph:
    """What passes made of a model, and `notes` of whoever made the model of its files."""

    model: ir.Model
    changes: Sequence[Change]
    notes: Mapping[str, Any]


class UnusableEntryError(Exception):
    """An entry is damaged, isn't one, or is of weights that have changed since."""


def pack(graph: PreparedGraph, contents: Sequence[Array], weights: WeightStore, limit: int) -> list[bytes | memoryview]:
    """The parts of an entry, in order.

    contents: those of the model's own files, uint8. UnusableEntryError where its weights have just been written, as a change that
    follows at once might not show, and where the entry would have more than `limit` bytes. Raises whatever onnx-ir raises where ONNX
    can't say what the graph has.
    """
    model = graph.model
    files: Mapping[str, tuple[Path, FileStamp]] = model.meta.get(EXTERNAL_FILES, {})
    for path, stamp in files.values():
        if not stamp.settled:
            raise UnusableEntryError(f"{path} has just been written")
    data = _Data(contents, files, weights, limit)
    with _constants_elsewhere(model, data, weights):
        proto = ir.serde.serialize_model(model).SerializeToString()
    nodes = list(all_nodes(model))
    results = [(index, place, value) for index, node in enumerate(nodes) for place, value in enumerate(node.outputs)]
    text = json.dumps(
        {
            "weights": [(location, *astuple(stamp), digest_of_samples(path)) for location, (path, stamp) in files.items()],
            "changes": [(change.graph_pass, change.node, change.reason) for change in graph.changes],
            "notes": graph.notes,
            "map types": model.meta.get(MAP_TYPES, {}),
            "opsets": [(index, node.version) for index, node in enumerate(nodes) if node.version is not None],
            "floats": [(index, name, value) for index, node in enumerate(nodes) for name, value in _long_floats(node)],
            "outputs": [(index, len(node.outputs)) for index, node in enumerate(nodes) if node.outputs and not node.outputs[-1].name],
            "shapes": [(index, place, shape_of(value)) for index, place, value in results if value.type is None and value.name],
        }
    ).encode()
    body = [_LENGTHS.pack(len(text), len(proto)), text, proto]
    length = _HEAD.size + sum(map(len, body))
    body.append(bytes(-length % _ALIGNMENT))
    size = _HEAD.size + sum(map(len, (*body, *data.parts)))
    if size > limit:
        raise UnusableEntryError(f"{size:,} bytes, where {limit:,} are allowed")
    digest = hashlib.sha256()
    for part in (*body, *data.parts):
        digest.update(part)
    return [_HEAD.pack(_MAGIC, digest.digest()), *body, *data.parts]


def unpack(entry: Array, contents: Sequence[Array], folder: Path | None, weights: WeightStore) -> PreparedGraph:
    """What `pack` packed; constants are views of the entry, and of the files that they came in.

    entry: uint8. UnusableEntryError if it's none, damaged, or its weights have changed.
    """
    _check_digest(entry)
    return rebuild(entry, contents, folder, weights)


def _check_digest(entry: Array) -> None:
    """UnusableEntryError if a byte of an entry isn't what it was when it was packed."""
    if len(entry) < _HEAD.size + _LENGTHS.size:
        raise UnusableEntryError("cut short")
    magic, digest = _HEAD.unpack_from(entry.data)
    if magic != _MAGIC or digest != hashlib.sha256(entry[_HEAD.size :].data).digest():
        raise UnusableEntryError("damaged, or no entry")


def rebuild(entry: Array, contents: Sequence[Array], folder: Path | None, weights: WeightStore) -> PreparedGraph:
    """As `unpack`, for an entry whose bytes are known to be right."""
    text_length, proto_length = _LENGTHS.unpack_from(entry.data, _HEAD.size)
    start = _HEAD.size + _LENGTHS.size
    middle, end = start + text_length, start + text_length + proto_length
    facts = json.loads(bytes(entry[start:middle]))
    files = {}
    for location, *stamp, samples in facts["weights"]:
        path = resolve_external_path(folder or Path(), location)
        files[location] = path, FileStamp.of(path)
        if not files[location][1].same_file(FileStamp(*stamp)) or digest_of_samples(path) != samples:
            raise UnusableEntryError(f"{path} has changed")
    model = ir.serde.deserialize_model(onnx.ModelProto.FromString(bytes(entry[middle:end])))
    model.meta[MAP_TYPES] = facts["map types"]
    model.meta[EXTERNAL_FILES] = files
    constants = entry[end + -end % _ALIGNMENT :]
    for initializer in _initializers(model):
        if isinstance(initializer.const_value, ir.ExternalTensor):
            _fetch(initializer, constants, contents, {location: path for location, (path, _) in files.items()}, weights)
    nodes = list(all_nodes(model))
    for index, opset in facts["opsets"]:
        nodes[index].version = opset
    for index, name, value in facts["floats"]:
        attribute = ir.AttrFloat32s(name, value) if isinstance(value, list) else ir.AttrFloat32(name, value)
        nodes[index].attributes[name] = attribute
    for index, count in facts["outputs"]:
        nodes[index].resize_outputs(count)
    for index, place, shape in facts["shapes"]:
        nodes[index].outputs[place].shape = None if shape is None else ir.Shape(shape)
    return PreparedGraph(model, tuple(Change(*change) for change in facts["changes"]), facts["notes"])


def _initializers(model: ir.Model) -> Iterator[ir.Value]:
    for graph in model.graphs():
        yield from graph.initializers.values()


def _long_floats(node: ir.Node) -> Iterator[tuple[str, Any]]:
    """Attributes with a number that ONNX's 32 bits have no place for."""
    for name, attribute in node.attributes.items():
        if attribute.is_ref() or attribute.type not in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
            continue
        numbers = [attribute.value] if attribute.type == ir.AttributeType.FLOAT else list(attribute.value)
        with np.errstate(over="ignore"):
            rounded = np.array(numbers, np.float64).astype(np.float32).tolist()
        if rounded != numbers:
            yield name, attribute.value if attribute.type == ir.AttributeType.FLOAT else numbers


class _Data:
    """Where constants are kept: in the files that they came in, or else behind the graph, in `parts`.

    A constant that is a view of another one, such as a transposed embedding, is kept as that: its place is the other's.
    """

    def __init__(self, contents: Sequence[Array], files: Mapping[str, tuple[Path, FileStamp]], weights: WeightStore, limit: int) -> None:
        self._contents = contents
        self._raw_data = [raw_data_places(content) for content in contents]
        self._locations = {os.path.realpath(path): location for location, (path, _) in files.items()}
        self._weights = weights
        self._places: dict[int, tuple[Array, str, int, str | None]] = {}
        self._spans = _outermost(weights)
        self._limit = limit
        self._size = 0
        self.parts: list[bytes | memoryview] = []

    def keep(self, value: ir.Value, array: Array) -> ir.ExternalTensor:
        """Where the array is kept, as a tensor that says so."""
        root, view = self._root(array)
        if id(root) not in self._places:
            self._places[id(root)] = root, *self._place(root)
        _, location, offset, digest = self._places[id(root)]
        props = {} if digest is None else {_DIGEST: digest}
        if view is not root:
            start = view.ctypes.data - root.ctypes.data
            props[_VIEW] = json.dumps([dtype_to_onnx(root.dtype), root.shape, start, view.strides])
        return ir.ExternalTensor(
            location,
            offset,
            None,
            ir.DataType(dtype_to_onnx(array.dtype)),
            shape=ir.Shape(array.shape),
            name=value.name or "",
            metadata_props=props,
        )

    def _root(self, array: Array) -> tuple[Array, Array]:
        """An array without gaps, and a view of it that is the given one, in the same order in memory."""
        start, end = byte_bounds(array)
        index = bisect_right(self._spans, start, key=lambda span: span[0]) - 1
        if index >= 0 and end <= self._spans[index][1]:
            return self._spans[index][2], array
        if array.flags.c_contiguous:
            return array, array
        order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
        root = np.ascontiguousarray(array.transpose(order))
        return root, root.transpose(np.argsort(order))

    def _place(self, root: Array) -> tuple[str, int, str | None]:
        """Location and offset, and the digest of a content key where the array's no external data."""
        found = self._weights.place_in_file(root)
        if found is not None and found[0] in self._locations:
            return f"{_DATA} {self._locations[found[0]]}", found[1], None
        content = root.reshape(-1).view(np.uint8)
        for number, (file, places) in enumerate(zip(self._contents, self._raw_data, strict=True)):
            for offset, length in places:
                if length == len(content) and np.array_equal(file[offset : offset + length], content):
                    return f"{_MODEL} {number}", offset, _digest(root)
        offset = self._size
        padding = bytes(-len(content) % _ALIGNMENT)
        self._size += len(content) + len(padding)
        if self._size > self._limit:
            raise UnusableEntryError(f"{self._size:,} bytes of constants and more, where {self._limit:,} are allowed")
        self.parts += [content.data, padding]
        return _ENTRY, offset, _digest(root)


def _digest(array: Array) -> str:
    """That of a content key."""
    key: Any = content_key(array)
    digest: bytes = key[-1]
    return digest.hex()


def _outermost(weights: WeightStore) -> list[tuple[int, int, Array]]:
    """Where the store's arrays begin and end in memory, in order, without those that lie in others."""
    arrays = [array for array in weights.arrays() if array.dtype != STRING and array.flags.c_contiguous and array.size]
    spans = [(*byte_bounds(array), array) for array in arrays]
    found: list[tuple[int, int, Array]] = []
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not found or span[0] >= found[-1][1]:
            found.append(span)
    return found


@contextmanager
def _constants_elsewhere(model: ir.Model, data: _Data, weights: WeightStore) -> Iterator[None]:
    """While it's entered, large constants of the model say where they're kept, and nothing else."""
    here = []
    try:
        for value in _initializers(model):
            array = initial_array(value, weights)
            if array.dtype != STRING and (array.nbytes >= _SMALL or not array.flags.c_contiguous):
                here.append((value, value.const_value))
                value.const_value = data.keep(value, array)
        yield
    finally:
        for value, tensor in here:
            value.const_value = tensor


def _fetch(value: ir.Value, constants: Array, contents: Sequence[Array], files: Mapping[str, Path], weights: WeightStore) -> None:
    """Give a value the array that its tensor says the place of."""
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    dtype = root_dtype = dtype_from_onnx(int(tensor.dtype))
    shape = root_shape = tuple(int(size) for size in tensor.shape.numpy())
    view = json.loads(tensor.metadata_props.get(_VIEW, "null"))
    if view is not None:
        number, sizes, start, strides = view
        root_dtype, root_shape = dtype_from_onnx(number), tuple(sizes)
    kind, _, where = str(tensor.location).partition(" ")
    offset = tensor.offset or 0
    key: WeightKey
    if kind == _DATA:
        array = weights.map_file(files[where], offset, None, root_dtype, root_shape)
    else:
        key = ("content", root_dtype, root_shape, bytes.fromhex(tensor.metadata_props[_DIGEST]))
        found = weights.find(key)
        if found is None:
            found = _part(constants if kind == _ENTRY else contents[int(where)], offset, root_dtype, root_shape)
            found = weights.intern(found if kind == _ENTRY else found.copy(), key)  # or it would hold the whole of the file
        array = found
    if view is not None:
        key = ("view", weights.key(array), start, tuple(strides), dtype, shape)
        array = weights.intern(np.ndarray(shape, dtype, array, start, strides), key)
    value.const_value = ir.Tensor(array, dtype=tensor.dtype, shape=ir.Shape(shape), name=value.name)


def _part(content: Array, offset: int, dtype: DType, shape: tuple[int, ...]) -> Array:
    return content[offset : offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize].view(dtype).reshape(shape)
