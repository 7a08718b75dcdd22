"""Constants of an onnx-ir graph as arrays that one `WeightStore` owns."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from miniort.model.loading import tensor_to_array
from miniort.model.weights import WeightStore
from miniort.types import STRING, Array, Dimension, Shape, ValueInfo, dtype_from_onnx, dtype_to_onnx


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is the same in every run: an initializer that isn't also an input, which a feed could replace."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def constant_array(value: ir.Value | None, weights: WeightStore) -> Array | None:
    """A constant as the store's own read-only array; None for what isn't constant."""
    if value is None or not is_constant(value):
        return None
    return initial_array(value, weights)


def initial_array(value: ir.Value, weights: WeightStore) -> Array:
    """The initializer of a value, also of one that's an input with a default, as the store's own read-only array."""
    tensor = value.const_value
    assert tensor is not None
    if isinstance(tensor, ir.Tensor) and isinstance(tensor.raw, np.ndarray):
        array = weights.intern(tensor.raw)
        if array is not tensor.raw:
            value.const_value = _tensor(array, value.name)
        return array
    array = weights.intern(tensor_to_array(tensor))
    value.const_value = _tensor(array, value.name)
    return array


def set_constant(value: ir.Value, array: Array) -> None:
    """Make an array the constant that a value stands for, and give the value its type and shape."""
    value.const_value = _tensor(array, value.name)
    value.dtype = ir.DataType(dtype_to_onnx(array.dtype))
    value.shape = ir.Shape(array.shape)


def _tensor(array: Array, name: str | None) -> ir.TensorProtocol:
    if array.dtype == STRING:
        return ir.StringTensor([str(item).encode() for item in array.ravel()], shape=ir.Shape(array.shape), name=name)
    return ir.Tensor(array, dtype=ir.DataType(dtype_to_onnx(array.dtype)), name=name)


def value_info(value: ir.Value | None, weights: WeightStore) -> ValueInfo | None:
    """What's known of a value before anything runs; None for an absent one."""
    if value is None:
        return None
    constant = constant_array(value, weights)
    if constant is not None:
        return ValueInfo(value.name or "", constant.dtype, constant.shape, constant)
    is_tensor = value.type is None or isinstance(value.type, ir.TensorType)
    known = is_tensor and value.dtype is not None and value.dtype != ir.DataType.UNDEFINED
    return ValueInfo(
        value.name or "",
        dtype_from_onnx(int(value.dtype)) if known and value.dtype is not None else None,
        shape_of(value) if is_tensor else None,
    )


def shape_of(value: ir.Value) -> Shape | None:
    """The shape of a value, symbolic sizes by name; None where the rank isn't known."""
    return None if value.shape is None else tuple(_dimension(size) for size in value.shape)


def _dimension(size: int | ir.SymbolicDim) -> Dimension:
    if isinstance(size, int):
        return size if size >= 0 else None  # some exporters write -1 for a size that isn't known
    return size.value
