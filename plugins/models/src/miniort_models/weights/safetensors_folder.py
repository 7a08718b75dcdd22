"""Weights in the safetensors files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from miniort.errors import ModelError
from miniort.types import Array, DType
from miniort_models.weights.safetensors_files import CONFIG, INDEX, listed_files, read_json, weight_files
from miniort_models.weights.source import BlockQuantised, WeightSource

FLOATS: Mapping[str, DType] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
LONGEST_HEADER = 100 << 20
"""Bytes; safetensors' own limit."""


@dataclass(frozen=True)
class _Entry:
    """Where a weight lies: in the file at `path`, from byte `start` to before `end`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsFolder:
    """A `WeightSource`; see `open_safetensors_folder`. mapped: the files, each mapped into memory."""

    name: str
    config: Mapping[str, Any]
    entries: Mapping[str, _Entry]
    mapped: Mapping[Path, Array]

    def names(self) -> Sequence[str]:
        """Every weight there is."""
        return list(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """A weight's shape, without reading it."""
        return self.entries[name].shape

    def read(self, name: str) -> Array:
        """A weight, mapped into memory. ModelError for a type that graphs can't be written from."""
        entry = self.entries[name]
        if entry.dtype not in FLOATS:
            raise ModelError(
                f"{entry.path}: weight {name!r} is stored as {entry.dtype}, and can be read as {', '.join(FLOATS)} only; "
                "take a version of the model that isn't quantised"
            )
        raw = self.mapped[entry.path][entry.start : entry.end]
        dtype = FLOATS[entry.dtype]
        weight = (raw.copy() if entry.start % dtype.itemsize else raw).view(dtype).reshape(entry.shape)
        return weight.astype(np.float32) if entry.dtype == "F64" else weight

    def read_blocks(self, name: str) -> BlockQuantised | None:
        """None: safetensors files hold plain numbers."""
        return None


def open_safetensors_folder(folder: Path) -> WeightSource:
    """Weights in `model.safetensors`, or in the files that `model.safetensors.index.json` lists, with `config.json` beside them.

    Files are mapped into memory. ModelError that names the file for a missing shard, a damaged header, and for a folder that has only
    pickled weights (`pytorch_model.bin`), which may run any code when they're read and are refused.
    """
    if not folder.is_dir():
        raise ModelError(f"no such folder: {folder}")
    config = read_json(folder / CONFIG)
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping):
        method = quantised.get("quant_method", "unknown")
        raise ModelError(
            f"{folder}: the weights were quantised by the method {method!r}, which can't be read; take a version that isn't quantised"
        )
    entries: dict[str, _Entry] = {}
    for path in weight_files(folder):
        for name, entry in _read_header(path).items():
            if name in entries:
                both = f"{entries[name].path.name} and in {path.name}"
                raise ModelError(f"{folder}: weight {name!r} is in {both}; remove the file that doesn't belong there")
            entries[name] = entry
    for name, file in listed_files(folder).items():
        if name not in entries:
            raise ModelError(f"{folder}: weight {name!r} should be in {file}, by {INDEX}, and isn't; get that file again")
    mapped = {path: np.memmap(path, np.uint8, mode="r") for path in {entry.path for entry in entries.values()}}
    return SafetensorsFolder(str(folder), config, entries, mapped)


def _read_header(path: Path) -> dict[str, _Entry]:
    """What a safetensors file says is in it: a length (8 bytes, the lowest first), so many bytes of JSON, then the weights."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 0 < length <= min(LONGEST_HEADER, size - 8) else None
        if not isinstance(header, dict):
            raise ValueError("there is no header where it should be")
        return {name: _entry(path, 8 + length, size, said) for name, said in header.items() if name != "__metadata__"}
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{path} is damaged, or no safetensors file: {error}; get it again") from None


def _entry(path: Path, begin: int, size: int, said: Mapping[str, Any]) -> _Entry:
    """One weight of a file of `size` bytes, whose weights begin at byte `begin`. ValueError for what can't be."""
    dtype, shape, (start, end) = str(said["dtype"]), tuple(map(int, said["shape"])), said["data_offsets"]
    if not 0 <= start <= end or begin + end > size:
        raise ValueError(f"a weight should lie at bytes {begin + start} to {begin + end}, and the file has {size}")
    if dtype in FLOATS and end - start != prod(shape) * FLOATS[dtype].itemsize:
        raise ValueError(f"a weight of the shape {list(shape)} and the type {dtype} can't take {end - start} bytes")
    return _Entry(path, dtype, shape, begin + start, begin + end)
