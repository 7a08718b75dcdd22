"""Builders of ai.onnx.ml ops that turn features into other ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_float
from miniort.types import STRING

DOMAIN = "ai.onnx.ml"


@builds("ArrayFeatureExtractor", domain=DOMAIN)
def array_feature_extractor(d: Draws, operator: Operator) -> NodeCase:
    """Some of the last axis, in any order and again."""
    x = d.array(d.dtype(operator), d.shape(1, 3, min_size=1))
    return NodeCase([x, d.rng().integers(0, x.shape[-1], d.integer(1, 4))], constants=d.constants(1))


@builds("Binarizer", domain=DOMAIN)
def binarizer(d: Draws, operator: Operator) -> NodeCase:
    """1 above a threshold, else 0."""
    return NodeCase([d.array(d.dtype(operator), d.shape(), -3, 3)], d.some(threshold=d.choice([-1.0, 0.5, 1.0])))


@builds("FeatureVectorizer", domain=DOMAIN)
def feature_vectorizer(d: Draws, operator: Operator) -> NodeCase:
    """Tables of as many rows side by side, as float32."""
    dtype, rows = d.dtype(operator, "T1"), d.integer(1, 3)
    widths = [d.integer(1, 3) for _ in range(d.integer(1, 3))]
    return NodeCase([d.array(dtype, (rows, width), -9, 9) for width in widths], {"inputdimensions": widths})


@builds("Imputer", domain=DOMAIN)
def imputer(d: Draws, operator: Operator) -> NodeCase:
    """One value, which may be NaN, replaced by another, the same for all features or one for each."""
    dtype, shape = d.dtype(operator), d.shape(2, 2, min_size=1)
    count = d.choice([1, shape[1]])
    rng = d.rng()
    if is_float(dtype):
        x = rng.choice([np.nan, -1.0, 0.0, 2.5], shape).astype(dtype)
        numbers = [d.number(-3, 3) for _ in range(count)]
        return NodeCase([x], {"imputed_value_floats": numbers} | d.some(replaced_value_float=d.choice([float("nan"), -1.0, 0.0])))
    x = rng.integers(-1, 2, shape).astype(dtype)
    return NodeCase(
        [x], {"imputed_value_int64s": [d.integer(-9, 9) for _ in range(count)]} | d.some(replaced_value_int64=d.choice([-1, 0]))
    )


@builds("Normalizer", domain=DOMAIN)
def normalizer(d: Draws, operator: Operator) -> NodeCase:
    """Rows of [N, C] or [C] divided by their largest, their sum, or their length; rows of zeros as they are."""
    x = d.array(d.dtype(operator), d.shape(1, 2, min_size=1), -4, 4, special=False)
    if x.ndim == 2 and d.boolean():
        x[0] = 0
    return NodeCase([x], d.some(norm=d.choice(["MAX", "L1", "L2"])))


@builds("OneHotEncoder", domain=DOMAIN)
def one_hot_encoder(d: Draws, operator: Operator) -> NodeCase:
    """A 1 at each element's category; unknown ones have none."""
    dtype, shape = d.dtype(operator), d.shape(1, 2, min_size=1)
    known: list[Any] = ["a", "b", "ä"] if dtype == STRING else [1, 2, 5]
    unknown: list[Any] = ["z"] if dtype == STRING else [3]
    x = np.array(known + unknown, dtype)[d.rng().integers(0, 4, shape)]
    return NodeCase([np.asarray(x, dtype)], {"cats_strings" if dtype == STRING else "cats_int64s": d.permutation(known)} | d.some(zeros=1))


@builds("Scaler", domain=DOMAIN)
def scaler(d: Draws, operator: Operator) -> NodeCase:
    """(x - offset) · scale, one pair for all features or one for each."""
    x = d.array(d.dtype(operator), d.shape(2, 2, min_size=1), -9, 9)
    count = d.choice([1, x.shape[1]])
    return NodeCase([x], {name: [d.number(0.125, 2) for _ in range(count)] for name in ("offset", "scale")})
