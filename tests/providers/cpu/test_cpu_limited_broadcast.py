"""Ops of opset 6 and before, that broadcast only where `broadcast` says so, from `axis` on."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.errors import RunError

OPS = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Less": np.less, "Greater": np.greater}
LOGIC = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor, "Equal": np.equal}


@pytest.mark.parametrize("op", [*OPS, *LOGIC])
def test_axes(op, node, same, sample):
    dtype, function = (bool, LOGIC[op]) if op in LOGIC else (np.float32, OPS[op])
    for opset in (1, 6) if op not in ("Add", "Sub", "Mul", "Div") else (6,):
        x = sample(dtype, (2, 3, 4, 5), low=1)
        for shape, axis, full in (
            ((), None, ()),
            ((1,), None, (1,)),
            ((5,), None, (5,)),
            ((4, 5), None, (4, 5)),
            ((3, 4), 1, (3, 4, 1)),
            ((2,), 0, (2, 1, 1, 1)),
            ((3,), -3, (3, 1, 1)),
            ((1, 1), 0, (1, 1, 1, 1)),
        ):
            y = sample(dtype, shape, seed=1, low=1)
            attributes = {"broadcast": 1} | ({} if axis is None else {"axis": axis})
            same(node(op, opset, [x, y], **attributes)(x, y)[0], np.asarray(function(x, y.reshape(full))))
        y = sample(dtype, x.shape, seed=1, low=1)
        same(node(op, opset, [x, y])(x, y)[0], function(x, y))
        with pytest.raises(RunError, match="broadcast=1"):
            node(op, opset, [x, dtype])(x, y[0])


def test_gemm_and_prelu(node, same, sample):
    a, b, c = sample(np.float32, (2, 3)), sample(np.float32, (3, 4), seed=1), sample(np.float32, (4,), seed=2)
    same(node("Gemm", 6, [a, b, c], broadcast=1, alpha=0.5)(a, b, c)[0], (0.5 * a @ b + c).astype(np.float32), atol=1e-5)
    x = sample(np.float32, (2, 3, 4, 5))
    for slope in (np.array([0.5], np.float32), np.array([0.5, 2, -1], np.float32)):
        full = slope.reshape(-1, 1, 1)
        same(node("PRelu", 6, [x, slope])(x, slope)[0], np.where(x < 0, x * full, x).astype(np.float32))
    x, slope = sample(np.float32, (2, 3)), np.array([0.5, 2, -1], np.float32)
    same(node("PRelu", 6, [x, slope])(x, slope)[0], np.where(x < 0, x * slope, x).astype(np.float32))
