"""`Gradient` of ai.onnx.preview.training: replaced by the nodes that compute it, found by differentiating the graph backwards.

Each op's rule says how a change of the target with the op's output (the *gradient* of the output) becomes one with each of its inputs
(reverse accumulation; Griewank and Walther 2008, Evaluating Derivatives, chapter 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import onnx_ir as ir

from miniort.errors import ModelError
from miniort.graph.inference import infer_types
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.model.constants import shape_of
from miniort.model.schemas import node_opset
from miniort.types import Array, Shape, dtype_from_onnx

_DOMAIN = "ai.onnx.preview.training"


def differentiate(model: ir.Model, context: PassContext) -> None:
    """Replace every `Gradient` node. ModelError if it names values that aren't there, or an op on the way has no rule."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.domain == _DOMAIN and node.op_type == "Gradient":
                _replace_gradient(graph, node, context)
                context.changed(node, "replaced by the nodes that compute it")
                infer_types(model)  # another one may go through these nodes


def _replace_gradient(graph: ir.Graph, node: ir.Node, context: PassContext) -> None:
    variables: list[str] = list(node.attributes["xs"].as_strings())
    names = [*variables, *(node.attributes["zs"].as_strings() if "zs" in node.attributes else ())]
    wanted = node.attributes["y"].as_string()
    known = {value.name: value for value in _values(graph)}
    missing = [name for name in (*names, wanted) if name not in known]
    if missing or len(names) != len(node.inputs):
        reason = (
            f"the graph has no value {missing[0]!r}" if missing else f"it has {len(node.inputs)} inputs for {len(names)} names in xs and zs"
        )
        raise ModelError(f"node {node.name!r} (Gradient): {reason}")
    independent = [known[name] for name in names]
    target = known[wanted]
    build = _Builder(graph, node)
    path = _path(graph, independent, target)
    forward = dict(zip(independent, node.inputs, strict=True))
    for each in path:
        build.run_again(each, forward)
    gradients = {target: build.filled_like(forward.get(target, target) or target, 1)}
    for each in reversed(path):
        gradient = gradients.get(each.outputs[0])
        if gradient is None:
            continue
        inputs = [None if value is None else forward.get(value, value) for value in each.inputs]
        opset = node_opset(each, context.opsets)
        for value, part in zip(each.inputs, _parts(build, each, inputs, forward, gradient, opset or 1), strict=False):
            if value is not None and part is not None:
                gradients[value] = build("Add", gradients[value], part) if value in gradients else part
    for variable, output in zip(independent, node.outputs, strict=False):
        if output.name:
            given = forward[variable] or variable
            build.replace(output, gradients[variable] if variable in gradients else build.filled_like(given, 0))
    graph.remove(node, safe=True)


def _values(graph: ir.Graph) -> Iterable[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _path(graph: ir.Graph, independent: Sequence[ir.Value], target: ir.Value) -> list[ir.Node]:
    """The nodes, in order, through which the target depends on the independent values; what those depend on isn't asked."""
    depends, reached = set(independent), []
    for node in graph:
        if any(value in depends for value in node.inputs):
            depends.update(node.outputs)
            reached.append(node)
    needed, path = {target} - set(independent), []
    for node in reversed(reached):
        if any(value in needed for value in node.outputs):
            needed.update(value for value in node.inputs if value is not None and value not in independent)
            path.append(node)
    return path[::-1]


@dataclass
class _Builder:
    """Makes nodes before a given one."""

    graph: ir.Graph
    before: ir.Node
    count: int = field(default=0)

    def __call__(self, op: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """The output of a new node of the default domain."""
        self.count += 1
        node = ir.node(op, inputs, attributes or None, name=f"{self.before.name}/{op}_{self.count}")
        node.outputs[0].name = f"{self.before.name}/{self.count}"
        self.graph.insert_before(self.before, node)
        return node.outputs[0]

    def filled_like(self, value: ir.Value, number: int) -> ir.Value:
        """A tensor of a value's shape and type that is full of one number."""
        if value.dtype is None:
            raise ModelError(f"node {self.before.name!r} (Gradient): the element type of {value.name!r} isn't known")
        one: Array = dtype_from_onnx(int(value.dtype)).type(number).reshape(1)
        return self("ConstantOfShape", self("Shape", value), value=ir.Tensor(one, dtype=value.dtype))

    def run_again(self, node: ir.Node, forward: dict[ir.Value, ir.Value | None]) -> None:
        """A copy of a node on the values that are given for its inputs, unless those are its inputs; `forward` learns its outputs."""
        inputs = [None if value is None else forward.get(value, value) for value in node.inputs]
        if all(given is value for given, value in zip(inputs, node.inputs, strict=True)):
            return
        self.count += 1
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            version=node.version,
            name=f"{self.before.name}/{node.name}",
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.type, new.shape = f"{self.before.name}/{old.name}", old.type, old.shape
            forward[old] = new
        self.graph.insert_before(self.before, copy)

    def replace(self, output: ir.Value, value: ir.Value) -> None:
        """Let everybody read `value` in place of an output of the node that is replaced."""
        result = self("Identity", value)
        name, output.name = output.name, f"{output.name}/replaced"
        result.name, result.type, result.shape = name, output.type, output.shape
        output.replace_all_uses_with(result, replace_graph_outputs=True)


@dataclass(frozen=True)
class _Call:
    """An op on the way from the variables to the target, as its rule sees it: `x` are its inputs, `y` its output, `g` the gradient of y."""

    node: ir.Node
    build: _Builder
    x: Sequence[ir.Value | None]
    y: ir.Value
    g: ir.Value
    opset: int

    def shape(self, value: ir.Value | None) -> Shape:
        shape = None if value is None else shape_of(value)
        if shape is None:
            raise ModelError(f"node {self.node.name!r} ({self.node.op_type}): Gradient needs to know the rank of its inputs")
        return shape

    def reduced_to(self, gradient: ir.Value, index: int) -> ir.Value:
        """The gradient of input `index`, which was broadcast to y's shape: summed along the axes that were repeated."""
        shapes = [self.shape(value) for value in self.x]
        own, rank = shapes[index], max(map(len, shapes))
        full = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
        axes = []
        for axis in range(rank):
            sizes = {shape[axis] for shape in full}
            if full[index][axis] == 1 and sizes != {1}:
                axes.append(axis)
            elif len(sizes - {1}) > 1 or None in sizes:
                raise ModelError(f"node {self.node.name!r} ({self.node.op_type}): Gradient can't tell which axes are broadcast")
        extra = [axis for axis in range(rank - len(own)) if axis not in axes]
        if axes:
            given = self.build("Constant", value_ints=axes)
            gradient = (
                self.build("ReduceSum", gradient, given, keepdims=1)
                if self.opset >= 13
                else self.build("ReduceSum", gradient, axes=axes, keepdims=1)
            )
        return self.build("Reshape", gradient, self.build("Shape", self.x[index])) if axes or extra else gradient


Rule: TypeAlias = Callable[[_Call], Sequence["ir.Value | None"]]
"""f(call) -> the gradient of each input, None for one that y doesn't change smoothly with."""


def _parts(
    build: _Builder, node: ir.Node, x: Sequence[ir.Value | None], forward: dict[ir.Value, ir.Value | None], g: ir.Value, opset: int
) -> Sequence[ir.Value | None]:
    rule = RULES.get(node.op_type) if node.domain == "" else None
    if rule is None:
        raise ModelError(
            f"node {node.name!r} ({node.op_type}): Gradient has no rule for this op; it has rules for {', '.join(sorted(RULES))}"
        )
    y = forward.get(node.outputs[0], node.outputs[0]) or node.outputs[0]
    return rule(_Call(node, build, x, y, g, opset))


def _add(call: _Call) -> Sequence[ir.Value]:
    return [call.reduced_to(call.g, index) for index in range(len(call.x))]


def _subtract(call: _Call) -> Sequence[ir.Value]:
    return call.reduced_to(call.g, 0), call.reduced_to(call.build("Neg", call.g), 1)


def _multiply(call: _Call) -> Sequence[ir.Value]:
    a, b = call.x
    return call.reduced_to(call.build("Mul", call.g, b), 0), call.reduced_to(call.build("Mul", call.g, a), 1)


def _divide(call: _Call) -> Sequence[ir.Value]:
    by_b = call.build("Div", call.g, call.x[1])
    return call.reduced_to(by_b, 0), call.reduced_to(call.build("Neg", call.build("Mul", by_b, call.y)), 1)


def _sigmoid(call: _Call) -> Sequence[ir.Value]:
    times_y = call.build("Mul", call.g, call.y)
    return [call.build("Sub", times_y, call.build("Mul", times_y, call.y))]


def _tanh(call: _Call) -> Sequence[ir.Value]:
    return [call.build("Sub", call.g, call.build("Mul", call.g, call.build("Mul", call.y, call.y)))]


def _matrix_product(call: _Call) -> Sequence[ir.Value]:
    a, b = call.x
    rank = len(call.shape(a))
    if rank < 2 or call.shape(a)[:-2] != call.shape(b)[:-2]:
        raise ModelError(f"node {call.node.name!r} (MatMul): Gradient needs matrices, or batches of the same shape")
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    a_gradient = call.build("MatMul", call.g, call.build("Transpose", b, perm=swapped))
    return a_gradient, call.build("MatMul", call.build("Transpose", a, perm=swapped), call.g)


def _transpose(call: _Call) -> Sequence[ir.Value]:
    if "perm" not in call.node.attributes:
        return [call.build("Transpose", call.g)]
    order = list(call.node.attributes["perm"].as_ints())
    return [call.build("Transpose", call.g, perm=[order.index(axis) for axis in range(len(order))])]


def _reshape(call: _Call) -> Sequence[ir.Value]:
    return [call.build("Reshape", call.g, call.build("Shape", call.x[0]))]


def _sum_over_axes(call: _Call) -> Sequence[ir.Value]:
    kept = call.node.attributes["keepdims"].as_int() if "keepdims" in call.node.attributes else 1
    if not kept and ("axes" in call.node.attributes or (len(call.x) > 1 and call.x[1] is not None)):
        raise ModelError(f"node {call.node.name!r} ({call.node.op_type}): Gradient needs keepdims=1, or no axes")
    return [call.build("Expand", call.g, call.build("Shape", call.x[0]))]


def _expand(call: _Call) -> Sequence[ir.Value]:
    own, full = call.shape(call.x[0]), call.shape(call.y)
    whole = _Call(call.node, call.build, (call.x[0], call.y), call.y, call.g, call.opset)
    return [call.g if own == full else whole.reduced_to(call.g, 0)]


def _mean_over_axes(call: _Call) -> Sequence[ir.Value]:
    count = call.build("Div", call.build("Size", call.x[0]), call.build("Size", call.y))
    dtype = call.g.dtype or (call.x[0].dtype if call.x[0] is not None else None)
    if dtype is None:
        raise ModelError(f"node {call.node.name!r} (ReduceMean): Gradient needs to know its element type")
    return [call.build("Div", _sum_over_axes(call)[0], call.build("Cast", count, to=int(dtype)))]


RULES: dict[str, Rule] = {
    "Add": _add,
    "Sum": _add,
    "Sub": _subtract,
    "Mul": _multiply,
    "Div": _divide,
    "Neg": lambda call: [call.build("Neg", call.g)],
    "Identity": lambda call: [call.g],
    "Exp": lambda call: [call.build("Mul", call.g, call.y)],
    "Log": lambda call: [call.build("Div", call.g, call.x[0])],
    "Sqrt": lambda call: [call.build("Div", call.g, call.build("Add", call.y, call.y))],
    "Sin": lambda call: [call.build("Mul", call.g, call.build("Cos", call.x[0]))],
    "Cos": lambda call: [call.build("Neg", call.build("Mul", call.g, call.build("Sin", call.x[0])))],
    "Abs": lambda call: [call.build("Mul", call.g, call.build("Sign", call.x[0]))],
    "Relu": lambda call: [call.build("Mul", call.g, call.build("Sign", call.y))],
    "Sigmoid": _sigmoid,
    "Tanh": _tanh,
    "MatMul": _matrix_product,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Expand": _expand,
    "Sign": lambda call: [None],
    "Shape": lambda call: [None],
    "Size": lambda call: [None],
    "ConstantOfShape": lambda call: [None],
    "ReduceSum": _sum_over_axes,
    "ReduceMean": _mean_over_axes,
}

DIFFERENTIATE = GraphPass("differentiate", Level.REQUIRED, differentiate)
