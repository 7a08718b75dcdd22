"""Where a model's own file holds the bytes of its weights, so that they can be mapped from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from miniort.types import Array

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
"""Fields of ModelProto, GraphProto and TensorProto: see onnx.proto."""

_BYTES = 2
"""The wire type of strings, bytes and messages."""


def raw_data_places(file: Array) -> Sequence[tuple[int, int]]:
    """Offset and length of `raw_data` of the main graph's initializers. file: the bytes of a model, uint8.

    ValueError or IndexError for what is no protobuf.
    """
    return [
        (start, end - start)
        for graph in _fields(file, 0, len(file), _GRAPH)
        for initializer in _fields(file, *graph, _INITIALIZER)
        for start, end in _fields(file, *initializer, _RAW_DATA)
    ]


def _fields(file: Array, start: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Where the contents of each field of that number begin and end, in the message from `start` to `end`."""
    while start < end:
        tag, start = _varint(file, start)
        wire_type = tag & 7
        if wire_type == _BYTES:
            length, start = _varint(file, start)
            if start + length > end:
                raise ValueError("a field is longer than its message")
            if tag >> 3 == wanted:
                yield start, start + length
            start += length
        elif wire_type == 0:
            _, start = _varint(file, start)
        elif wire_type in (1, 5):
            start += 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"no field has the wire type {wire_type}")


def _varint(file: Array, start: int) -> tuple[int, int]:
    """A number of seven bits a byte, lowest first, and where it ends."""
    number = shift = 0
    while True:
        byte = int(file[start])
        start += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, start
