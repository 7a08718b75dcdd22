"""The builder of NonMaxSuppression."""

from __future__ import annotations

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds


@builds("NonMaxSuppression")
def non_max_suppression(d: Draws, operator: Operator) -> NodeCase:
    """Boxes of whole numbers, corners in any order or centres with sizes: boxes [batch, count, 4], scores [batch, classes, count]."""
    rng, batch, classes, count = d.rng(), d.integer(1, 2), d.integer(1, 2), d.integer(0, 6)
    attributes = d.some(center_point_box=d.integer(0, 1))
    if attributes.get("center_point_box"):
        boxes = np.concatenate([rng.integers(0, 4, (batch, count, 2)), rng.integers(1, 5, (batch, count, 2))], axis=2)
    else:
        first = rng.integers(0, 4, (batch, count, 2))
        boxes = np.concatenate([first, first + rng.integers(1, 5, (batch, count, 2)) * rng.choice([-1, 1], (batch, count, 1))], axis=2)
    scores = np.stack([np.stack([rng.permutation(count) for _ in range(classes)]) for _ in range(batch)]) / 8
    shape = d.choice([(), (1,)])
    inputs = [
        boxes.astype(np.float32),
        scores.astype(np.float32),
        np.full(shape, d.integer(0, 4), np.int64) if d.integer(0, 4) else None,
        np.full(shape, d.choice([0.0, 0.3, 0.55, 1.0]), np.float32) if d.boolean() else None,
        np.full(shape, d.choice([0.0, 0.2, 0.45]), np.float32) if d.boolean() else None,
    ]
    inputs = d.trimmed(inputs)
    return NodeCase(inputs, attributes, constants=d.constants(*range(2, len(inputs))))
