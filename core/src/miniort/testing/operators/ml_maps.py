"""Builders of ai.onnx.ml ops between maps and tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds
from miniort.types import Array

DOMAIN = "ai.onnx.ml"
ELEMENTS = {
    "int64": onnx.TensorProto.INT64,
    "string": onnx.TensorProto.STRING,
    "float": onnx.TensorProto.FLOAT,
    "double": onnx.TensorProto.DOUBLE,
}


def map_type(key: str, value: str) -> onnx.TypeProto:
    """The type of a map by the names of its parts."""
    return helper.make_map_type_proto(ELEMENTS[key], helper.make_tensor_type_proto(ELEMENTS[value], []))


def values(d: Draws, kind: str, count: int) -> list[Any]:
    """Values of a map: literals of numbers where they're text."""
    if kind == "string":
        return [d.choice(["0", "1.5", "-2"]) for _ in range(count)]
    return [d.integer(-9, 9) if kind == "int64" else d.number(-9, 9) for _ in range(count)]


@builds("CastMap", domain=DOMAIN)
def cast_map(d: Draws, operator: Operator) -> NodeCase:
    """The values in the order of their keys, or each at the place of its key."""
    kind = d.choice(["string", "float"])
    keys = d.permutation(range(6))[: d.integer(1, 4)]
    targets = ["TO_FLOAT", "TO_INT64"] + (["TO_STRING"] if kind == "string" else [])  # no text says how a number is written
    attributes = d.some(cast_to=d.choice(targets))
    numbers = dict(zip(keys, values(d, kind, len(keys)), strict=True))
    if kind == "string" and attributes.get("cast_to") == "TO_INT64":
        numbers = dict.fromkeys(keys, "12")
    if kind == "float":
        numbers = {key: float(round(number)) + 0.5 for key, number in numbers.items()}
    if attributes.get("cast_to") != "TO_STRING" and d.boolean():  # nor which text stands between
        attributes |= {"map_form": "SPARSE", "max_map": d.integer(6, 8)}
    return NodeCase(
        [numbers], attributes, input_types={0: map_type("int64", kind)}, expected=lambda inputs: [cast_values(numbers, **attributes)]
    )


def cast_values(numbers: dict[int, Any], cast_to: str = "TO_FLOAT", map_form: str = "DENSE", max_map: int = 1) -> Array:
    """-> [1, values] in the order of their keys, or [1, max_map] with zeros between them."""
    dtype = {"TO_FLOAT": np.float32, "TO_INT64": np.int64, "TO_STRING": object}[cast_to]
    keys = sorted(numbers) if map_form == "DENSE" else range(max_map)
    return np.array([[numbers.get(key, 0) for key in keys]]).astype(dtype)


@builds("DictVectorizer", domain=DOMAIN)
def dict_vectorizer(d: Draws, operator: Operator) -> NodeCase:
    """Each value at the place of its key in the vocabulary, zeros elsewhere."""
    key, value = d.choice(
        [("string", "int64"), ("int64", "string"), ("int64", "float"), ("int64", "double"), ("string", "float"), ("string", "double")]
    )
    vocabulary: list[Any] = d.permutation(["a", "b", "c", "ä"] if key == "string" else [1, 2, 5, 7])
    chosen = d.permutation(vocabulary)[: d.integer(1, 4)]
    numbers = dict(zip(chosen, values(d, value, len(chosen)), strict=True))
    dtype = {"int64": np.int64, "string": object, "float": np.float32, "double": np.float64}[value]
    vector = np.array([numbers.get(word, "" if value == "string" else 0) for word in vocabulary], dtype)
    output_type = helper.make_tensor_type_proto(ELEMENTS[value], [None])
    return NodeCase(
        [numbers],
        {f"{key}_vocabulary": vocabulary},
        input_types={0: map_type(key, value)},
        output_types={0: output_type},
        expected=lambda inputs: [vector],
    )


@builds("ZipMap", domain=DOMAIN)
def zip_map(d: Draws, operator: Operator) -> NodeCase:
    """A map per row, or one for a vector, from labels to numbers."""
    x = d.array(np.dtype(np.float32), d.shape(1, 2, min_size=1))
    labels: list[Any] = ["a", "b", "c", "d"] if d.boolean() else [1, 5, 3, -2]
    name = "classlabels_strings" if isinstance(labels[0], str) else "classlabels_int64s"
    return NodeCase([x], {name: labels[: x.shape[-1]]})
