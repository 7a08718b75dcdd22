"""Builders of CategoryMapper and LabelEncoder."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_float, onnx_tensor
from miniort.types import STRING, Array, DType

DOMAIN = "ai.onnx.ml"
WORDS = ["a", "b", "ä", ""]
NAMES = {"O": "strings", "i": "int64s", "f": "floats"}


def elements(d: Draws, dtype: DType, values: list[Any]) -> Array:
    """A tensor whose elements are some of the values."""
    return np.asarray(np.array(values, dtype)[d.rng().integers(0, len(values), d.shape())], dtype)


@builds("CategoryMapper", domain=DOMAIN)
def category_mapper(d: Draws, operator: Operator) -> NodeCase:
    """Words to numbers or back, with a default for others."""
    numbers = [5, -1, 7, 2]
    count = d.integer(1, 4)
    attributes: dict[str, Any] = {"cats_strings": WORDS[:count], "cats_int64s": numbers[:count]}
    dtype = d.dtype(operator, "T1")
    attributes |= d.some(default_int64=-9) if dtype == STRING else d.some(default_string="none")
    return NodeCase([elements(d, dtype, WORDS if dtype == STRING else numbers)], attributes)


@builds("LabelEncoder", domain=DOMAIN)
def label_encoder(d: Draws, operator: Operator) -> NodeCase:
    """Any of words and numbers to any: between words and their places in version 1."""
    source = d.dtype(operator, "T1")
    if operator.version == 1:
        attributes: dict[str, Any] = {"classes_strings": WORDS[: d.integer(1, 4)]}
        attributes |= d.some(default_int64=-9) if source == STRING else d.some(default_string="none")
        return NodeCase([elements(d, source, [*WORDS, "z"] if source == STRING else [0, 1, 2, 3, 9])], attributes)
    target = d.dtype(operator, "T2")
    count = d.integer(1, 4)
    keys: list[Any] = values_of(source, operator)[:count]
    values = d.permutation(values_of(target, operator))[:count]
    attributes = {}
    for side, dtype, numbers in (("keys", source, keys), ("values", target, values)):
        name = NAMES[dtype.kind] if dtype in (STRING, np.int64, np.float32) else "tensor"
        if name == "tensor" or (operator.version >= 4 and d.boolean()):
            attributes[f"{side}_tensor"] = onnx_tensor(side, np.array(numbers, dtype))
        else:
            attributes[f"{side}_{name}"] = numbers
    default = None
    if d.boolean():
        default = values_of(target, operator)[0] if d.boolean() else "other" if target == STRING else 9
        name = {"strings": "string", "int64s": "int64", "floats": "float"}[NAMES[target.kind]]
        if "values_tensor" in attributes:
            attributes["default_tensor"] = onnx_tensor("default", np.array([default], target))
        else:
            attributes[f"default_{name}"] = float(default) if name == "float" else default
    x = elements(d, source, values_of(source, operator))
    other: Any = "_Unused" if target == STRING else -0.0 if is_float(target) else -1
    if default is not None:
        other = default
    return NodeCase([x], attributes, expected=lambda inputs: [mapped(x, keys, values, np.array(other, target))])


def mapped(x: Array, keys: list[Any], values: list[Any], other: Array) -> Array:
    """The value of each element's key, where NaN is equal to NaN, or another one. -> x's shape, the type of `other`."""
    by_key = {str(key): value for key, value in zip(keys, values, strict=True)}
    return np.array([by_key.get(str(item), other.item()) for item in x.ravel().tolist()], other.dtype).reshape(x.shape)


def values_of(dtype: DType, operator: Operator) -> list[Any]:
    """Four keys or values of a type; NaN among them from version 4 on, which says what it's equal to."""
    if is_float(dtype):
        return [1.5, float("nan") if operator.version >= 4 else 3.0, -2.0, 0.25]
    return list(WORDS) if dtype == STRING else [5, -1, 7, 2]
