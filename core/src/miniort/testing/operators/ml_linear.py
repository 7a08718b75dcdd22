"""Builders of linear models and support vector machines."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds
from miniort.types import Array

DOMAIN = "ai.onnx.ml"
POST_TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"]


def numbers(d: Draws, *shape: int) -> list[float]:
    """Coefficients, flat."""
    return [float(number) for number in d.rng().uniform(-1, 1, shape).astype(np.float32).ravel()]


def transformed(scores: Array, name: str) -> Array:
    """Scores [N, targets] after a post_transform, as float32; SOFTMAX_ZERO leaves scores of 0 as they are."""
    if name == "LOGISTIC":
        scores = 1 / (1 + np.exp(-scores))
    if name.startswith("SOFTMAX"):
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        if name == "SOFTMAX_ZERO":
            shares = np.where(scores == 0, 0, shares)
        scores = shares / np.maximum(shares.sum(axis=1, keepdims=True), 1e-30)
    return scores.astype(np.float32)


def labels(d: Draws, count: int, ints: str = "classlabels_ints") -> dict[str, Any]:
    """Names or numbers of classes."""
    return {"classlabels_strings": ["a", "b", "ä", "c"][:count]} if d.boolean() else {ints: [5, -1, 7, 2][:count]}


@builds("LinearClassifier", domain=DOMAIN)
def linear_classifier(d: Draws, operator: Operator) -> NodeCase:
    """x [N, C], coefficients [classes, C]."""
    classes, x = d.integer(2, 4), d.ordinary(d.dtype(operator, "T1"), d.shape(2, 2, min_size=1))
    attributes = {"coefficients": numbers(d, classes, x.shape[1])} | labels(d, classes)
    attributes |= d.some(intercepts=numbers(d, classes), multi_class=d.integer(0, 1), post_transform=d.choice(POST_TRANSFORMS))
    coefficients = np.reshape(attributes["coefficients"], (classes, -1))
    scores = x.astype(np.float64) @ coefficients.T + np.array(attributes.get("intercepts", 0.0))
    return NodeCase([x], attributes, 2, expected=lambda inputs: classified(scores, attributes))


def classified(scores: Array, attributes: dict[str, Any]) -> list[Array]:
    """The labels of the largest scores, and the scores transformed. scores: [N, classes]."""
    names = next(
        np.array(attributes[name], object if "strings" in name else np.int64) for name in attributes if name.startswith("classlabels")
    )
    return [names[scores.argmax(axis=1)], transformed(scores, attributes.get("post_transform", "NONE"))]


@builds("LinearRegressor", domain=DOMAIN)
def linear_regressor(d: Draws, operator: Operator) -> NodeCase:
    """x [N, C], coefficients [targets, C]."""
    targets, x = d.integer(1, 3), d.ordinary(d.dtype(operator), d.shape(2, 2, min_size=1))
    attributes: dict[str, Any] = {"coefficients": numbers(d, targets, x.shape[1])}
    attributes |= {"targets": targets} if targets > 1 else d.some(targets=1)
    attributes |= d.some(intercepts=numbers(d, targets), post_transform=d.choice(POST_TRANSFORMS))
    coefficients = np.reshape(attributes["coefficients"], (targets, -1))
    scores = x.astype(np.float64) @ coefficients.T + np.array(attributes.get("intercepts", 0.0))
    return NodeCase([x], attributes, expected=lambda inputs: [transformed(scores, attributes.get("post_transform", "NONE"))])


def kernel(d: Draws) -> dict[str, Any]:
    """A kernel's type and its parameters gamma, coef0 and degree."""
    attributes: dict[str, Any] = d.some(kernel_type=d.choice(["LINEAR", "POLY", "RBF", "SIGMOID"]))
    return attributes | {"kernel_params": [d.number(0.125, 1), d.number(0, 1), float(d.integer(1, 3))]}


@builds("SVMClassifier", domain=DOMAIN)
def svm_classifier(d: Draws, operator: Operator) -> NodeCase:
    """One class against another: support vectors [count, C], coefficients [classes - 1, count], an offset per pair of classes."""
    classes, x = d.integer(2, 4), d.ordinary(d.dtype(operator, "T1"), d.shape(2, 2, min_size=1))
    per_class = [d.integer(1, 2) for _ in range(classes)]
    pairs = classes * (classes - 1) // 2
    attributes = kernel(d) | labels(d, classes)
    attributes |= {
        "vectors_per_class": per_class,
        "support_vectors": numbers(d, sum(per_class), x.shape[1]),
        "coefficients": numbers(d, classes - 1, sum(per_class)),
        "rho": numbers(d, pairs),
    }
    if d.boolean():
        attributes |= {"prob_a": [-abs(number) for number in numbers(d, pairs)], "prob_b": numbers(d, pairs)}
    return NodeCase([x], attributes | d.some(post_transform=d.choice(POST_TRANSFORMS)), 2, atol=1e-4)


@builds("SVMRegressor", domain=DOMAIN)
def svm_regressor(d: Draws, operator: Operator) -> NodeCase:
    """By support vectors [count, C], or linear; one-class gives the sign."""
    x = d.ordinary(d.dtype(operator), d.shape(2, 2, min_size=1))
    count = d.integer(0, 3)
    attributes = kernel(d) | {"rho": numbers(d, 1), "coefficients": numbers(d, count or x.shape[1])} | d.some(one_class=d.integer(0, 1))
    if count:
        attributes |= {"n_supports": count, "support_vectors": numbers(d, count, x.shape[1])}
    else:
        attributes.pop("kernel_type", None)
    return NodeCase([x], attributes, atol=1e-4, expected=lambda inputs: [svm_regression(x, **attributes)])


def svm_regression(
    x: Array,
    kernel_params: list[float],
    rho: list[float],
    coefficients: list[float],
    support_vectors: list[float] | None = None,
    kernel_type: str = "LINEAR",
    n_supports: int = 0,
    one_class: int = 0,
) -> Array:
    """Σ coefficient · kernel(x, vector) + rho, or x · coefficients + rho without vectors. x: [N, C] -> [N, 1]."""
    gamma, offset, degree = kernel_params
    rows = x.astype(np.float64)
    similarity = rows
    if support_vectors is not None:
        vectors = np.reshape(support_vectors, (n_supports, -1))
        product = rows @ vectors.T
        similarity = {
            "LINEAR": product,
            "POLY": (gamma * product + offset) ** degree,
            "RBF": np.exp(-gamma * ((rows[:, None] - vectors) ** 2).sum(axis=2)),
            "SIGMOID": np.tanh(gamma * product + offset),
        }[kernel_type]
    scores = similarity @ np.array(coefficients) + rho[0]
    return (np.where(scores > 0, 1, -1) if one_class else scores).astype(np.float32)[:, None]
