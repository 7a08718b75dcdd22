"""Builders of sequences and optionals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, type_of
from miniort.types import Array, DType, dtype_from_name, dtype_to_onnx


def sequence_dtypes(operator: Operator, parameter: str) -> list[DType]:
    """Element types of the sequences that the schema allows for a type parameter."""
    allowed = next(each.allowed_type_strs for each in operator.schema.type_constraints if each.type_param_str == parameter)
    names = [text.removesuffix("))") for text in allowed if text.startswith("seq(tensor(")]
    return sorted((dtype_from_name(name.removeprefix("seq(tensor(")) for name in names), key=dtype_to_onnx)


def sequence_type(dtype: DType) -> onnx.TypeProto:
    """A sequence of tensors of any shape."""
    return helper.make_sequence_type_proto(helper.make_tensor_type_proto(dtype_to_onnx(dtype), None))


def optional_type(inner: onnx.TypeProto) -> onnx.TypeProto:
    """A value or none."""
    return helper.make_optional_type_proto(inner)


def sequence(d: Draws, dtype: DType, at_least: int = 0) -> list[Array]:
    """Up to three tensors of any ranks."""
    return [d.array(dtype, d.shape(max_rank=2)) for _ in range(d.integer(at_least, 3))]


def position(d: Draws, operator: Operator, low: int, high: int) -> Array:
    """A position, as a scalar of either integer type."""
    return np.asarray(d.integer(low, high), d.dtype(operator, "I"))


@builds("Identity")
def identity(d: Draws, operator: Operator) -> NodeCase:
    """Tensors, sequences from version 14 on, and optionals from version 16 on."""
    kind = d.choice(["tensor", "sequence", "optional"]) if operator.version >= 16 else d.choice(["tensor", "sequence"])
    if operator.version < 14 or kind == "tensor":
        return NodeCase([d.array(d.dtype(operator, operator.schema.inputs[0].type_str), d.shape())], constants=d.constants(0))
    dtype = d.choice(sequence_dtypes(operator, "V"))
    values = sequence(d, dtype)
    if kind == "sequence":
        return NodeCase([values], input_types={0: sequence_type(dtype)})
    return NodeCase([d.choice([values, None])], input_types={0: optional_type(sequence_type(dtype))})


@builds("SequenceConstruct")
def sequence_construct(d: Draws, operator: Operator) -> NodeCase:
    """One to four tensors."""
    return NodeCase(list(sequence(d, d.dtype(operator), 1)), constants=d.constants(0))


@builds("SequenceEmpty")
def sequence_empty(d: Draws, operator: Operator) -> NodeCase:
    """Of float32, or of the type named."""
    return NodeCase([], d.some(dtype=dtype_to_onnx(d.choice(sequence_dtypes(operator, "S")))))


@builds("SequenceInsert", "SequenceErase", "SequenceAt", "SequenceLength")
def sequence_position(d: Draws, operator: Operator) -> NodeCase:
    """A sequence, and a place in it that's counted from either end; the last one where it may be left out."""
    dtype = d.choice(sequence_dtypes(operator, "S"))
    inserts = operator.op == "SequenceInsert"
    values = sequence(d, dtype, 0 if operator.op in ("SequenceInsert", "SequenceLength") else 1)
    inputs: list[Any] = [values]
    if inserts:
        inputs.append(d.array(dtype, d.shape(max_rank=2)))
    if operator.op != "SequenceLength":
        given = operator.op == "SequenceAt" or d.boolean()
        inputs.append(position(d, operator, -len(values), len(values) - (not inserts)) if given else None)
    constants = d.constants(len(inputs) - 1) if len(inputs) > 1 else frozenset()
    return NodeCase(d.trimmed(inputs), input_types={0: sequence_type(dtype)}, constants=constants)


@builds("SplitToSequence")
def split_to_sequence(d: Draws, operator: Operator) -> NodeCase:
    """Single slices with or without their axis, parts of one size, or of the sizes given."""
    shape = list(d.shape(1, 3))
    axis = d.axis(len(shape))
    attributes = {"axis": axis} if axis or d.boolean() else {}
    dtype, index_type = d.dtype(operator), d.dtype(operator, "I")
    kind = d.choice(["slices", "equal", "sizes"])
    if kind == "slices":
        return NodeCase(d.trimmed([d.array(dtype, shape), None]), attributes | d.some(keepdims=d.integer(0, 1)))
    sizes = [d.integer(0, 3) for _ in range(d.integer(1, 3))]
    shape[axis] = sum(sizes) if kind == "sizes" else d.integer(1, 5)
    split = np.array(sizes, index_type) if kind == "sizes" else np.asarray(d.integer(1, 3), index_type)
    return NodeCase([d.array(dtype, shape), split], attributes, constants=d.constants(1))


@builds("ConcatFromSequence")
def concat_from_sequence(d: Draws, operator: Operator) -> NodeCase:
    """Along an axis, or along a new one."""
    dtype, shape = d.dtype(operator), list(d.shape(1, 3))
    new = d.boolean()
    axis = d.axis(len(shape) + new)
    arrays = []
    for _ in range(d.integer(1, 3)):
        if not new:
            shape[axis] = d.integer(0, 3)
        arrays.append(d.array(dtype, shape))
    return NodeCase([arrays], {"axis": axis} | ({"new_axis": 1} if new else d.some(new_axis=0)))


def element(d: Draws, operator: Operator, parameter: str) -> tuple[Any, onnx.TypeProto]:
    """A tensor or a sequence of a type that the schema allows inside an optional, and its type."""
    if d.boolean():
        dtype = d.choice(sequence_dtypes(operator, parameter))
        return sequence(d, dtype, 1), sequence_type(dtype)
    array = d.array(d.dtype(operator, parameter), d.shape())
    return array, type_of(array)


@builds("Optional")
def optional(d: Draws, operator: Operator) -> NodeCase:
    """Of a value, or of a type alone, which is empty."""
    value, of_type = element(d, operator, "V")
    if d.boolean():
        return NodeCase([], {"type": of_type}, expected=lambda inputs: [None])
    return NodeCase([value], input_types={0: of_type}, expected=lambda inputs: [value])


@builds("OptionalGetElement", "OptionalHasElement")
def optional_element(d: Draws, operator: Operator) -> NodeCase:
    """An optional that is there or, where it's asked, not; from version 18 on also what's no optional, and nothing at all."""
    asks = operator.op == "OptionalHasElement"
    value, of_type = element(d, TENSORS_AND_SEQUENCES[operator.version >= 28], "V")
    kinds = ["full", *(["empty"] if asks else []), *(["plain"] if operator.version >= 18 else [])]
    if asks and operator.version >= 18:
        kinds += ["absent", "unnamed"]
    kind = d.choice(kinds)
    if kind in ("absent", "unnamed"):
        return NodeCase([] if kind == "absent" else [None])
    inner = of_type if kind == "plain" else optional_type(of_type)
    return NodeCase([None if kind == "empty" else value], input_types={0: inner})


TENSORS_AND_SEQUENCES = [Operator("", "Optional", 15, 15), Operator("", "Optional", 28, 28)]
"""What the types inside an optional are, by whether bfloat16 and newer ones are among them."""
