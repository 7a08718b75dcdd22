"""Preparing features for the models of the domain ai.onnx.ml: choosing, scaling, normalizing, replacing and joining them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import FLOAT32, FLOAT64, as_dtype

kernels = KernelTable("cpu")

DOMAIN = "ai.onnx.ml"


@kernels.register("ArrayFeatureExtractor", versions=(1, None), domain=DOMAIN)
def array_feature_extractor(node: NodeContext) -> Run:
    """The features that are chosen of the last axis. x: [..., F], or [F] taken as [1, F]; chosen: [...] int64 -> [..., number chosen]."""
    return lambda x, chosen: np.atleast_2d(x)[..., chosen.ravel()]


@kernels.register("Binarizer", versions=(1, None), domain=DOMAIN)
def binarizer(node: NodeContext) -> Run:
    """1 where x lies above the threshold, else 0. x: [...] number -> same shape, dtype."""
    threshold = node.attribute("threshold", 0.0)

    def run(x: Array) -> Array:
        return np.asarray(x > threshold).astype(x.dtype)

    return run


@kernels.register("FeatureVectorizer", versions=(1, None), domain=DOMAIN)
def feature_vectorizer(node: NodeContext) -> Run:
    """The features of all inputs side by side, each cut, or filled up with zeros, to its number of features in `inputdimensions`.

    Each input: [N, C], or [C] taken as [1, C] -> [N, sum of inputdimensions] float32
    """
    given: tuple[int, ...] | None = node.attribute("inputdimensions", None)

    def run(*xs: Array) -> Array:
        rows = [x.reshape(1, -1) if x.ndim == 1 else x for x in xs]
        widths = [x.shape[1] for x in rows] if given is None else given
        out = np.zeros((rows[0].shape[0], sum(widths)), FLOAT32)
        start = 0
        for x, width in zip(rows, widths, strict=True):
            taken = min(width, x.shape[1])
            out[:, start : start + taken] = x[:, :taken]
            start += width
        return out

    return run


@kernels.register("Imputer", versions=(1, None), domain=DOMAIN)
def imputer(node: NodeContext) -> Run:
    """`x` with one value, which may be NaN, replaced: by one other, or by one for each feature. x: [..., F] -> same shape, dtype."""
    floats, integers = node.attribute("imputed_value_floats", ()), node.attribute("imputed_value_int64s", ())
    if bool(floats) == bool(integers):
        raise KernelError(f"node {node.name!r} (Imputer) needs one of imputed_value_floats and imputed_value_int64s")
    replaced = node.attribute("replaced_value_float", 0.0) if floats else node.attribute("replaced_value_int64", 0)
    values = np.array(floats or integers)

    def run(x: Array) -> Array:
        found = np.isnan(x) if replaced != replaced else x == replaced
        return np.asarray(np.where(found, values.astype(x.dtype), x))

    return run


def _largest(x: Array) -> Array:
    return np.asarray(x.max(-1, keepdims=True, initial=-np.inf))


def _absolute_sum(x: Array) -> Array:
    total: Array = np.abs(x).sum(-1, keepdims=True)
    return total


def _length(x: Array) -> Array:
    return np.asarray(np.sqrt(np.vecdot(x, x))[..., None])


NORMS: dict[str, Callable[[Array], Array]] = {"MAX": _largest, "L1": _absolute_sum, "L2": _length}


@kernels.register("Normalizer", versions=(1, None), domain=DOMAIN)
def normalizer(node: NodeContext) -> Run:
    """Each row divided by its largest element (MAX), the sum of its elements' sizes (L1), or its length (L2), unless that is zero.

    x: [N, C] or [C] number -> same shape, float32
    """
    name = node.attribute("norm", "MAX")
    if name not in NORMS:
        raise KernelError(f"node {node.name!r} (Normalizer): its norm must be one of {', '.join(NORMS)}, found {name!r}")
    norm = NORMS[name]

    def run(x: Array) -> Array:
        wide = x.astype(FLOAT64)
        divisor = norm(wide)
        return as_dtype(wide / np.where(divisor == 0, 1, divisor), FLOAT32)

    return run


@kernels.register("Scaler", versions=(1, None), domain=DOMAIN)
def scaler(node: NodeContext) -> Run:
    """(x - offset) · scale, each one number, or one for each feature. x: [..., F] number -> same shape, float32."""
    offset, scale = np.array(node.attribute("offset", (0.0,)), FLOAT64), np.array(node.attribute("scale", (1.0,)), FLOAT64)

    def run(x: Array) -> Array:
        return np.asarray((x - offset) * scale).astype(FLOAT32)

    return run
