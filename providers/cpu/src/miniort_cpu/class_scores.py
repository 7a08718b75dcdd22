"""What the classifiers and regressors of ai.onnx.ml make of their scores: a transform, a second column, and labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt
from typing import TypeAlias

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import NodeView
from miniort.types import STRING, Array
from miniort_cpu.floating_point import FLOAT64
from miniort_cpu.kernels.activation import erf

Transform: TypeAlias = Callable[[Array], Array]
"""f(scores [N, E] float64) -> transformed scores, the same shape; a row is one example."""


def unchanged(scores: Array) -> Array:
    """The scores as they are."""
    return scores


def logistic(scores: Array) -> Array:
    """1 / (1 + exp(-x)) of each score by itself."""
    y: Array = 1 / (1 + np.exp(-scores))
    return y


def softmax(scores: Array) -> Array:
    """exp(x) / Σ exp(x) over each row."""
    y = np.exp(scores - scores.max(1, keepdims=True, initial=-np.inf))
    return np.asarray(y / y.sum(1, keepdims=True))


def softmax_zero(scores: Array) -> Array:
    """A softmax over the scores of each row that aren't zero (up to float32's rounding errors), and zero for those that are."""
    y: Array = np.where(np.abs(scores) <= 1e-7, 0, np.exp(scores - scores.max(1, keepdims=True, initial=-np.inf)))
    total = y.sum(1, keepdims=True)
    return np.divide(y, np.where(total == 0, 1, total), out=y)


def probit(scores: Array) -> Array:
    """The x below which a standard normal variable lies with probability p: √2 · erf⁻¹(2p - 1); NaN outside of [0, 1]."""
    y = 2 * scores - 1
    log = np.log((1 - y) * (1 + y))
    # Winitzki's approximation (2008, A handy approximation for the error function), good to 2e-3, starts Halley's iteration.
    half = 2 / (pi * 0.147) + log / 2
    x = np.copysign(np.sqrt(np.sqrt(half * half - log / 0.147) - half), y)
    value = np.empty_like(x)
    for _ in range(3):
        erf(x, value)
        step = (value - y) / (2 / sqrt(pi) * np.exp(-x * x))
        better = x - step / (1 + x * step)
        x = np.where(np.isfinite(better), better, x)
    x = np.where(np.abs(y) == 1, np.copysign(np.inf, y), x)
    return np.where(np.abs(y) <= 1, x * sqrt(2), np.nan)


TRANSFORMS: dict[str, Transform] = {
    "NONE": unchanged,
    "SOFTMAX": softmax,
    "LOGISTIC": logistic,
    "SOFTMAX_ZERO": softmax_zero,
    "PROBIT": probit,
}
"""`post_transform` -> what it does. The order is that of TreeEnsemble's numbers."""


def post_transform(node: NodeView) -> tuple[str, Transform]:
    """The name of the node's `post_transform`, and what it does."""
    given = node.attribute("post_transform", "NONE")
    names = tuple(TRANSFORMS)
    name = names[given] if isinstance(given, int) and 0 <= given < len(names) else given
    if name not in TRANSFORMS:
        raise KernelError(f"node {node.name!r} ({node.op}): its post_transform must be one of {', '.join(names)}, found {given!r}")
    return name, TRANSFORMS[name]


def class_labels(node: NodeView, integers: str, strings: str) -> Array:
    """The labels in whichever of two attributes the node has, int64 or text; empty if it has neither."""
    words: Sequence[str] = node.attribute(strings, ())
    return np.array(words, STRING) if words else np.array(node.attribute(integers, ()), np.int64)


def two_columns(scores: Array, transform: str, probabilities: bool = False) -> Array:
    """Scores of two classes, where there is one score s, that of the second class. scores: [N, 1] -> [N, 2].

    The first class gets 1 - s where s is a probability, which PROBIT takes it for and NONE leaves it as, else -s.
    """
    first = 1 - scores if transform == "PROBIT" or (transform == "NONE" and probabilities) else -scores
    return np.concatenate((first, scores), 1)


def top_label(scores: Array, labels: Array) -> Array:
    """The label of the largest score of each row, the first of equal ones. scores: [N, E]; labels: [E] -> [N]."""
    return np.asarray(labels[np.argmax(scores, 1)])


def label_of_sign(scores: Array, labels: Array) -> Array:
    """Where there is one class: its label (1 without one) for positive scores, else 0 or empty text. scores: [N, 1] -> [N]."""
    label = labels[0] if labels.size else 1
    nothing = "" if labels.dtype == STRING else 0
    return np.where(scores[:, 0] > 0, np.array(label, labels.dtype), np.array(nothing, labels.dtype))


def as_rows(x: Array) -> Array:
    """One example per row, in float64. x: [N, F], or [F] for one example -> [N, F]."""
    return np.atleast_2d(x).astype(FLOAT64)
