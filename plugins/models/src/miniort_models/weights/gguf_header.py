"""The header of a GGUF file: what it says of its model, and where each of its tensors lies.

Format: "GGUF" in the documentation of ggml. The gguf package reads it too, but makes an array of every string, and a vocabulary has a
hundred thousand of them: seconds instead of hundredths.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from miniort.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Types of metadata values, by their number.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

_DEEPEST = 4
"""Arrays of arrays of arrays of … that are read. No model has any; a damaged file must not recurse for ever."""


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is.

    shape: slowest axis first, as NumPy has it. type: ggml's number of its element type. offset: in bytes, from the file's start.
    """

    shape: tuple[int, ...]
    type: int
    offset: int

    @property
    def size(self) -> int:
        """How many elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by their keys, such as `general.architecture`; tensors by their names, such as `blk.0.attn_q.weight`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def string(self, key: str) -> str | None:
        """A metadata value that is text, None where there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """A metadata value that is a whole number, None where there is none."""
        value = self.metadata.get(key)
        return value if type(value) is int else None

    def number(self, key: str) -> float | None:
        """A metadata value that is a number, None where there is none."""
        value = self.metadata.get(key)
        return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)

    @property
    def architecture(self) -> str:
        """Such as `llama`. ModelError where the file doesn't say."""
        name = self.string("general.architecture")
        if name is None:
            raise ModelError(
                f"{self.path} has no general.architecture in its metadata, so what it computes is unknown; get a complete file"
            )
        return name


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file. ModelError if it can't be read, is no GGUF file, is damaged, or is a part of a file that was split."""
    try:
        with _mapped(path) as data:
            header = _Reader(data, path).header()
    except (struct.error, IndexError, OverflowError, MemoryError):
        raise ModelError(f"{path} ends within its header: it was cut short or is damaged; get it again") from None
    parts = header.metadata.get("split.count", 1)
    if parts > 1:
        raise ModelError(f"{path} is one of {parts} parts of a model; join them first, with llama.cpp's llama-gguf-split --merge")
    return header


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise ModelError(f"{path} is empty; get it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from None


class _Reader:
    """Reads one value after another."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path = data, path
        self.at = 0

    def header(self) -> GgufHeader:
        if self.data[:4] != MAGIC:
            raise ModelError(f"{self.path} is no GGUF file: it begins with {bytes(self.data[:4])!r}, not with {MAGIC!r}")
        self.at = 4
        version = self.scalar("<I")
        if version not in VERSIONS:
            what = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise ModelError(f"{self.path} is a GGUF file {what}; wanted little-endian, version {' or '.join(map(str, VERSIONS))}")
        tensor_count, entry_count = self.scalar("<Q"), self.scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self.string()
            metadata[key] = self.value(self.scalar("<I"))
        found = {self.string(): self._tensor() for _ in range(tensor_count)}
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        start = -(-self.at // alignment) * alignment
        tensors = {name: GgufTensor(tensor.shape, tensor.type, start + tensor.offset) for name, tensor in found.items()}
        return GgufHeader(self.path, metadata, tensors)

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise IndexError
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == _DEEPEST:
            raise ModelError(f"{self.path} has a metadata value of an unknown type {kind}: it's damaged, or newer than what is read here")
        element, count = self.scalar("<I"), self.scalar("<Q")
        if element not in _SCALARS:
            return [self.value(element, depth + 1) for _ in range(count)]
        dtype = np.dtype(_SCALARS[element])
        start, self.at = self.at, self.at + count * dtype.itemsize
        if self.at > len(self.data):
            raise IndexError
        return np.frombuffer(self.data[start : self.at], dtype).tolist()

    def _tensor(self) -> GgufTensor:
        """Its offset is from where the header ends."""
        rank = self.scalar("<I")
        sizes = [self.scalar("<Q") for _ in range(rank)]
        return GgufTensor(tuple(reversed(sizes)), self.scalar("<I"), self.scalar("<Q"))
