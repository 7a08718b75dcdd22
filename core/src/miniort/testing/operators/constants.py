"""Builders of ops that make a tensor from attributes and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_float, onnx_tensor
from miniort.types import STRING, Array, dtype_to_onnx


def sparse_tensor(d: Draws, operator: Operator) -> tuple[Any, Array]:
    """A sparse tensor of one or two axes, its places linear or by axis, and the dense one."""
    shape = d.shape(1, 2, min_size=1)
    dense = d.array(d.dtype(operator, without=[STRING, np.complex64, np.complex128]), shape, special=False)
    rng = d.rng()
    places = np.sort(rng.permutation(dense.size)[: d.integer(0, dense.size)])
    dense.reshape(-1)[np.setdiff1d(np.arange(dense.size), places)] = np.zeros((), dense.dtype)
    by_axis = len(shape) > 1 and d.boolean()
    indices = np.stack(np.unravel_index(places, shape), axis=1) if by_axis else places
    values = onnx_tensor("values", dense.reshape(-1)[places])
    return helper.make_sparse_tensor(values, onnx_tensor("indices", indices.astype(np.int64)), shape), dense


@builds("Constant")
def constant(d: Draws, operator: Operator) -> NodeCase:
    """Each way of writing a value."""
    kind = d.choice(list(operator.schema.attributes))
    if kind == "sparse_value":
        sparse, dense = sparse_tensor(d, operator)
        return NodeCase([], {kind: sparse}, expected=lambda inputs: [dense])
    count = d.integer(0, 4)
    values: dict[str, Any] = {
        "value_int": d.integer(-9, 9),
        "value_ints": [d.integer(-9, 9) for _ in range(count)],
        "value_float": d.number(-9, 9),
        "value_floats": [d.number(-9, 9) for _ in range(count)],
        "value_string": d.choice(["", "ab", "ä"]),
        "value_strings": [d.choice(["", "ab", "ä"]) for _ in range(count)],
    }
    if kind != "value":
        return NodeCase([], {kind: values[kind]})
    return NodeCase([], {"value": onnx_tensor("value", d.array(d.dtype(operator), d.shape()))})


@builds("ConstantOfShape")
def constant_of_shape(d: Draws, operator: Operator) -> NodeCase:
    """Float zeros, or one value of any type."""
    shape = np.array(d.shape(), np.int64)
    value = d.some(value=onnx_tensor("value", d.array(d.dtype(operator, "T2"), (1,))))
    return NodeCase([shape], value, constants=d.constants(0))


@builds("Range")
def number_range(d: Draws, operator: Operator) -> NodeCase:
    """Up, down, or empty. The steps of floats are exact, so that all agree how many there are."""
    dtype = d.dtype(operator)
    step = d.choice([-3, -1, 1, 2] if not is_float(dtype) else [-0.5, 0.25, 1, 1.5])
    numbers = [np.asarray(number).astype(dtype) for number in (d.integer(-5, 5), d.integer(-5, 5), step)]
    return NodeCase(numbers, d.some(stash_type=1) if operator.has_attribute("stash_type") else {}, constants=d.constants(0, 1, 2))


@builds("EyeLike")
def eye_like(d: Draws, operator: Operator) -> NodeCase:
    """A diagonal that may lie outside; of the input's type or another."""
    dtype = d.dtype(operator, "T1", without=[STRING])
    return NodeCase(
        [d.array(dtype, d.shape(2, 2))], d.some(k=d.integer(-5, 5), dtype=dtype_to_onnx(d.dtype(operator, "T2", without=[STRING])))
    )
