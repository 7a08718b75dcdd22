"""What a `FusedElementwise` computes: a chain of standard ops, kept as text in ONNX's own syntax in its attribute `body`.

The text is a function without types, so chains that do the same have the same text, whatever they're called in their graphs::

    <domain: "miniort", opset_import: ["" : 24]>
    body (x0, x1) => (y) {
      t0 = Swish <alpha: float = 1> (x0)
      y = Mul (t0, x1)
    }

The body's inputs are the node's, in order, and they broadcast to each other as NumPy's arrays do. Numbers are `Constant` nodes, float32
without axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import onnx
from onnx import parser

from miniort.errors import ModelError
from miniort.model.schemas import schema_version
from miniort.types import DType, dtype_from_onnx

DOMAIN = "miniort"
FUSED_ELEMENTWISE = "FusedElementwise"
OUTPUT = "y"
NUMBER = "value"
"""The attribute of a `Constant`."""

FIRST_VERSIONS: Mapping[str, int] = {
    **dict.fromkeys(("Add", "Div", "Mul", "Sub", "Pow", "PRelu", "And", "Or", "Xor", "Equal", "Greater", "Less", "Sin", "Cos"), 7),
    **dict.fromkeys(("Abs", "Cast", "Ceil", "Exp", "Floor", "Log", "Neg", "Reciprocal", "Sqrt", "Tanh", "Relu", "Sigmoid"), 6),
    **dict.fromkeys(("Elu", "HardSigmoid", "LeakyRelu"), 6),
    **dict.fromkeys(("Max", "Min", "Sum"), 8),
    **dict.fromkeys(("Erf", "IsNaN", "Sign", "Where"), 9),
    **dict.fromkeys(("Clip", "Round"), 11),
    **dict.fromkeys(("GreaterOrEqual", "LessOrEqual"), 12),
    **{"Not": 1, "Softplus": 1, "HardSwish": 14, "CastLike": 15, "Gelu": 20, "Swish": 24},
}
"""The ops that a chain may have, with the first version of each whose operands and attributes are today's."""

_LOGICAL = frozenset({"And", "Or", "Xor", "Not", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN"})

Attribute = int | float | str


@dataclass(frozen=True)
class Step:
    """One op of a chain. `version` is that of its schema; `inputs` are names, "" for an absent one; `output` is what others call it by."""

    op: str
    version: int
    inputs: tuple[str, ...]
    output: str
    attributes: Mapping[str, Attribute] = field(default_factory=dict, hash=False)

    def dtype(self, dtypes: Mapping[str, DType | None]) -> DType | None:
        """Its element type, by those of what is read; None where that isn't known."""
        if self.op in _LOGICAL:
            return np.dtype(np.bool_)
        if self.op == "Cast":
            return dtype_from_onnx(int(self.attributes["to"]))
        if self.op == "Constant":
            return np.dtype(np.float32)
        return dtypes[self.inputs[1 if self.op in ("Where", "CastLike") else 0]]


@dataclass(frozen=True)
class Body:
    """A chain: the names of its inputs, and its steps, each behind those that it reads. The last one is the result."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]

    def dtypes(self, inputs: Sequence[DType | None]) -> dict[str, DType | None]:
        """The element type of each input and step by name, for those of the inputs."""
        found = dict(zip(self.inputs, inputs, strict=True))
        for step in self.steps:
            found[step.output] = step.dtype(found)
        return found


def body_text(body: Body, opset: int) -> str:
    """A chain as text. opset: the one that all of its ops are written in."""
    lines = [f"  {step.output} = {step.op} {_attributes(step.attributes)}({', '.join(step.inputs)})" for step in body.steps]
    head = f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>\nbody ({", ".join(body.inputs)}) => ({body.steps[-1].output}) {{'
    return "\n".join([head, *lines, "}"])


def _attributes(attributes: Mapping[str, Attribute]) -> str:
    return f"<{', '.join(_attribute(name, value) for name, value in sorted(attributes.items()))}> " if attributes else ""


def _attribute(name: str, value: Attribute) -> str:
    if isinstance(value, str):
        return f'{name}: string = "{value}"'
    if isinstance(value, int):
        return f"{name}: int = {value}"
    number = repr(float(f"{value:.9g}"))  # the digits that a float32 has
    return f"{name}: tensor = float {{{number}}}" if name == NUMBER else f"{name}: float = {number}"


@lru_cache(maxsize=1024)
def read_body(text: str) -> Body:
    """The chain that a text says. ModelError if it isn't one: not ONNX's syntax, no opset, another op, or a step of several outputs."""
    try:
        function = parser.parse_function(text)
    except parser.ParseError as error:
        raise ModelError(f"the body of a {FUSED_ELEMENTWISE} can't be read: {error}") from error
    opset = next((each.version for each in function.opset_import if each.domain == ""), None)
    if opset is None or not function.node or list(function.output) != list(function.node[-1].output):
        raise ModelError(f"the body of a {FUSED_ELEMENTWISE} must import an opset and give the one output of its last node, found:\n{text}")
    return Body(tuple(function.input), tuple(_step(node, opset) for node in function.node))


def _step(node: onnx.NodeProto, opset: int) -> Step:
    version = schema_version(node.op_type, node.domain, opset)
    known = node.domain == "" and (node.op_type == "Constant" or version >= FIRST_VERSIONS.get(node.op_type, version + 1))
    if not known or len(node.output) != 1:
        raise ModelError(f"the body of a {FUSED_ELEMENTWISE} can't have the op {node.op_type} of version {version}")
    return Step(node.op_type, version, tuple(node.input), node.output[0], {each.name: _value(each) for each in node.attribute})


def _value(attribute: onnx.AttributeProto) -> Attribute:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return float(onnx.numpy_helper.to_array(value))
    if not isinstance(value, bytes | int | float):
        raise ModelError(f"the body of a {FUSED_ELEMENTWISE} can't have the attribute {attribute.name}: it's neither a number nor a text")
    return value.decode() if isinstance(value, bytes) else value
