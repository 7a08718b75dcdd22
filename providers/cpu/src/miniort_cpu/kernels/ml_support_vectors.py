"""Support vector machines of the domain ai.onnx.ml: SVMClassifier, SVMRegressor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort_cpu.class_scores import as_rows, class_labels, label_of_sign, logistic, post_transform, top_label, two_columns
from miniort_cpu.floating_point import FLOAT32, FLOAT64

kernels = KernelTable("cpu")

Similarity: TypeAlias = Callable[[Array], Array]
"""f(x [N, F]) -> the kernel function of each row and each support vector, [N, V]."""


def _similarity(node: NodeView, vectors: Array) -> Similarity:
    """The node's kernel function. vectors: [V, F]."""
    gamma, offset, degree = (*node.attribute("kernel_params", ()), 0.0, 0.0, 0.0)[:3]

    def linear(x: Array) -> Array:
        return x @ vectors.T

    def polynomial(x: Array) -> Array:
        return np.asarray((gamma * (x @ vectors.T) + offset) ** degree)

    def sigmoid(x: Array) -> Array:
        return np.asarray(np.tanh(gamma * (x @ vectors.T) + offset))

    squares = np.vecdot(vectors, vectors)

    def radial(x: Array) -> Array:
        distances = np.vecdot(x, x)[:, None] + squares - 2 * (x @ vectors.T)  # squared
        return np.asarray(np.exp(-gamma * np.maximum(distances, 0)))

    functions = {"LINEAR": linear, "POLY": polynomial, "RBF": radial, "SIGMOID": sigmoid}
    name = node.attribute("kernel_type", "LINEAR")
    if name not in functions:
        raise KernelError(f"node {node.name!r} ({node.op}): its kernel_type must be one of {', '.join(functions)}, found {name!r}")
    return functions[name]


@kernels.register("SVMRegressor", versions=(1, None), domain="ai.onnx.ml")
def svm_regressor(node: NodeContext) -> Run:
    """Σ coefficient · kernel(x, vector) + rho, transformed; with `one_class` its sign. x: [N, F] numbers -> [N, 1] float32.

    Without support vectors x · coefficients + rho.
    """
    coefficients = np.array(node.attribute("coefficients", ()), FLOAT64)
    rho = np.array(node.attribute("rho", (0.0,)), FLOAT64)
    count, one_class = node.attribute("n_supports", 0), node.attribute("one_class", 0)
    _, transform = post_transform(node)
    similarity = _similarity(node, np.array(node.attribute("support_vectors"), FLOAT64).reshape(count, -1)) if count else None

    def run(x: Array) -> Array:
        rows = as_rows(x)
        scores = ((rows if similarity is None else similarity(rows)) @ coefficients + rho[0])[:, None]
        if one_class:
            return np.where(scores > 0, np.float32(1), np.float32(-1))
        return transform(scores).astype(FLOAT32)

    return run


@kernels.register("SVMClassifier", versions=(1, None), domain="ai.onnx.ml")
def svm_classifier(node: NodeContext) -> Run:
    """A class for each row, by the votes of one machine for each pair of classes (as libsvm), or by a linear score for each class.

    Scores are the machines' (for two classes of the second one, and of the first its negative), or with `prob_a` probabilities.

    x: [N, F] numbers -> labels [N], scores [N, classes], or [N, pairs] float32
    """
    labels = class_labels(node, "classlabels_ints", "classlabels_strings")
    name, transform = post_transform(node)
    sizes = node.attribute("vectors_per_class", ())
    if not sum(sizes):
        return _linear_machine(node, labels)
    classes = labels if labels.size else np.arange(len(sizes))
    decide = _pair_machines(node, sizes)
    slopes, offsets = np.array(node.attribute("prob_a", ()), FLOAT64), np.array(node.attribute("prob_b", ()), FLOAT64)

    def run(x: Array) -> tuple[Array, Array]:
        scores = decide(as_rows(x))
        first, second = np.triu_indices(len(sizes), 1)
        votes = np.zeros((len(scores), len(sizes)), np.int64)
        for pair, (i, j) in enumerate(zip(first, second, strict=True)):
            won = scores[:, pair] > 0
            votes[:, i] += won
            votes[:, j] += ~won
        if slopes.size:
            likely = np.clip(logistic(-(scores * slopes + offsets)), 1e-7, 1 - 1e-7)
            scores = pairwise_coupling(likely, len(sizes))
        elif scores.shape[1] == 1:
            scores = two_columns(scores, name)
        return top_label(votes, classes), transform(scores).astype(FLOAT32)

    return run


def _linear_machine(node: NodeContext, labels: Array) -> Run:
    """Without support vectors: x · coefficientsᵀ + rho, one row of coefficients for each class."""
    count = max(labels.size, 1)
    coefficients = np.array(node.attribute("coefficients", ()), FLOAT64).reshape(count, -1)
    rho = np.array(node.attribute("rho", (0.0,)), FLOAT64)
    _, transform = post_transform(node)

    def run(x: Array) -> tuple[Array, Array]:
        scores = as_rows(x) @ coefficients.T + rho[0]
        winners = label_of_sign(scores, labels) if count == 1 else top_label(scores, labels)
        return winners, transform(scores).astype(FLOAT32)

    return run


def _pair_machines(node: NodeContext, sizes: tuple[int, ...]) -> Callable[[Array], Array]:
    """f(x [N, F]) -> for each pair of classes i < j, in order, a score that's positive for i. -> [N, pairs].

    sizes: how many of the support vectors, which lie in order of their classes, belong to each. A vector of class i has its coefficient
    against class j in row j - 1 if j > i, else j, of `coefficients`: [classes - 1, V].
    """
    count, starts = sum(sizes), np.cumsum((0, *sizes))
    vectors = np.array(node.attribute("support_vectors"), FLOAT64).reshape(count, -1)
    coefficients = np.array(node.attribute("coefficients"), FLOAT64).reshape(-1, count)
    rho = np.array(node.attribute("rho"), FLOAT64)
    similarity = _similarity(node, vectors)
    first, second = np.triu_indices(len(sizes), 1)

    def decide(x: Array) -> Array:
        values = similarity(x)
        parts = [values[:, start:end] @ coefficients[:, start:end].T for start, end in pairwise(starts)]
        by_class = np.stack(parts, 1)  # [N, classes, classes - 1]
        return by_class[:, first, second - 1] + by_class[:, second, first] + rho

    return decide


def pairwise_coupling(likely: Array, classes: int) -> Array:
    """Probabilities of classes from those of pairs (the second method of Wu, Lin and Weng 2004, JMLR 5, as libsvm computes it).

    likely: for each pair i < j, in order, the probability of i if it's one of both; [N, pairs] -> [N, classes]
    """
    rows = len(likely)
    first, second = np.triu_indices(classes, 1)
    r = np.zeros((rows, classes, classes))
    r[:, first, second] = likely
    r[:, second, first] = 1 - likely
    q = -np.swapaxes(r, 1, 2) * r  # q[t, j] = -r[j, t] r[t, j]
    places = np.arange(classes)
    q[:, places, places] = (r * r).sum(1)  # q[t, t] = Σ r[j, t]²
    p = np.full((rows, classes), 1 / classes)
    left = np.arange(rows)  # rows that haven't converged
    for _ in range(max(100, classes)):
        qp = np.matvec(q[left], p[left])
        pqp = np.vecdot(p[left], qp)
        open_rows = np.abs(qp - pqp[:, None]).max(1, initial=0) >= 0.005 / classes
        left, qp, pqp = left[open_rows], qp[open_rows], pqp[open_rows]
        if not left.size:
            break
        part, probabilities = q[left], p[left]
        for t in range(classes):
            step = (pqp - qp[:, t]) / part[:, t, t]
            probabilities[:, t] += step
            pqp = (pqp + step * (step * part[:, t, t] + 2 * qp[:, t])) / (1 + step) ** 2
            qp = (qp + step[:, None] * part[:, t]) / (1 + step)[:, None]
            probabilities /= (1 + step)[:, None]
        p[left] = probabilities
    return p
