"""Logits of the last positions alone, where a graph would compute those of all tokens and nobody reads the others.

In front of the product with the output head, which is the largest of a small model, the graph gets a `Slice` of the positions that are
wanted. From which one on is an input, so that one session serves a prompt, of which the last position's logits are read, and a draft, all
of whose are. A graph pass, `miniort.graph.narrowing`, then moves the `Slice` further up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from miniort.generation.binding import GraphBinding
from miniort.generation.node_insertion import insert, integers
from miniort.graph.inference import infer_types
from miniort.model.constants import is_constant, set_constant, shape_of

FIRST_LOGIT_INPUT = "miniort.first_logit"
"""The position of the first token whose logits are wanted, [1] int64, counted among the new tokens; from the end where it's negative.
It has a default, 0: who runs the session without it gets the logits of all."""

_ALL, _LAST = np.zeros(1, np.int64), np.full(1, -1, np.int64)

_BY_ELEMENT = frozenset({"Add", "Sub", "Mul", "Div", "Cast", "Tanh", "Identity"})
"""What may stand between the head and the logits: a bias, a scale, a soft cap, a cast. Other inputs than the logits are constants."""


def ask_for_logits(model: ir.Model, binding: GraphBinding) -> bool:
    """Let the graph be told which logits are wanted, if it would give those of all new tokens. Returns whether it is now."""
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == binding.logits)
    head = _head(logits)
    if head is None or head.inputs[0] is None:
        return False
    hidden = head.inputs[0]
    if shape_of(logits) is None:
        infer_types(model)
    if len(shape_of(logits) or ()) != 3 or len(shape_of(hidden) or (0, 0, 0)) != 3:  # the head and what follows it keep the number of axes
        return False
    first = ir.Value(name=FIRST_LOGIT_INPUT, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
    set_constant(first, _ALL)
    graph.inputs.append(first)
    graph.register_initializer(first)
    end = integers(head, f"{FIRST_LOGIT_INPUT}/end", [np.iinfo(np.int64).max])
    axis = integers(head, f"{FIRST_LOGIT_INPUT}/axis", [1])
    (wanted,) = insert(head, "Slice", [hidden, first, end, axis], name=f"{hidden.name}/wanted", since=10)
    wanted.type = hidden.type
    if (shape := shape_of(hidden)) is not None:
        wanted.shape = ir.Shape([shape[0], None, shape[2]])
    head.replace_input_with(0, wanted)
    _forget_length(head, logits)
    return True


def _head(logits: ir.Value) -> ir.Node | None:
    """The product with the output head; None where it can't be told."""
    value: ir.Value | None = logits
    while value is not None:
        node = value.producer()
        others = [] if node is None else [each for each in node.inputs[1:] if each is not None]
        # With another reader, or more rows by a constant, the values behind the product would be needed as they are.
        read_elsewhere = value is not logits and (len(list(value.uses())) != 1 or value.is_graph_output())
        if node is None or node.domain != "" or read_elsewhere or not all(_is_weight(each) for each in others):
            return None
        if node.op_type == "MatMul":
            weight = others[0] if len(others) == 1 else None
            return node if weight is not None and len(shape_of(weight) or (0, 0)) == 2 else None
        if node.op_type not in _BY_ELEMENT or any(len(shape_of(each) or (0, 0)) > 1 for each in others):
            return None
        value = node.inputs[0]
    return None


def _is_weight(value: ir.Value) -> bool:
    """Whether a value is a constant, or one of which only order or type were changed, as in a head that is the embedding."""
    node = value.producer()
    return is_constant(value) or (
        node is not None and node.op_type in ("Transpose", "Cast", "Identity", "DequantizeLinear") and all(map(_is_given, node.inputs))
    )


def _is_given(value: ir.Value | None) -> bool:
    return value is None or _is_weight(value)


def _forget_length(head: ir.Node, logits: ir.Value) -> None:
    """No value from the head to the logits has the length of the new tokens any more."""
    value: ir.Value | None = logits
    while value is not None:
        shape = shape_of(value)
        if shape is not None and len(shape) == 3:
            value.shape = ir.Shape([shape[0], None, shape[2]])
        node = value.producer()
        value = None if node is None or node is head else node.inputs[0]


def with_first_logit(feeds: dict[str, Any], every_logit: bool) -> dict[str, Any]:
    """The feeds, and which logits are wanted: all, or the last position's."""
    feeds[FIRST_LOGIT_INPUT] = _ALL if every_logit else _LAST
    return feeds
