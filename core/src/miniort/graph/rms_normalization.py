"""Raising `RMSNormalization`: x / √(mean of x² + epsilon) · scale (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from miniort.graph.normalization import Normalized, normalized_values
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, can_make, make_node, replace_value
from miniort.model.constants import shape_of
from miniort.types import dtype_from_onnx


def raise_rms_normalization(model: ir.Model, context: PassContext) -> None:
    """Replace the long forms of `RMSNormalization` by the op. One without a scale gets a scale of ones."""
    for graph in list(model.graphs()):
        if not isinstance(graph, ir.Graph):
            continue
        for found in normalized_values(graph, context):
            _replace(found, context)


def _replace(found: Normalized, context: PassContext) -> None:
    last = found.root.producer()
    x = found.x if found.narrow is None else found.narrow
    sizes = (shape_of(found.x) or ())[-found.count :]
    assert last is not None
    if not all(isinstance(size, int) for size in sizes) or not can_make(context, "RMSNormalization", 23, [x, found.scale or x]):
        return
    scale = found.scale
    if scale is None:
        assert x.dtype is not None
        scale = add_constant(last, f"{found.root.name}/ones", np.ones([int(str(size)) for size in sizes], dtype_from_onnx(int(x.dtype))))
    attributes = {"axis": -found.count, "epsilon": found.epsilon}
    node = make_node(context, last, "RMSNormalization", 23, [x, scale], attributes)
    replace_value(found.root, node.outputs[0], found.nodes)
    context.changed(node, f"x / √(mean of x² + epsilon) in {len(found.nodes)} nodes made RMSNormalization")


RAISE_RMS_NORMALIZATION = GraphPass("raise-rms-normalization", Level.EXTENDED, raise_rms_normalization)
