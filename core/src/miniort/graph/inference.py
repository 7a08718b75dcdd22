"""Types and shapes of all values, by onnx's own shape inference."""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from miniort.graph.passes import GraphPass, Level, PassContext


def infer_types(model: ir.Model) -> None:
    """Write what can be known of element types and shapes into the values. What can't be known stays open; nothing fails."""
    # The pass logs what it couldn't infer, which is no news: kernels are chosen with what is known.
    logger = logging.getLogger("onnx_ir.passes.common.shape_inference")
    disabled, logger.disabled = logger.disabled, True
    try:
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    finally:
        logger.disabled = disabled


def _run(model: ir.Model, context: PassContext) -> None:
    infer_types(model)


INFER_TYPES = GraphPass("infer-types", Level.REQUIRED, _run)
