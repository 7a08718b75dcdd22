"""The one file that both graphs of a decoder read their weights from, while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from miniort.errors import ModelError
from miniort.types import Array, DType
from miniort_models.weights.dtypes import WeightDtype
from miniort_models.weights.quantisation import pack, quantise
from miniort_models.weights.source import BlockQuantised, WeightSource

FLOAT_DTYPES: dict[WeightDtype, DType] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}

MATRIX_BITS: dict[WeightDtype, int] = {"int8": 8, "int4": 4}
TABLE_BITS = 8
"""Embeddings and the head suffer most from rounding, and cost little at a byte per weight."""

CACHE_LINE, PAGE = 64, 4096
LARGE = 2**20

Axes: TypeAlias = Literal["out in", "in out"]
"""How a projection is laid out in its source: Hugging Face has its outputs first, but for GPT-2's."""


@dataclass(frozen=True)
class StoredBlocks:
    """A matrix [rows, columns] in blocks, of which `weights.source.BlockQuantised` tells, as tensors that say where each part lies."""

    codes: TensorProto
    scales: TensorProto
    zero_points: TensorProto | None
    bits: int
    block_size: int
    rows: int
    columns: int


Stored: TypeAlias = TensorProto | StoredBlocks


class WeightsFile:
    """Reads weights of a source, and writes them into a file one after another; each is asked for by both graphs, and written once.

    source: whose weights they are, by Hugging Face's names, the first part of a name (`model.`, `transformer.`) being left out or not.
    dtype: how matrices are stored; None as in the source. Vectors are always stored in float32.

    A weight starts at a multiple of 64 bytes (a cache line), a large one of 4096 (a page, for memory maps).
    """

    def __init__(self, source: WeightSource, path: Path, dtype: WeightDtype | None) -> None:
        self._source, self._dtype = source, dtype
        self._names = frozenset(source.names())
        self._file = path.open("wb")
        self._location = path.name
        self._vectors: dict[str, TensorProto] = {}
        self._tables: dict[str, Stored] = {}
        self._projections: dict[str, list[Stored]] = {}
        self._used: set[str] = set()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    # ------------------------------------------------------------------------------------------ what is there

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        """A weight as float32, float16 or bfloat16. ModelError if it isn't there, or its shape is another one."""
        return self._source.read(self._check(name, shape))

    def require_same(self, name: str, other: str) -> None:
        """ModelError if the source has a weight `name` that isn't the weight `other` again, although the config says so."""
        found, expected = self._find(name), self._find(other)
        if found is None or expected is None:
            return
        self._used.add(found)
        if not np.array_equal(self._source.read(found), self._source.read(expected)):
            raise ModelError(
                f"{self._source.name}: {found!r} differs from {expected!r}, but config.json says that they're one (tie_word_embeddings)"
            )

    def unused(self) -> list[str]:
        """Weights of the source that nobody asked for."""
        return sorted(self._names - self._used)

    def leave_out(self, *beginnings: str) -> None:
        """Count weights whose names begin so as asked for: those of another part of a model, such as one for images."""
        self._used |= {name for name in self._names if name.startswith(beginnings)}

    def _find(self, name: str) -> str | None:
        """Also without the first part of a name, and below `language_model`, as models that see images have it."""
        rest = name.partition(".")[2]
        candidates = (name, rest, f"language_model.{name}", f"model.language_model.{rest}")
        return next((candidate for candidate in candidates if candidate in self._names), None)

    def _check(self, name: str, shape: tuple[int, ...]) -> str:
        """What the source calls a weight. ModelError if it isn't there, or its shape is another one."""
        found = self._find(name)
        if found is None:
            raise ModelError(
                f"{self._source.name}: weight {name!r} is missing; there are {len(self._names)} others, such as "
                f"{', '.join(sorted(self._names)[:3]) or 'none'}: are they of the model that config.json describes?"
            )
        if self._source.shape(found) != shape:
            raise ModelError(
                f"{self._source.name}: weight {found!r} has shape {list(self._source.shape(found))}; config.json asks for {list(shape)}"
            )
        self._used.add(found)
        return found

    # --------------------------------------------------------------------------------------- what is written

    def vector(self, name: str, parts: Sequence[str], sizes: Sequence[int], offset: float = 0, order: Array | None = None) -> TensorProto:
        """Vectors of the source, one behind the other, plus `offset`; `order` says which element comes when."""
        if name not in self._vectors:
            read = [self.read(part, (size,)).astype(np.float32) for part, size in zip(parts, sizes, strict=True)]
            whole = np.concatenate(read) + np.float32(offset)
            self._vectors[name] = self._write(name, whole if order is None else whole[order])
        return self._vectors[name]

    def table(self, name: str, rows: int, columns: int) -> Stored:
        """A matrix whose rows belong to the tokens of a vocabulary: an embedding or a head. [rows, columns]"""
        if name not in self._tables:
            found = self._check(name, (rows, columns))
            blocks = self._source.read_blocks(found) if self._dtype is None else None
            if self._dtype in MATRIX_BITS:
                blocks = quantise(self._source.read(found), TABLE_BITS)
            if blocks is not None:
                self._tables[name] = self._write_blocks(name, blocks, columns)
            else:
                self._tables[name] = self._write(name, self._in_stored_type(name, self._source.read(found)))
        return self._tables[name]

    def float_table(self, name: str, rows: int, columns: int) -> TensorProto:
        """A table that is never put into blocks; float16 where others are. [rows, columns]"""
        if name not in self._vectors:
            weight = self.read(name, (rows, columns))
            in_blocks = self._dtype in MATRIX_BITS
            stored = _converted(name, weight, FLOAT_DTYPES["f16"]) if in_blocks else self._in_stored_type(name, weight)
            self._vectors[name] = self._write(name, stored)
        return self._vectors[name]

    def projections(
        self, name: str, parts: Sequence[str], inputs: int, sizes: Sequence[int], axes: Axes = "out in", order: Array | None = None
    ) -> list[Stored]:
        """Projections with the same input, side by side in one; or one by one, where the source has them in blocks of several kinds.

        A tensor is [inputs, outputs]; of blocks, the rows are outputs. `order` says which output comes when.
        """
        if name not in self._projections:
            shapes = [(size, inputs) if axes == "out in" else (inputs, size) for size in sizes]
            found = [self._check(part, shape) for part, shape in zip(parts, shapes, strict=True)]
            blocks = [self._source.read_blocks(part) if self._dtype is None else None for part in found]
            kinds = {None if each is None else (each.bits, each.block_size) for each in blocks}
            if len(kinds) > 1:
                each_alone = zip(parts, found, blocks, strict=True)
                self._projections[name] = [
                    self._write_projection(part, [one], [block], inputs, axes, None) for part, one, block in each_alone
                ]
            else:
                self._projections[name] = [self._write_projection(name, found, blocks, inputs, axes, order)]
        return self._projections[name]

    def _write_projection(
        self, name: str, found: Sequence[str], blocks: Sequence[BlockQuantised | None], inputs: int, axes: Axes, order: Array | None
    ) -> Stored:
        in_blocks = [each for each in blocks if each is not None]
        if in_blocks:
            return self._write_blocks(name, _rows_joined(in_blocks, order), inputs)
        read = [self._source.read(part) for part in found]
        whole = np.concatenate([weight if axes == "out in" else weight.T for weight in _of_one_type(read)])  # [outputs, inputs]
        if order is not None:
            whole = whole[order]
        if self._dtype in MATRIX_BITS:
            return self._write_blocks(name, quantise(whole, MATRIX_BITS[self._dtype]), inputs)
        return self._write(name, self._in_stored_type(name, whole).T)

    def _in_stored_type(self, name: str, weight: Array) -> Array:
        if self._dtype is None:
            return weight if weight.dtype in FLOAT_DTYPES.values() else weight.astype(np.float32)
        return _converted(name, weight, FLOAT_DTYPES[self._dtype])

    def _write_blocks(self, name: str, blocks: BlockQuantised, columns: int) -> StoredBlocks:
        zero_points = None
        if blocks.zero_points is not None:
            zero_points = self._write(f"{name}.zero_points", _packed_if_whole(blocks.zero_points, blocks.bits))
        codes = self._write(f"{name}.codes", blocks.codes)
        scales = self._write(f"{name}.scales", blocks.scales.astype(np.float32))
        return StoredBlocks(codes, scales, zero_points, blocks.bits, blocks.block_size, len(blocks.codes), columns)

    def _write(self, name: str, weight: Array) -> TensorProto:
        """Append a weight to the file. Returns a tensor that says where it is."""
        data = np.ascontiguousarray(weight)
        self._file.write(bytes(-self._file.tell() % (PAGE if data.nbytes >= LARGE else CACHE_LINE)))
        tensor = TensorProto(name=name, dims=data.shape, data_type=helper.np_dtype_to_tensor_dtype(data.dtype))
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self._location), ("offset", self._file.tell()), ("length", data.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self._file.write(data.reshape(-1).view(np.uint8).data)
        return tensor


def _converted(name: str, weight: Array, dtype: DType) -> Array:
    """ModelError if a value is too large for the type."""
    with np.errstate(over="ignore"):
        converted = weight.astype(dtype)
    if dtype == np.float16 and np.isinf(converted).any():
        largest = float(np.abs(weight.astype(np.float32)).max())
        raise ModelError(f"weight {name!r} has values up to {largest:g}, and float16 ends at 65504; store it as bf16 or f32")
    return converted


def _of_one_type(weights: Sequence[Array]) -> list[Array]:
    """Weights that are to be joined; in float32, if their types differ."""
    alike = len({weight.dtype for weight in weights}) == 1
    return [weight if alike else weight.astype(np.float32) for weight in weights]


def _rows_joined(parts: Sequence[BlockQuantised], order: Array | None) -> BlockQuantised:
    """Matrices of the same kind below each other; `order` says which row comes when."""
    first = parts[0]
    codes, scales = np.concatenate([part.codes for part in parts]), np.concatenate([part.scales for part in parts])
    zero_points = None
    if any(part.zero_points is not None for part in parts):
        middle = np.float32(2 ** (first.bits - 1))  # what an absent zero point stands for
        zero_points = np.concatenate(
            [np.full_like(part.scales, middle) if part.zero_points is None else part.zero_points for part in parts]
        )
    if order is not None:
        codes, scales, zero_points = codes[order], scales[order], None if zero_points is None else zero_points[order]
    return BlockQuantised(codes, scales, zero_points, first.bits, first.block_size)


def _packed_if_whole(zero_points: Array, bits: int) -> Array:
    """Zero points as `MatMulNBits` has them: whole numbers packed as codes are, [rows, bytes] uint8; others as they are, float32."""
    whole = np.rint(zero_points)
    if np.array_equal(whole, zero_points) and whole.min(initial=0) >= 0 and whole.max(initial=0) < 2**bits:
        return pack(whole.astype(np.uint8), bits)
    return zero_points.astype(np.float32)
