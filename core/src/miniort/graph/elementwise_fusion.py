"""Fusing elementwise ops that follow each other into one node, so that a provider may read and write memory once for all of them.

What's made is the op `FusedElementwise` of the domain `miniort`, whose attribute `body` says what it computes
(`miniort.graph.elementwise_body`). It's made only where the provider of the ops has it.

A group grows upwards from its last node: what a node reads is taken in if nobody outside the group reads it. So every value but the last
one is read inside only, no path leaves the group and comes back, and the result's shape is what the group's inputs broadcast to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import onnx_ir as ir

from miniort.graph.elementwise_body import DOMAIN, FIRST_VERSIONS, FUSED_ELEMENTWISE, NUMBER, OUTPUT, Attribute, Body, Step, body_text
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import replace_value
from miniort.model.constants import constant_array, shape_of
from miniort.model.schemas import node_opset, schema_version

MOST_STEPS = 32
MOST_INPUTS = 16
"""What a group may grow to: a kernel that holds more values than a processor has registers is no faster for it."""

_NUMBERS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""Types whose numbers a body can hold, as float32 that is cast."""

_LEAST_RANK = 2
"""Values of fewer axes stay as they are: they may be shapes, which are computed where the host can read them."""


def fuse_elementwise(model: ir.Model, context: PassContext) -> None:
    """Make `FusedElementwise` of every group of two elementwise ops or more."""
    if not context.supports(FUSED_ELEMENTWISE, DOMAIN, 1, []):
        return
    for graph in list(model.graphs()):
        if isinstance(graph, ir.Graph):
            _Fusion(graph, context).run()


@dataclass
class _Fusion:
    """The state of fusing one graph. `takers`: who takes a node, as `taker` says; `chains`: who takes a chain of one step, by its kind."""

    graph: ir.Graph
    context: PassContext
    takers: dict[ir.Node, str | None] = field(default_factory=dict)
    chains: dict[object, str | None] = field(default_factory=dict)

    def run(self) -> None:
        positions = {node: position for position, node in enumerate(self.graph)}
        for root in reversed(list(positions)):
            if root.graph is self.graph and (taker := self.taker(root)) is not None:
                group = sorted(self.grown(root, taker), key=positions.__getitem__)
                if len(group) > 1:
                    self.fuse(group)

    def grown(self, root: ir.Node, taker: str) -> list[ir.Node]:
        """The nodes that can be computed together with a node for whoever reads that one's result, the node first."""
        group = [root]
        before = 0
        while len(group) > before:  # a node that two others read fits when both are in
            before = len(group)
            for value in [x for node in group for x in node.inputs if x is not None]:
                node = value.producer()
                if node is None or node in group or len(group) == MOST_STEPS or not self.fits(node, group, taker):
                    continue
                if len(_inputs([*group, node], self.context)) <= MOST_INPUTS:
                    group.append(node)
        return group

    def fits(self, node: ir.Node, group: Sequence[ir.Node], taker: str) -> bool:
        """Whether a node is read by a group only, on the group's provider, in its opset, and isn't known to be smaller than its result."""
        value, root = node.outputs[0], group[0]
        if node.graph is not self.graph or value.is_graph_output() or any(reader not in group for reader, _ in value.uses()):
            return False
        return self.opset(node) == self.opset(root) and self.taker(node) == taker and _may_be_as_large(value, root.outputs[0])

    def taker(self, node: ir.Node) -> str | None:
        """The provider that has a node and would take it as a chain as well; None where that isn't so."""
        if node not in self.takers:
            step = _single(node, self.context)
            provider = None if step is None else self.context.provider_of(node)
            chain = None if step is None else self.taker_of_chain(node, step)
            self.takers[node] = provider if provider == chain else None
        return self.takers[node]

    def taker_of_chain(self, node: ir.Node, step: Step) -> str | None:
        """The provider that would get a chain of that one step, for inputs of the node's types."""
        types = tuple(None if x is None else x.type for x in node.inputs)
        key = (step.op, step.version, step.inputs, tuple(sorted(step.attributes.items())), types)
        if key not in self.chains:
            stand_ins = [ir.Value(name=name, type=kind) for name, kind in zip(step.inputs, types, strict=True) if name]
            chain = _node(stand_ins, Body(tuple(filter(None, step.inputs)), (step,)), self.opset(node), node)
            self.chains[key] = self.context.provider_of(chain)
        return self.chains[key]

    def fuse(self, group: Sequence[ir.Node]) -> None:
        last = group[-1]
        inputs = _inputs(group, self.context)
        names = {value: f"x{index}" for index, value in enumerate(inputs)}
        names |= {node.outputs[0]: f"t{index}" for index, node in enumerate(group[:-1])} | {last.outputs[0]: OUTPUT}
        fused = _node(inputs, Body(tuple(names[x] for x in inputs), tuple(_steps(group, names, self.context))), self.opset(last), last)
        if self.context.provider_of(fused) != self.context.provider_of(last):
            fused.resize_inputs(0)
            return
        old, new = last.outputs[0], fused.outputs[0]
        new.name, new.type, new.shape = old.name, old.type, old.shape
        if not old.is_graph_output():
            old.name = f"{old.name}/replaced"
        self.graph.insert_before(last, fused)
        replaced = replace_value(old, new, group)
        assert replaced, "a result that is new can take every other's place"
        self.graph.opset_imports.setdefault(DOMAIN, 1)
        self.context.changed(fused, f"{', '.join(node.op_type for node in group)} made {FUSED_ELEMENTWISE}")

    def opset(self, node: ir.Node) -> int:
        return node_opset(node, self.context.opsets) or 0


def _node(inputs: Sequence[ir.Value], body: Body, opset: int, like: ir.Node) -> ir.Node:
    return ir.Node(DOMAIN, FUSED_ELEMENTWISE, inputs, [ir.AttrString("body", body_text(body, opset))], name=like.name, version=1)


def _single(node: ir.Node, context: PassContext) -> Step | None:
    """A node as a step that reads `x0`, `x1` and so on; None if it can't be in a chain."""
    opset = node_opset(node, context.opsets)
    if node.domain != "" or node.op_type not in FIRST_VERSIONS or opset is None or len(node.outputs) != 1:
        return None
    version = schema_version(node.op_type, "", opset)
    attributes = _attributes(node)
    rank = shape_of(node.outputs[0])
    if version < FIRST_VERSIONS[node.op_type] or attributes is None or rank is None or len(rank) < _LEAST_RANK:
        return None
    if node.outputs[0].dtype is None or any(x is not None and x.dtype is None for x in node.inputs):
        return None
    return Step(node.op_type, version, tuple("" if x is None else f"x{index}" for index, x in enumerate(node.inputs)), OUTPUT, attributes)


def _attributes(node: ir.Node) -> dict[str, Attribute] | None:
    """A node's attributes, if they are single numbers and texts that a body can have."""
    found: dict[str, Attribute] = {}
    for name, attribute in node.attributes.items():
        if attribute.is_ref() or attribute.type not in (ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING):
            return None
        value = attribute.value
        if (isinstance(value, float) and not isfinite(value)) or (isinstance(value, str) and not value.isidentifier()):
            return None
        found[name] = value
    return found


def _may_be_as_large(value: ir.Value, result: ir.Value) -> bool:
    """Whether a value may have the shape of a result that's made of it. One that is repeated there would be computed again for each."""
    own, whole = shape_of(value), shape_of(result)
    return (
        own is not None and whole is not None and len(own) == len(whole) and all(a != 1 or b == 1 for a, b in zip(own, whole, strict=True))
    )


def _inputs(group: Sequence[ir.Node], context: PassContext) -> list[ir.Value]:
    """What a group reads of others, each once; numbers that its body holds aren't among them."""
    made = {node.outputs[0] for node in group}
    return list(dict.fromkeys(x for node in group for x in node.inputs if x is not None and x not in made and _number(x, context) is None))


def _number(value: ir.Value, context: PassContext) -> float | None:
    """The number that a constant is, if a body can hold it: just one, of a type that float32 includes, whose axes make no result larger."""
    if value.dtype not in _NUMBERS or shape_of(value) not in ((), (1,)):
        return None
    array = constant_array(value, context.weights)
    if array is None:
        return None
    number = float(array.reshape(-1)[0])
    return number if isfinite(number) else None


def _steps(group: Sequence[ir.Node], names: Mapping[ir.Value, str], context: PassContext) -> list[Step]:
    """The nodes of a group as steps, with the constants that they read before them."""
    steps: list[Step] = []
    constants: dict[tuple[str, ir.DataType | None], str] = {}  # by how they're written: 0.0 and -0.0 are equal, and not the same

    def read(x: ir.Value | None, version: int) -> str:
        number = None if x is None or x in names else _number(x, context)
        if x is None or number is None:
            return "" if x is None else names[x]
        name = constants.get((repr(number), x.dtype))
        if name is None:
            name = constants[repr(number), x.dtype] = f"c{len(constants)}"
            wide = name if x.dtype == ir.DataType.FLOAT else f"{name}_wide"
            steps.append(Step("Constant", version, (), wide, {NUMBER: number}))
            if wide != name:
                steps.append(Step("Cast", version, (wide,), name, {"to": int(x.dtype or 0)}))
        return name

    for node in group:
        single = _single(node, context)
        assert single is not None
        inputs = tuple(read(x, single.version) for x in node.inputs)
        steps.append(Step(single.op, single.version, inputs, names[node.outputs[0]], single.attributes))
    return steps


FUSE_ELEMENTWISE = GraphPass("fuse-elementwise", Level.ALL, fuse_elementwise)
