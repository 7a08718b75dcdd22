"""Losses of classifiers: NegativeLogLikelihoodLoss, SoftmaxCrossEntropyLoss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import as_dtype, widen
from miniort_cpu.kernels.softmax import log_softmax

kernels = KernelTable("cpu")

Loss = Callable[[Array, Array, "Array | None"], Array]
"""f(log probabilities [N, C, ...], classes [N, ...], weights [C]) -> the loss: [N, ...], or [] if it's reduced."""


def _likelihood_loss(node: NodeContext) -> Loss:
    """-x[n, c, ...] · weight[c], for the class c that `target` says; a target of `ignore_index` counts for nothing."""
    ignored, reduction = node.attribute("ignore_index", None), node.attribute("reduction", "mean")
    if reduction not in ("none", "sum", "mean"):
        raise KernelError(f"node {node.name!r} ({node.op}): its reduction must be none, sum or mean, found {reduction!r}")

    def loss(x: Array, target: Array, weight: Array | None) -> Array:
        left_out = np.zeros(target.shape, np.bool_) if ignored is None else target == ignored
        classes = np.where(left_out, 0, target)
        if classes.size and (classes.min() < 0 or classes.max() >= x.shape[1]):
            raise IndexError(f"{node.op}'s classes must lie in [0, {x.shape[1]}), found {classes.min()} to {classes.max()}")
        chosen = np.take_along_axis(x, np.expand_dims(classes, 1), 1).squeeze(1)
        weights = np.ones(target.shape, x.dtype) if weight is None else weight[classes]
        weights = np.where(left_out, x.dtype.type(0), weights)
        losses: Array = np.where(left_out, x.dtype.type(0), -chosen * weights)
        if reduction == "none":
            return losses
        total: Array = np.add.reduce(losses, None, out=...)
        return total if reduction == "sum" else np.divide(total, np.add.reduce(weights, None, out=...), out=...)

    return loss


@kernels.register("NegativeLogLikelihoodLoss", versions=(12, None))
def negative_log_likelihood_loss(node: NodeContext) -> Run:
    """The loss of log probabilities, for each element, or summed, or averaged by weight.

    x: [N, C, ...]; target: [N, ...] int; weight: [C] or absent -> [N, ...], or []
    """
    loss = _likelihood_loss(node)

    def run(x: Array, target: Array, weight: Array | None = None) -> Array:
        return as_dtype(loss(widen(x), target, None if weight is None else widen(weight)), x.dtype)

    return run


@kernels.register("SoftmaxCrossEntropyLoss", versions=(12, None))
def softmax_cross_entropy_loss(node: NodeContext) -> Run:
    """The loss of scores that become log probabilities by a softmax over axis 1, and these.

    x: [N, C, ...]; labels: [N, ...] int; weight: [C] or absent -> loss [N, ...] or [], log probabilities [N, C, ...]
    """
    loss = _likelihood_loss(node)
    allocate = node.provider.allocate

    def run(x: Array, labels: Array, weight: Array | None = None) -> tuple[Array, Array]:
        wide = widen(x)
        log_probabilities = log_softmax(allocate, wide, 1) if x.size else wide.copy()
        value = loss(log_probabilities, labels, None if weight is None else widen(weight))
        return as_dtype(value, x.dtype), as_dtype(log_probabilities, x.dtype)

    return run
