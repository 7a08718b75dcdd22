"""Writing a model's nodes in a newer opset, so that a graph with ops of that opset stays one that any runtime loads.

`bound_opset` finds how far the model can go before other passes make nodes of newer opsets; `unify_opsets` writes all nodes in one opset
once they have. Only nodes whose op means or looks something else in the newer opset are changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir

from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant
from miniort.model.constants import shape_of
from miniort.model.loading import all_nodes
from miniort.model.schemas import node_opset, schema_version
from miniort.types import dtype_from_onnx

RAISED_OPSETS = (24, 23, 20, 17, 14)
"""The opsets that gave the ops that raising makes: Swish; Attention, RotaryEmbedding, RMSNormalization; Gelu; LayerNormalization;
HardSwish."""
_IR_VERSIONS = {24: 12, 23: 11, 21: 10, 20: 9, 15: 8}
"""The format version that came with an opset."""


@dataclass(frozen=True)
class Conversion:
    """What a node becomes. inputs: constants that are added behind its own inputs, None for one that's left out."""

    inputs: tuple[np.ndarray | None, ...] = ()
    removed: tuple[str, ...] = ()
    attributes: Mapping[str, int | str] | None = None
    op: str | None = None


Rule = Callable[[ir.Node], "Conversion | None"]
"""What a node becomes when the opset is passed that the rule is for; None if that can't be said in the newer opset."""


def _refuse(node: ir.Node) -> Conversion | None:
    return None


def _without(*names: str) -> Rule:
    """Nothing changes, provided that the node has none of these attributes, which the newer opset doesn't know."""

    def rule(node: ir.Node) -> Conversion | None:
        return None if any(name in node.attributes for name in names) else Conversion()

    return rule


def _integers_as_inputs(*names: str) -> Rule:
    """Attributes that hold whole numbers become inputs."""

    def rule(node: ir.Node) -> Conversion | None:
        given = [node.attributes.get(name) for name in names]
        if any(attribute is not None and attribute.is_ref() for attribute in given):
            return None
        arrays = tuple(None if each is None else np.atleast_1d(np.array(each.value, np.int64)) for each in given)
        while arrays and arrays[-1] is None:
            arrays = arrays[:-1]
        return Conversion(arrays, tuple(name for name in names if name in node.attributes))

    return rule


def _softmax(node: ir.Node) -> Conversion | None:
    """Before opset 13 it's taken over all axes from `axis` on, since then over that one."""
    shape = next((shape for value in (node.inputs[0], node.outputs[0]) if value is not None and (shape := shape_of(value))), None)
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    return Conversion(attributes={"axis": -1}) if shape and axis % len(shape) == len(shape) - 1 else None


def _clip(node: ir.Node) -> Conversion | None:
    bounds = [_like_input(node, name) for name in ("min", "max")]
    if any(name in node.attributes and bound is None for name, bound in zip(("min", "max"), bounds, strict=True)):
        return None
    while bounds and bounds[-1] is None:
        bounds.pop()
    return Conversion(tuple(bounds), tuple(name for name in ("min", "max") if name in node.attributes))


def _pad(node: ir.Node) -> Conversion | None:
    value = _like_input(node, "value")
    if "pads" not in node.attributes or ("value" in node.attributes and value is None):
        return None
    pads = np.array(node.attributes["pads"].as_ints(), np.int64)
    removed = tuple(name for name in ("pads", "value") if name in node.attributes)
    return Conversion((pads,) if value is None else (pads, value), removed)


def _like_input(node: ir.Node, name: str) -> np.ndarray | None:
    """A number that's an attribute, of the element type of the node's first input."""
    dtype = None if node.inputs[0] is None else node.inputs[0].dtype
    attribute = node.attributes.get(name)
    return None if dtype is None or attribute is None else np.array(attribute.as_float(), dtype_from_onnx(int(dtype)))


def _split(node: ir.Node) -> Conversion | None:
    """Since opset 18 a node without sizes says how many parts there are."""
    return Conversion() if len(node.inputs) > 1 or "split" in node.attributes else Conversion(attributes={"num_outputs": len(node.outputs)})


def _batch_normalization(node: ir.Node) -> Conversion | None:
    return None if len([value for value in node.outputs if value.name]) > 1 else Conversion()


def _spatial(node: ir.Node) -> Conversion | None:
    whole = "spatial" in node.attributes
    return None if whole and not node.attributes["spatial"].as_int() else Conversion(removed=("spatial",) if whole else ())


def _dropout(node: ir.Node) -> Conversion | None:
    """At inference the ratio changes nothing."""
    return Conversion(removed=("ratio",) if "ratio" in node.attributes else ())


def _grid_sample(node: ir.Node) -> Conversion | None:
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "bilinear"
    return Conversion(attributes={"mode": {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)})


def _resize(node: ir.Node) -> Conversion | None:
    """Before opset 11 a position is divided by the scale, and the nearest element is the one before it."""
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "nearest"
    if len(node.inputs) != 2 or mode not in ("nearest", "linear"):
        return None
    return Conversion(attributes={"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, op="Resize")


def _dft(node: ir.Node) -> Conversion | None:
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    return Conversion((np.array(axis, np.int64),), ("axis",) if "axis" in node.attributes else ())


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
_BROADCAST = ("Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")

_RULES: Mapping[tuple[str, int], Rule] = {
    **{(op, 7): _without("axis", "broadcast") for op in _BROADCAST},
    **{(op, 7): _without("output_sequence") for op in ("GRU", "LSTM", "RNN")},
    **{(op, 13): _softmax for op in ("Softmax", "LogSoftmax", "Hardmax")},
    **{(f"Reduce{op}", 18): _integers_as_inputs("axes") for op in _REDUCTIONS},
    **{(op, 13): _integers_as_inputs("axes") for op in ("ReduceSum", "Squeeze", "Unsqueeze")},
    ("BatchNormalization", 7): _without("is_test"),
    ("BatchNormalization", 9): _spatial,
    ("BatchNormalization", 14): _batch_normalization,
    ("Clip", 11): _clip,
    ("DFT", 20): _dft,
    ("Dropout", 7): _without("is_test"),
    ("Dropout", 12): _dropout,
    ("Gemm", 7): _without("broadcast"),
    ("GridSample", 20): _grid_sample,
    ("GroupNormalization", 21): _refuse,
    ("Pad", 11): _pad,
    ("Resize", 11): _resize,
    ("RoiAlign", 16): lambda node: Conversion(attributes={"coordinate_transformation_mode": "output_half_pixel"}),
    ("Scan", 9): _refuse,
    ("Scatter", 11): lambda node: Conversion(op="ScatterElements"),
    ("Slice", 10): _integers_as_inputs("starts", "ends", "axes"),
    ("Split", 13): _integers_as_inputs("split"),
    ("Split", 18): _split,
    ("TopK", 10): _integers_as_inputs("k"),
    ("Upsample", 7): _refuse,
    ("Upsample", 9): _refuse,
    ("Upsample", 10): _resize,
}
"""For each op whose form or meaning an opset changed, what has to be done. Other new versions only take more types, or more options."""


@cache
def _rules(op: str, since: int, until: int) -> tuple[Rule, ...]:
    """The rules between two opsets, the older one's own not among them."""
    return tuple(
        rule for (name, version), rule in sorted(_RULES.items(), key=lambda item: item[0]) if name == op and since < version <= until
    )


def bound_opset(model: ir.Model, context: PassContext) -> None:
    """Note up to which opset every node of the model can be written, and every provider's kernel found again: passes go no further."""
    imported = context.opsets.get("", 0)
    context.opset_bound = imported
    for opset in RAISED_OPSETS:
        if opset <= imported:
            break
        obstacle = next(_obstacles(model, opset, context), None)
        if obstacle is None:
            context.opset_bound = max(opset, imported)
            return
        context.changed(obstacle[0], f"keeps the model below opset {opset}: {obstacle[1]}")
    if imported >= RAISED_OPSETS[0]:
        context.opset_bound = onnx.defs.onnx_opset_version()


def _obstacles(model: ir.Model, opset: int, context: PassContext) -> Iterator[tuple[ir.Node, str]]:
    """Nodes that can't be written in an opset, and why."""
    for node in all_nodes(model):
        written = node_opset(node, context.opsets)
        if node.domain != "" or written is None or written >= opset:
            continue
        before, after = schema_version(node.op_type, "", written), schema_version(node.op_type, "", opset)
        if before == after:
            continue
        conversions = [rule(node) for rule in _rules(node.op_type, written, opset)]
        if None in conversions:
            yield node, f"what this {node.op_type} of opset {written} means can't be said there"
            continue
        op = next((each.op for each in conversions if each is not None and each.op is not None), node.op_type)
        dtypes = [None if x is None or x.dtype is None or not int(x.dtype) else dtype_from_onnx(int(x.dtype)) for x in node.inputs[:1]]
        newer = schema_version(op, "", opset)
        if context.supports(node.op_type, "", before, dtypes) and not context.supports(op, "", newer, dtypes):
            yield node, f"no provider has {op} of version {newer}"


def unify_opsets(model: ir.Model, context: PassContext) -> None:
    """Write every node in the newest opset that one of them is in, and import that."""
    imported = context.opsets.get("")
    if imported is None:
        return
    own = [node for node in all_nodes(model) if node.domain == ""]
    newest = max([node.version for node in own if node.version is not None], default=imported)
    if all(node.version is None for node in own):
        return
    opset = max(newest, imported)
    obstacle = next(_obstacles(model, opset, context), None)
    if obstacle is not None:
        context.changed(obstacle[0], f"nodes keep opsets of their own, as not all can be written in opset {opset}: {obstacle[1]}")
        return
    converted = 0
    for node in own:
        for rule in _rules(node.op_type, node_opset(node, context.opsets) or opset, opset):
            conversion = rule(node)
            assert conversion is not None
            converted += _convert(node, conversion)
        node.version = None
    model.graph.opset_imports[""] = opset
    model.ir_version = max(model.ir_version, next((version for since, version in _IR_VERSIONS.items() if opset >= since), 0))
    context.changed(f"opset {imported}", f"written in opset {opset}, {converted} nodes in another form")


def _convert(node: ir.Node, conversion: Conversion) -> bool:
    if conversion == Conversion():
        return False
    for name in conversion.removed:
        node.attributes.pop(name)
    for name, value in (conversion.attributes or {}).items():
        node.attributes[name] = ir.AttrString(name, value) if isinstance(value, str) else ir.AttrInt64(name, value)
    if conversion.inputs:
        count = 2 if node.op_type == "DFT" else len(node.inputs)
        node.resize_inputs(count + len(conversion.inputs))
        for index, array in enumerate(conversion.inputs):
            name = f"{node.name or node.outputs[0].name}/input_{count + index}"
            node.replace_input_with(count + index, None if array is None else add_constant(node, name, array))
    if conversion.op is not None:
        node.op_type = conversion.op
        if conversion.op == "Resize":
            scales = node.inputs[1]
            node.resize_inputs(3)
            node.replace_input_with(1, None)
            node.replace_input_with(2, scales)
    return True


BOUND_OPSET = GraphPass("bound-opset", Level.EXTENDED, bound_opset)
UNIFY_OPSETS = GraphPass("unify-opsets", Level.EXTENDED, unify_opsets)
