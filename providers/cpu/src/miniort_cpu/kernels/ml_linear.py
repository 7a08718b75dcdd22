"""Linear models of the domain ai.onnx.ml: LinearClassifier, LinearRegressor."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.class_scores import as_rows, class_labels, label_of_sign, post_transform, top_label, two_columns
from miniort_cpu.floating_point import FLOAT32, FLOAT64

kernels = KernelTable("cpu")


def _coefficients(node: NodeContext, rows: int) -> Array:
    """The attribute `coefficients`, one row for each class or target. -> [rows, F]."""
    return np.array(node.attribute("coefficients", ()), FLOAT64).reshape(rows, -1)


@kernels.register("LinearClassifier", versions=(1, None), domain="ai.onnx.ml")
def linear_classifier(node: NodeContext) -> Run:
    """The class of the largest of x · coefficientsᵀ + intercepts, and these scores, transformed.

    With one row of coefficients and two labels, the score s is the second's, and -s the first's (1 - s for PROBIT).

    x: [N, F] numbers -> labels [N], scores [N, E] float32
    """
    labels = class_labels(node, "classlabels_ints", "classlabels_strings")
    intercepts = np.array(node.attribute("intercepts", ()), FLOAT64)
    name, transform = post_transform(node)
    coefficients = _coefficients(node, intercepts.size or labels.size or 1)

    def run(x: Array) -> tuple[Array, Array]:
        scores = as_rows(x) @ coefficients.T
        if intercepts.size:
            scores += intercepts
        if scores.shape[1] == 1 and labels.size != 2:
            return label_of_sign(scores, labels), transform(scores).astype(FLOAT32)
        winners = np.concatenate((-scores, scores), 1) if scores.shape[1] == 1 else scores
        if scores.shape[1] == 1:
            scores = two_columns(scores, name)
        classes = labels if labels.size else np.arange(scores.shape[1])
        return top_label(winners, classes), transform(scores).astype(FLOAT32)

    return run


@kernels.register("LinearRegressor", versions=(1, None), domain="ai.onnx.ml")
def linear_regressor(node: NodeContext) -> Run:
    """`x` · coefficientsᵀ + intercepts, transformed. x: [N, F] numbers -> [N, targets] float32."""
    coefficients = _coefficients(node, node.attribute("targets", 1))
    intercepts = np.array(node.attribute("intercepts", (0.0,)), FLOAT64)
    _, transform = post_transform(node)

    def run(x: Array) -> Array:
        return transform(as_rows(x) @ coefficients.T + intercepts).astype(FLOAT32)

    return run
