"""Builders of padding and cropping."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds
from miniort.types import STRING


@builds("Pad")
def pad(d: Draws, operator: Operator) -> NodeCase:
    """Every mode, elements also taken away; the pads are an attribute, then an input, of all axes or some."""
    dtype = d.dtype(operator)
    modes = ["constant", "reflect", "edge"] + (["wrap"] if operator.version >= 19 else [])
    attributes = d.some(mode=d.choice(modes))
    mode = attributes.get("mode", "constant")
    shape = d.shape(1, 3, min_size=0 if mode == "constant" else 2)
    axes = list(range(len(shape)))
    chosen = None
    if operator.version >= 18 and d.boolean():
        axes = d.permutation(axes)[: d.integer(1, len(shape))]
        chosen = np.array([axis - len(shape) if d.boolean() else axis for axis in axes], d.choice([np.int32, np.int64]))
    most = {"constant": 3, "edge": 3, "reflect": 1, "wrap": 2}[mode]
    least = -1 if mode == "constant" and d.boolean() else 0
    pads = [d.integer(least if shape[axis] > 1 else 0, most) for axis in (*axes, *axes)]
    x = d.array(dtype, shape)
    if operator.has_attribute("pads"):
        return NodeCase([x], attributes | {"pads": pads} | d.some(value=d.number(-3, 3)))
    value = d.array(dtype, (), special=dtype == STRING) if mode == "constant" and d.boolean() else None
    inputs: list[Any] = [x, np.array(pads, np.int64), value, *([] if operator.version < 18 else [chosen])]
    inputs = d.trimmed(inputs)
    return NodeCase(inputs, attributes, constants=d.constants(*range(1, len(inputs))))


@builds("CenterCropPad")
def center_crop_pad(d: Draws, operator: Operator) -> NodeCase:
    """Cropped on some axes and padded on others."""
    shape = d.shape(1, 3)
    axes = d.axes(len(shape), operator, at_least=1) if d.boolean() else None
    target = [d.integer(0, 6) for _ in (axes or shape)]
    attributes = {} if axes is None else {"axes": axes}
    return NodeCase([d.array(d.dtype(operator), shape), np.array(target, d.dtype(operator, "Tind"))], attributes, constants=d.constants(1))
