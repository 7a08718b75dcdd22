"""Builders of losses."""

from __future__ import annotations

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse


@builds("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def class_loss(d: Draws, operator: Operator) -> NodeCase:
    """Scores [N, C, ...] against labels [N, ...], with weights per class, and labels that are ignored."""
    dtype, label_type = d.dtype(operator), d.dtype(operator, "Tind")
    batch, classes, *places = d.shape(2, 4, min_size=1)
    scores = d.ordinary(dtype, (batch, classes, *places))
    labels = d.array(label_type, (batch, *places), 0, classes - 1)
    attributes = d.some(reduction=d.choice(["none", "sum", "mean"]))
    if labels.size > 1 and d.boolean():
        attributes["ignore_index"] = d.choice([-1, 0, classes + 2])
        labels.reshape(-1)[1:] = np.where(d.rng().random(labels.size - 1) < 0.3, attributes["ignore_index"], labels.reshape(-1)[1:])
        if labels.reshape(-1)[0] == attributes["ignore_index"]:  # a mean over none of them isn't defined
            attributes["reduction"] = d.choice(["none", "sum"])
    weights = d.positive(dtype, (classes,)) if d.boolean() else None
    outputs = d.integer(1, 2) if operator.op == "SoftmaxCrossEntropyLoss" else 1
    case = NodeCase(d.trimmed([scores, labels, weights]), attributes, outputs, d.constants(1, 2), atol=1e-4)
    if is_coarse(dtype):
        case.tolerance, case.atol = 2**-4, 0.1
    return case
