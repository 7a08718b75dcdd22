"""NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss: against loops that read like the specification, and against onnxruntime."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from miniort.errors import KernelError, RunError

SHAPES = [((3, 5), (3,)), ((2, 3, 4), (2, 4)), ((2, 3, 2, 3), (2, 2, 3)), ((2, 4, 2, 1, 3), (2, 2, 1, 3))]


def likelihood_loss(x, target, weight=None, ignore_index=None, reduction="mean"):
    loss, total = np.zeros(target.shape), 0.0
    for place in np.ndindex(target.shape):
        c = target[place]
        if c == ignore_index:
            continue
        w = 1.0 if weight is None else weight[c]
        loss[place] = -x[(place[0], c, *place[1:])] * w
        total += w
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / total


def log_softmax(x):
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


@pytest.mark.parametrize(("shape", "target_shape"), SHAPES)
def test_every_way(shape, target_shape, node, same, sample):
    x, weight = sample(np.float32, shape), sample(np.float32, shape[1:2], seed=1, low=0.5)
    target = np.random.default_rng(0).integers(0, shape[1], target_shape)
    for reduction, weighted, ignored in product(("none", "sum", "mean"), (False, True), (None, 1, -100)):
        labels = target.copy()
        if ignored is not None:
            labels.flat[0] = ignored
        attributes = {"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored})
        inputs = [x, labels, weight] if weighted else [x, labels]
        want = np.array(likelihood_loss(x, labels, weight if weighted else None, ignored, reduction), np.float32)
        same(node("NegativeLogLikelihoodLoss", 13, inputs, **attributes)(*inputs)[0], want, rtol=1e-5)
        wide = log_softmax(x.astype(np.float64))
        want = np.array(likelihood_loss(wide, labels, weight if weighted else None, ignored, reduction), np.float32)
        got = node("SoftmaxCrossEntropyLoss", 13, inputs, 2, **attributes)(*inputs)
        same(got[0], want, rtol=1e-5)
        same(got[1], wide.astype(np.float32), atol=1e-5)
        same(node("SoftmaxCrossEntropyLoss", 13, inputs, **attributes)(*inputs)[0], want, rtol=1e-5)


@pytest.mark.parametrize("op", ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
def test_every_version_and_type(op, node, same, sample, versions, types_of):
    for schema in versions(op, 12):
        for dtype in types_of(schema, "T"):
            for index in (np.int32, np.int64):
                x, target, weight = sample(dtype, (3, 4)), np.array([3, 0, 1], index), sample(dtype, (4,), seed=1, low=1)
                wide = x.astype(np.float64)
                want = likelihood_loss(wide if op[0] == "N" else log_softmax(wide), target, weight.astype(np.float64))
                same(node(op, schema.since_version, [x, target, weight])(x, target, weight)[0], np.array(want).astype(dtype))


def test_against_onnxruntime(node, same, sample):
    x, target, weight = sample(np.float32, (4, 3, 5)), np.random.default_rng(0).integers(0, 3, (4, 5)), np.array([0.5, 1, 2], np.float32)
    for reduction in ("none", "sum", "mean"):
        for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
            model = node(op, 13, [x, target, weight], reduction=reduction, ignore_index=2)
            same(model(x, target, weight)[0], model.onnxruntime(x, target, weight)[0], rtol=1e-5)


def test_what_is_ignored_may_be_infinite_or_out_of_range(node, same):
    x, target = np.array([[-np.inf, -1.0], [-2.0, -3.0]], np.float32), np.array([0, 1])
    same(node("NegativeLogLikelihoodLoss", 13, [x, target], ignore_index=0)(x, target)[0], np.array(3, np.float32))
    target = np.array([255, 1])
    same(node("NegativeLogLikelihoodLoss", 13, [x, target], ignore_index=255)(x, target)[0], np.array(3, np.float32))


def test_no_elements(node, same):
    x, target = np.zeros((0, 3), np.float32), np.zeros(0, np.int64)
    for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
        same(node(op, 13, [x, target], reduction="none")(x, target)[0], np.zeros(0, np.float32))
        same(node(op, 13, [x, target], reduction="sum")(x, target)[0], np.array(0, np.float32))
        same(node(op, 13, [x, target])(x, target)[0], np.array(np.nan, np.float32))


def test_large_scores_do_not_overflow(node, same):
    x, target = np.array([[1000, 0], [0, 1000]], ml_dtypes.bfloat16), np.array([0, 0])
    same(node("SoftmaxCrossEntropyLoss", 13, [x, target], reduction="none")(x, target)[0], np.array([0, 1000], ml_dtypes.bfloat16))


def test_errors(node):
    x = np.zeros((1, 3), np.float32)
    for wrong in (3, -1):
        with pytest.raises(RunError, match=r"\[0, 3\)"):
            node("NegativeLogLikelihoodLoss", 13, [x, np.int64])(x, np.array([wrong]))
    with pytest.raises(KernelError, match="none, sum or mean"):
        node("NegativeLogLikelihoodLoss", 13, [x, np.int64], reduction="median")(x, np.array([0]))
