"""Types and shapes of all values, by onnx's own shape inference."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.model.loading import all_nodes

_UNKNOWN_DOMAIN = "miniort.unknown"

INVENTED_SIZE = "unk__"
"""How the names of sizes begin that onnx's inference makes up, to tell unknown sizes apart."""
_MAP_OPS = frozenset(("ai.onnx.ml", op) for op in ("ZipMap", "CastMap", "DictVectorizer"))


def infer_types(model: ir.Model) -> None:
    """Write what can be known of element types and shapes into the values. What can't be known stays open; nothing fails.

    Nodes that keep another opset than the model's are hidden, as onnx would read them as ops of the model's opset; and the ops
    on maps, of which onnx-ir knows no type: ZipMap gives one, and onnx crashes on the others where their input's type isn't known.
    Numbers that are computed from shapes are followed only where every value has a name of its own: onnx keeps them by name, and would
    take those of one branch of an `If` for those of the other. What the model itself says of its outputs' shapes stays as it is.
    """
    declared = [(value, value.shape) for value in model.graph.outputs if value.shape is not None]
    hidden = [(node, node.domain) for node in all_nodes(model) if node.version is not None or node.op_identifier()[:2] in _MAP_OPS]
    imports = dict(model.opset_imports)
    try:
        if hidden:
            model.opset_imports[_UNKNOWN_DOMAIN] = 1
        for node, _ in hidden:
            node.domain = _UNKNOWN_DOMAIN
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=_has_unique_names(model))(model)
    finally:
        for node, domain in hidden:
            node.domain = domain
        model.opset_imports.clear()
        model.opset_imports.update(imports)
        for value, shape in declared:
            value.shape = shape


def _has_unique_names(model: ir.Model) -> bool:
    names = [value.name for node in all_nodes(model) for value in node.outputs if value.name]
    return len(set(names)) == len(names)


def _run(model: ir.Model, context: PassContext) -> None:
    infer_types(model)


INFER_TYPES = GraphPass("infer-types", Level.REQUIRED, _run)
