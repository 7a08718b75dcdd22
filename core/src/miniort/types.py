"""Element types and value types, as ONNX, NumPy and ml_dtypes name them.

An *element type* is a `numpy.dtype`, with the types that NumPy lacks from ml_dtypes; ONNX strings are `dtype('O')`.
A *dimension* is an int, the name of a symbolic size, or None where nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]
DType: TypeAlias = np.dtype[Any]
Dimension: TypeAlias = int | str | None
Shape: TypeAlias = tuple[Dimension, ...]

STRING = np.dtype(object)

# TensorProto.DataType number -> (name in ONNX type strings, dtype)
_ELEMENT_TYPES: dict[int, tuple[str, DType]] = {
    1: ("float", np.dtype(np.float32)),
    2: ("uint8", np.dtype(np.uint8)),
    3: ("int8", np.dtype(np.int8)),
    4: ("uint16", np.dtype(np.uint16)),
    5: ("int16", np.dtype(np.int16)),
    6: ("int32", np.dtype(np.int32)),
    7: ("int64", np.dtype(np.int64)),
    8: ("string", STRING),
    9: ("bool", np.dtype(np.bool_)),
    10: ("float16", np.dtype(np.float16)),
    11: ("double", np.dtype(np.float64)),
    12: ("uint32", np.dtype(np.uint32)),
    13: ("uint64", np.dtype(np.uint64)),
    14: ("complex64", np.dtype(np.complex64)),
    15: ("complex128", np.dtype(np.complex128)),
    16: ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
    17: ("float8e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn)),
    18: ("float8e4m3fnuz", np.dtype(ml_dtypes.float8_e4m3fnuz)),
    19: ("float8e5m2", np.dtype(ml_dtypes.float8_e5m2)),
    20: ("float8e5m2fnuz", np.dtype(ml_dtypes.float8_e5m2fnuz)),
    21: ("uint4", np.dtype(ml_dtypes.uint4)),
    22: ("int4", np.dtype(ml_dtypes.int4)),
    23: ("float4e2m1", np.dtype(ml_dtypes.float4_e2m1fn)),
    24: ("float8e8m0", np.dtype(ml_dtypes.float8_e8m0fnu)),
    25: ("uint2", np.dtype(ml_dtypes.uint2)),
    26: ("int2", np.dtype(ml_dtypes.int2)),
    27: ("float6e2m3", np.dtype(ml_dtypes.float6_e2m3fn)),
    28: ("float6e3m2", np.dtype(ml_dtypes.float6_e3m2fn)),
}

_BY_DTYPE: dict[DType, tuple[int, str]] = {dtype: (number, name) for number, (name, dtype) in _ELEMENT_TYPES.items()}
_BY_NAME: dict[str, DType] = dict(_ELEMENT_TYPES.values())


def dtype_from_onnx(number: int) -> DType:
    """The dtype of a `TensorProto.DataType` number. KeyError for a number that stands for no element type."""
    return _ELEMENT_TYPES[number][1]


def dtype_to_onnx(dtype: DType) -> int:
    """The `TensorProto.DataType` number of a dtype; every kind of NumPy text is ONNX's string."""
    return _BY_DTYPE[STRING if dtype.kind in "USO" else dtype][0]


def dtype_from_name(name: str) -> DType:
    """The dtype of an element type's name in ONNX type strings (`float`, `int64`, `bfloat16`)."""
    return _BY_NAME[name]


def type_string(dtype: DType | None) -> str:
    """ONNX's type string of a tensor: `tensor(float)`; `tensor(?)` where the element type isn't known, NumPy's name where ONNX has none."""
    if dtype is None:
        return "tensor(?)"
    _, name = _BY_DTYPE.get(STRING if dtype.kind in "USO" else dtype, (0, str(dtype)))
    return f"tensor({name})"


@cache
def dtypes_from_type_strings(type_strings: frozenset[str]) -> frozenset[DType]:
    """The element types of the tensors among ONNX type strings; sequences, optionals and maps are left out."""
    tensors = (text[len("tensor(") : -1] for text in type_strings if text.startswith("tensor("))
    return frozenset(_BY_NAME[name] for name in tensors if name in _BY_NAME)


@dataclass(frozen=True)
class ValueInfo:
    """What is known about a value before anything runs.

    `dtype` and `shape` are None where shape inference couldn't tell, and for values that are no tensors.
    `constant` is the value itself, read-only and on the host, where it's a weight or was folded to a constant.
    """

    name: str
    dtype: DType | None = None
    shape: Shape | None = None
    constant: Array | None = None


def format_shape(shape: Shape | None) -> str:
    """A shape for people: `[batch, 12, ?]`; `[...]` where even the rank isn't known."""
    if shape is None:
        return "[...]"
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"
