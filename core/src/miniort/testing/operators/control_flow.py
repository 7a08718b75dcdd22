"""Builders of ops with sub-graphs, whose bodies move values about, so that they run with every type."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, type_of
from miniort.testing.operators.sequences import optional_type, sequence_dtypes, sequence_type
from miniort.types import Array, dtype_to_onnx


def value_info(name: str, array: Array) -> onnx.ValueInfoProto:
    """A value of a sub-graph, of the array's type and shape."""
    return helper.make_tensor_value_info(name, dtype_to_onnx(array.dtype), array.shape)


def identity(source: str, target: str) -> onnx.NodeProto:
    """A node that hands a value on."""
    return helper.make_node("Identity", [source], [target])


@builds("If")
def if_node(d: Draws, operator: Operator) -> NodeCase:
    """Branches that give values of the outer graph, of different shapes; sequences and optionals where the version has them."""
    dtype = d.dtype(operator, "V")
    arrays = {name: d.array(dtype, d.shape()) for name in ("left", "right")}
    kinds = ["tensor", *(["sequence"] if operator.version >= 13 else []), *(["optional"] if operator.version >= 16 else [])]
    kind = d.choice(kinds)
    if kind != "tensor" and dtype not in sequence_dtypes(operator, "V"):
        kind = "tensor"
    makers = {"tensor": "Identity", "sequence": "SequenceConstruct", "optional": "Optional"}

    def result_type(array: Array) -> onnx.TypeProto:
        return {"tensor": type_of(array), "sequence": sequence_type(array.dtype), "optional": optional_type(type_of(array))}[kind]

    twice = d.boolean()

    def branch(name: str, other: str) -> onnx.GraphProto:
        sources = [name, other] if kind == "sequence" else [name]
        nodes = [helper.make_node(makers[kind], sources, ["first"])]
        outputs = [helper.make_value_info("first", result_type(arrays[name]))]
        if twice:
            nodes.append(identity(other, "second"))
            outputs.append(helper.make_value_info("second", type_of(arrays[other])))
        return helper.make_graph(nodes, name, [], outputs)

    condition = np.full(d.choice([(), (1,)]), d.boolean())
    attributes = {"then_branch": branch("left", "right"), "else_branch": branch("right", "left")}
    return NodeCase([condition], attributes, 1 + twice, d.constants(0), captured=arrays)


@builds("Loop")
def loop(d: Draws, operator: Operator) -> NodeCase:
    """Two states that change places in each turn, scans of one and of a captured value; trips and condition are there or not."""
    dtype = d.dtype(operator, "V")
    shape = d.shape(max_rank=2)
    one, other, outer = (d.array(dtype, shape) for _ in range(3))
    turns = d.integer(0, 3)  # turns until the body's condition is false, at least one
    trips = d.choice([None, 0, 1, 2, 3])
    nodes = [
        helper.make_node("Cast", ["turn"], ["turn_float"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Constant", [], ["last"], value=helper.make_tensor("last", onnx.TensorProto.FLOAT, [], [turns])),
        helper.make_node("Less", ["turn_float", "last"], ["goes_on"]),
        identity("one", "other_out"),
        identity("other", "one_out"),
        identity("one", "scan"),
        identity("outer", "outer_scan"),
    ]
    inputs = [
        helper.make_tensor_value_info("turn", onnx.TensorProto.INT64, []),
        helper.make_tensor_value_info("condition", onnx.TensorProto.BOOL, []),
        value_info("one", one),
        value_info("other", other),
    ]
    outputs = [helper.make_tensor_value_info("goes_on", onnx.TensorProto.BOOL, [])]
    outputs += [value_info(name, one) for name in ("one_out", "other_out", "scan", "outer_scan")]
    values: list[Any] = [
        None if trips is None else np.asarray(trips, np.int64),
        d.choice([None, np.asarray(True), np.asarray(False)]),
        one,
        other,
    ]
    names = 4
    if operator.version >= 13 and dtype in sequence_dtypes(operator, "V"):
        nodes.append(helper.make_node("SequenceInsert", ["gathered", "one"], ["gathered_out"]))
        inputs.append(helper.make_value_info("gathered", sequence_type(dtype)))
        outputs.insert(3, helper.make_value_info("gathered_out", sequence_type(dtype)))
        values.append([outer])
        names += 1
    body = helper.make_graph(nodes, "body", inputs, outputs)
    return NodeCase(values, {"body": body}, names, d.constants(0, 1, 2), captured={"outer": outer})


def delay_line(state: Array, element: Array) -> onnx.GraphProto:
    """A body whose state is the element before, which it also gives."""
    inputs = [value_info("state", state), value_info("element", element)]
    nodes = [identity("element", "state_out"), identity("state", "before"), identity("outer", "outer_out")]
    return helper.make_graph(nodes, "body", inputs, [value_info(name, state) for name in ("state_out", "before", "outer_out")])


@builds("Scan")
def scan(d: Draws, operator: Operator) -> NodeCase:
    """A delay line, over any axis and in either direction; version 8 has a batch axis, and lengths."""
    dtype = d.dtype(operator, "V")
    shape = list(d.shape(max_rank=2, min_size=1))
    length = d.integer(1, 4)
    state, outer = d.array(dtype, shape), d.array(dtype, shape)
    attributes: dict[str, Any] = {"num_scan_inputs": 1, "body": delay_line(state, outer)}
    if operator.version == 8:
        batch = d.integer(1, 2)
        lengths = d.array(np.dtype(np.int64), (batch,), 1, length) if d.boolean() else None
        values = [lengths, d.array(dtype, (batch, *shape)), d.array(dtype, (batch, length, *shape))]
        return NodeCase(values, attributes | d.some(directions=[d.integer(0, 1)]), 3, captured={"outer": outer})
    axis = d.axis(len(shape) + 1, operator)
    attributes |= {"scan_input_axes": [axis]} if axis or d.boolean() else {}
    out_axes = [d.axis(len(shape) + 1, operator), d.axis(len(shape) + 1, operator)]
    attributes |= d.some(scan_input_directions=[d.integer(0, 1)], scan_output_directions=[d.integer(0, 1), 0], scan_output_axes=out_axes)
    scanned = list(shape)
    scanned.insert(axis % (len(shape) + 1), length)
    return NodeCase([state, d.array(dtype, scanned)], attributes, 3, captured={"outer": outer})


@builds("SequenceMap")
def sequence_map(d: Draws, operator: Operator) -> NodeCase:
    """A body over one or two sequences, and a tensor that each turn sees; sequences may be empty."""
    dtype = d.choice(sequence_dtypes(operator, "S"))
    count = d.integer(0, 3)
    first, second = ([d.array(dtype, d.shape(1, 1)) for _ in range(count)] for _ in range(2))
    further = d.choice(["none", "sequence", "tensor"])
    values: list[Any] = [first]
    if further != "none":
        values.append(second if further == "sequence" else d.array(dtype, (2,)))
    names = ["x", "y"][: len(values)]
    nodes = [helper.make_node("Concat", [*names, "x"], ["joined"], axis=0), identity("outer", "outer_out")]
    elements = [helper.make_tensor_value_info(name, dtype_to_onnx(dtype), [None]) for name in [*names, "joined", "outer_out"]]
    body = helper.make_graph(nodes, "body", elements[: len(names)], elements[len(names) :])
    types = {index: sequence_type(dtype) for index, value in enumerate(values) if isinstance(value, list)}
    return NodeCase(values, {"body": body}, 2, input_types=types, captured={"outer": d.array(dtype, (3,))})
