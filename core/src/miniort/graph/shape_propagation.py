"""Shapes, and the whole numbers that are computed from shapes, as polynomials of the sizes that the graph's inputs turn out to have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx_ir as ir

from miniort.graph.elementwise_body import DOMAIN, FUSED_ELEMENTWISE
from miniort.graph.matching import int_attribute, integers
from miniort.graph.symbolic_sizes import Size, size_product
from miniort.model.constants import constant_array, is_constant, shape_of
from miniort.model.loading import attribute_graphs
from miniort.model.weights import WeightStore

Dims: TypeAlias = "tuple[Size, ...]"

CONTRIB = "com.microsoft"
"""The domain of onnxruntime's own ops."""
_LONGEST = 16
"""More sizes than any shape has: longer vectors of integers aren't followed."""
_PAST_SHAPE = "miniort.past_shape"
"""The input that the generation's join of a cache adds in the place of pasts whose shape is asked for."""
_PAST = f"{_PAST_SHAPE}[2]"
_SAME_SHAPE = frozenset(
    {
        "Abs",
        "Cast",
        "Ceil",
        "Clip",
        "Cos",
        "CumSum",
        "DequantizeLinear",
        "Dropout",
        "Elu",
        "Erf",
        "Exp",
        "Floor",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "IsInf",
    }
    | {"IsNaN", "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "Mish", "Neg", "Not", "Reciprocal", "Relu", "RMSNormalization"}
    | {"RotaryEmbedding", "Round", "ScatterElements", "ScatterND", "Sigmoid", "Sign", "Sin", "Softmax", "Softplus", "Sqrt", "Swish"}
    | {"QuantizeLinear", "Tanh", "Trilu"}
)
_SAME_SHAPE_CONTRIB = frozenset({"BiasGelu", "FastGelu", "Gelu", "LayerNormalization", "QuickGelu", "RotaryEmbedding"})
"""Ops of onnxruntime's domain, which exporters mix with the standard ones and type inference doesn't know."""
_BROADCAST = frozenset(
    {"Add", "And", "BitwiseAnd", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Or"}
    | {"Pow", "Sub", "Where", "Xor"}
)
_SKIPPED = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
"""Normalisations of a sum, which give the sum as their fourth output."""
_LOGICAL = frozenset({"And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"})
_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL2"})


@dataclass(frozen=True)
class Integers:
    """What's known of a value that holds whole numbers: a single one (rank 0) or a vector of them."""

    items: tuple[Size, ...]
    rank: int

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """The numbers, if all are known."""
        known = [item.number for item in self.items]
        return None if None in known else tuple(number for number in known if number is not None)


@dataclass
class ShapeTable:
    """The shapes and whole numbers that are known so far; `follow` adds what a node computes."""

    weights: WeightStore
    _dims: dict[ir.Value, Dims | None] = field(default_factory=dict)
    _integers: dict[ir.Value, Integers] = field(default_factory=dict)

    def dims(self, value: ir.Value | None) -> Dims | None:
        """The shape of a value; None where the rank isn't known."""
        if value is None:
            return None
        if value not in self._dims:
            shape = shape_of(value)
            self._dims[value] = None if shape is None else tuple(self._open(value, axis, size) for axis, size in enumerate(shape))
        return self._dims[value]

    def integers(self, value: ir.Value | None) -> Integers | None:
        """The whole numbers that a value holds; None where they aren't followed."""
        if value is None:
            return None
        if value.name == _PAST_SHAPE and value.is_graph_input():
            return Integers(self._past_sizes(value), 1)
        if value not in self._integers and is_constant(value) and value.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL):
            array = constant_array(value, self.weights)
            if array is not None and array.size <= _LONGEST and array.ndim <= 1:
                self._integers[value] = Integers(tuple(Size.of(int(item)) for item in array.reshape(-1)), array.ndim)
        return self._integers.get(value)

    def follow(self, node: ir.Node) -> None:
        """Work out the shapes of a node's outputs, and the whole numbers in them."""
        found: Sequence[Dims | None] = ()
        if node.domain == DOMAIN and node.op_type == "CacheAppend":
            found = [self._appended(node, index) for index in (0, 1)]
        elif node.domain == DOMAIN and node.op_type == FUSED_ELEMENTWISE:
            found = [self.broadcast([self.dims(value) for value in node.inputs], node.outputs[0])]
        elif node.domain in (CONTRIB, "") and node.op_type in _CONTRIB_RULES:
            first = self.dims(node.inputs[0])
            found = () if first is None else _CONTRIB_RULES[node.op_type](self, node, first)
        elif node.domain == CONTRIB and node.op_type in _SAME_SHAPE_CONTRIB:
            found = [self.dims(node.inputs[0])]
        elif node.domain == "":
            found = self._shapes(node)
            numbers = self._numbers(node)
            if numbers is not None and len(numbers.items) <= _LONGEST:
                self._integers[node.outputs[0]] = numbers
                found = [() if numbers.rank == 0 else (Size.of(len(numbers.items)),)]
        for value, dims in zip(node.outputs, found, strict=False):
            self._settle(value, dims)
        dtype = _element_type(node)
        for value in node.outputs[::3] if node.op_type in _SKIPPED else node.outputs[:1]:
            if value.type is None and dtype is not None:
                value.type = ir.TensorType(dtype)

    def assume(self, value: ir.Value, dims: Dims) -> None:
        """Take a shape as given that can't be proven from what computes the value."""
        self._settle(value, dims)

    def forget(self, value: ir.Value) -> None:
        """Drop what's known of a value that is computed in another way now."""
        self._dims.pop(value, None)
        self._integers.pop(value, None)

    def _past_sizes(self, value: ir.Value) -> Dims:
        """[batch, kv heads, past, head dim], as a decoder that appends to its cache is told: its tokens' batch, the rest as of new keys."""
        graph = value.graph
        assert graph is not None
        tokens = next((dims for x in graph.inputs if (dims := self.dims(x)) is not None and len(dims) == 2), None)
        keys = next((shape_of(x) for node in graph if node.op_type == "CacheAppend" and (x := node.inputs[1]) is not None), None)
        heads, dim = (self._open(value, axis, keys[axis] if keys is not None and len(keys) == 4 else None) for axis in (1, 3))
        return (Size.unknown(f"{_PAST_SHAPE}[0]") if tokens is None else tokens[0], heads, Size.unknown(_PAST), dim)

    def _open(self, value: ir.Value, axis: int, size: object) -> Size:
        """A size before the graph computes anything. Inputs' sizes of one name are equal: that's what the name of a size declares."""
        if isinstance(size, int):
            return Size.of(size)
        if not isinstance(size, str) or not value.is_graph_input() or value.name == _PAST_SHAPE:
            return self._fresh(value, axis)
        parts = [part.strip() for part in size.split("+")]  # such as "past_sequence_length + sequence_length"
        terms = [Size.of(int(part)) if part.isdecimal() else Size.unknown(part) for part in parts]
        return sum(terms, Size())

    def _settle(self, value: ir.Value, dims: Dims | None) -> None:
        """Note a shape. Where type inference knows a number that propagation doesn't, it's kept."""
        shape = shape_of(value)
        if dims is None or (shape is not None and len(shape) != len(dims)):
            return
        known = shape or (None,) * len(dims)
        merged = tuple(
            Size.of(size) if isinstance(size, int) and mine.number is None else mine for mine, size in zip(dims, known, strict=True)
        )
        self._dims[value] = merged
        sizes = [size if mine.number is None else mine.number for mine, size in zip(merged, known, strict=True)]
        if not value.is_graph_output() and not value.is_graph_input() and (value.type is None or isinstance(value.type, ir.TensorType)):
            value.shape = ir.Shape(sizes)

    def _fresh(self, value: ir.Value, axis: int) -> Size:
        return Size.unknown(f"{value.name}[{axis}]")

    def _appended(self, node: ir.Node, index: int) -> Dims | None:
        """[batch, heads, past + new, dim] of all keys or values. A cache keeps the same number of tokens in every layer."""
        new = self.dims(node.inputs[1 + index])
        return None if new is None or len(new) != 4 else (*new[:2], Size.unknown(_PAST) + new[2], new[3])

    # Shapes.

    def _shapes(self, node: ir.Node) -> Sequence[Dims | None]:
        op, out = node.op_type, node.outputs[0]
        inputs = [self.dims(value) for value in node.inputs]
        if op in _SAME_SHAPE:
            return inputs[:1]
        if op in _BROADCAST:
            return [self.broadcast(inputs, out)]
        if op in _REDUCTIONS:
            return [self._reduced(node, inputs[0])]
        rule = _SHAPE_RULES.get(op)
        return () if rule is None or not inputs or inputs[0] is None else rule(self, node, inputs[0])

    def broadcast(self, shapes: Sequence[Dims | None], out: ir.Value) -> Dims | None:
        """The shape that several broadcast to. An axis of two unknown sizes that may differ is a new unknown."""
        known = [shape for shape in shapes if shape is not None]
        if len(known) != len(shapes):
            return None
        rank = max(map(len, known), default=0)
        one = Size.of(1)
        padded = [(one,) * (rank - len(shape)) + shape for shape in known]
        result = []
        for axis in range(rank):
            sizes = {shape[axis] for shape in padded} - {one}
            numbers = {size for size in sizes if size.number is not None}
            chosen = sizes if len(sizes) == 1 else numbers if len(numbers) == 1 else None
            result.append(one if not sizes else next(iter(chosen)) if chosen is not None else self._fresh(out, axis))
        return tuple(result)

    def _reduced(self, node: ir.Node, dims: Dims | None) -> Dims | None:
        keep = int_attribute(node, "keepdims", 1)
        axes = self._axes(node, 1)
        if dims is None or axes is None:
            return None
        positions = {axis % len(dims) for axis in axes}
        return tuple(Size.of(1) if axis in positions else size for axis, size in enumerate(dims) if keep or axis not in positions)

    def _axes(self, node: ir.Node, index: int, name: str = "axes") -> tuple[int, ...] | None:
        """Numbers that are an attribute in older opsets and an input in newer ones."""
        if name in node.attributes:
            return tuple(node.attributes[name].as_ints())
        given = self.integers(node.inputs[index]) if len(node.inputs) > index else None
        return None if given is None else given.numbers

    def reshaped(self, node: ir.Node, dims: Dims) -> Dims | None:
        """The shape that a Reshape gives, its -1 worked out where the division is exact."""
        target = self.integers(node.inputs[1]) if len(node.inputs) > 1 else None
        if target is None:
            return None
        copies = not int_attribute(node, "allowzero", 0)
        sizes = [dims[axis] if item.number == 0 and copies and axis < len(dims) else item for axis, item in enumerate(target.items)]
        inferred = [axis for axis, size in enumerate(sizes) if size.number == -1]
        if any(not size.is_natural for axis, size in enumerate(sizes) if axis not in inferred) or len(inferred) > 1:
            return None
        for axis in inferred:
            rest = _without_common(list(dims), [size for other, size in enumerate(sizes) if other != axis])
            quotient = None if rest is None else size_product(rest[0]).divided_by(size_product(rest[1]))
            sizes[axis] = self._fresh(node.outputs[0], axis) if quotient is None else quotient
        return tuple(sizes)

    def sliced(self, node: ir.Node, dims: Dims) -> Dims | None:
        """The shape that a Slice of steps of 1 gives."""
        bounds = self.slice_bounds(node, len(dims))
        if bounds is None:
            return self._strided(node, dims)
        result = list(dims)
        for axis, (start, end) in bounds.items():
            first, last = _bound(start, dims[axis]), _bound(end, dims[axis])
            result[axis] = self._fresh(node.outputs[0], axis) if first is None or last is None else last - first
            if not result[axis].is_natural:
                result[axis] = self._fresh(node.outputs[0], axis)
        return tuple(result)

    def _strided(self, node: ir.Node, dims: Dims) -> Dims | None:
        """The shape that a Slice of known bounds and any steps gives, where the sizes of the axes that it cuts are known."""
        cuts = constant_slices(node, len(dims), self.weights)
        if cuts is None or any(dims[axis].number is None for axis in cuts):
            return None
        return tuple(Size.of(len(range(size.number or 0)[cuts[axis]])) if axis in cuts else size for axis, size in enumerate(dims))

    def slice_bounds(self, node: ir.Node, rank: int) -> dict[int, tuple[Size, Size]] | None:
        """Start and end of a Slice for each axis that it cuts; None if they aren't followed, or a step isn't 1."""
        if "starts" in node.attributes:
            starts, ends = (tuple(Size.of(item) for item in node.attributes[name].as_ints()) for name in ("starts", "ends"))
            axes: tuple[int, ...] | None = tuple(node.attributes["axes"].as_ints()) if "axes" in node.attributes else None
        else:
            given = [self.integers(value) for value in node.inputs[1:]] + [None] * 4
            present = [value is not None for value in node.inputs[1:]] + [False] * 4
            if given[0] is None or given[1] is None:
                return None
            starts, ends = given[0].items, given[1].items
            axes = None if given[2] is None else given[2].numbers
            if (present[2] and axes is None) or (present[3] and (given[3] is None or set(given[3].numbers or (0,)) != {1})):
                return None
        positions = tuple(range(len(starts))) if axes is None else axes
        return {axis % rank: pair for axis, pair in zip(positions, zip(starts, ends, strict=True), strict=True)}

    # Whole numbers.

    def _numbers(self, node: ir.Node) -> Integers | None:
        rule = _NUMBER_RULES.get(node.op_type)
        return None if rule is None else rule(self, node)


def constant_slices(node: ir.Node, rank: int, weights: WeightStore) -> dict[int, slice] | None:
    """What a Slice takes of each axis that it cuts, where all its bounds are constant; None if they aren't, or a step is below zero."""
    if "starts" in node.attributes:
        starts, ends = (tuple(node.attributes[name].as_ints()) for name in ("starts", "ends"))
        axes: Sequence[int] = node.attributes["axes"].as_ints() if "axes" in node.attributes else range(len(starts))
        return {axis % rank: slice(start, end) for axis, start, end in zip(axes, starts, ends, strict=True)}
    given = [None if x is None else integers(x, weights) for x in node.inputs[1:]] + [None] * 4
    if any(x is not None and numbers is None for x, numbers in zip(node.inputs[1:], given, strict=False)):
        return None
    starts, ends = given[0] or (), given[1] or ()
    axes, steps = given[2] or range(len(starts)), given[3] or (1,) * len(starts)
    if min(steps, default=1) < 1:
        return None
    return {axis % rank: slice(start, end, step) for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)}


def _element_type(node: ir.Node) -> ir.DataType | None:
    """The element type of a node's main output. Type inference stops at ops that it doesn't know; this goes on behind them."""
    op = node.op_type
    if op == "Cast":
        return ir.DataType(int_attribute(node, "to", 0)) or None
    if op == "DequantizeLinear" and node.domain == "":
        return node.inputs[1].dtype if node.inputs[1] is not None and "output_dtype" not in node.attributes else None
    if op in _LOGICAL:
        return ir.DataType.BOOL
    follows = op in _SAME_TYPE_CONTRIB or (op in _SAME_TYPE and node.domain == "")
    source = node.inputs[1 if op == "Where" else 0] if follows and node.inputs else None
    return None if source is None else source.dtype


def _bound(bound: Size, size: Size) -> Size | None:
    """Where a slice begins or ends: negative bounds count from the end, and none is beyond it."""
    number, whole = bound.number, size.number
    if number is None:
        return bound if bound == size or ((size - bound).is_natural and bound.is_natural) else None
    if whole is not None:
        return Size.of(max(0, min(whole, number if number >= 0 else number + whole)))
    if number >= 1 << 31:
        return size
    if number == 0:
        return bound
    return None


def _without_common(above: list[Size], below: list[Size]) -> tuple[list[Size], list[Size]]:
    for size in list(below):
        if size in above:
            above.remove(size)
            below.remove(size)
    return above, below


ShapeRule: TypeAlias = Callable[[ShapeTable, ir.Node, Dims], "Sequence[Dims | None]"]


def _transpose(table: ShapeTable, node: ir.Node, dims: Dims) -> Sequence[Dims]:
    order = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(len(dims))[::-1]
    return [tuple(dims[axis] for axis in order)]


def _unsqueeze(table: ShapeTable, node: ir.Node, dims: Dims) -> Sequence[Dims | None]:
    axes = table._axes(node, 1)
    if axes is None:
        return [None]
    rank = len(dims) + len(axes)
    added = {axis % rank for axis in axes}
    rest = iter(dims)
    return [tuple(Size.of(1) if axis in added else next(rest) for axis in range(rank))]


def _squeeze(table: ShapeTable, node: ir.Node, dims: Dims) -> Sequence[Dims | None]:
    axes = table._axes(node, 1)
    if axes is None:
        return [None]
    dropped = {axis % len(dims) for axis in axes}
    return [tuple(size for axis, size in enumerate(dims) if axis not in dropped)]


def _matmul(table: ShapeTable, node: ir.Node, a: Dims) -> Sequence[Dims | None]:
    b = table.dims(node.inputs[1])
    if b is None or len(a) < 2 or len(b) < 2:
        return [None]
    batch = table.broadcast([a[:-2], b[:-2]], node.outputs[0])
    return [None if batch is None else (*batch, a[-2], b[-1])]


def _gemm(table: ShapeTable, node: ir.Node, a: Dims) -> Sequence[Dims | None]:
    b = table.dims(node.inputs[1])
    if b is None or len(a) != 2 or len(b) != 2:
        return [None]
    return [(a[1] if int_attribute(node, "transA", 0) else a[0], b[0] if int_attribute(node, "transB", 0) else b[1])]


def _concat(table: ShapeTable, node: ir.Node, first: Dims) -> Sequence[Dims | None]:
    shapes = [table.dims(value) for value in node.inputs]
    axis = int_attribute(node, "axis", 1) % len(first)
    total = Size()
    for shape in shapes:
        if shape is None or len(shape) != len(first):
            return [None]
        total = total + shape[axis]
    # All parts must agree on the other axes: a number in any of them, else what the last part has (a past comes first).
    sizes = [
        next((shape[other] for shape in shapes if shape is not None and shape[other].number is not None), (shapes[-1] or first)[other])
        for other in range(len(first))
    ]
    return [tuple(total if other == axis else size for other, size in enumerate(sizes))]


def _split(table: ShapeTable, node: ir.Node, dims: Dims) -> Sequence[Dims | None]:
    axis = int_attribute(node, "axis", 0) % len(dims)
    parts = table._axes(node, 1, "split")
    whole = dims[axis].number
    if parts is None:
        count = len(node.outputs)
        if whole is None or whole % count or len(node.inputs) > 1:
            return [None] * len(node.outputs)
        parts = (whole // count,) * count
    return [(*dims[:axis], Size.of(part), *dims[axis + 1 :]) for part in parts]


def _gather(table: ShapeTable, node: ir.Node, dims: Dims) -> Sequence[Dims | None]:
    indices = table.dims(node.inputs[1])
    axis = int_attribute(node, "axis", 0) % len(dims)
    return [None if indices is None else (*dims[:axis], *indices, *dims[axis + 1 :])]


def _expand(table: ShapeTable, node: ir.Node, dims: Dims) -> Sequence[Dims | None]:
    target = table.integers(node.inputs[1])
    if target is None or not all(item.is_natural for item in target.items):
        return [None]
    return [table.broadcast([dims, target.items], node.outputs[0])]


def _range(table: ShapeTable, node: ir.Node, _: Dims) -> Sequence[Dims | None]:
    start, end, step = (table.integers(value) for value in node.inputs)
    if start is None or end is None or step is None or step.numbers != (1,):
        return [None]
    length = end.items[0] - start.items[0]
    return [(length,)] if length.is_natural else [None]


def _tile(table: ShapeTable, node: ir.Node, dims: Dims) -> Sequence[Dims | None]:
    repeats = table.integers(node.inputs[1]) if len(node.inputs) == 2 else None
    if repeats is None or len(repeats.items) != len(dims) or not all(item.is_natural for item in repeats.items):
        return [None]
    return [tuple(size * count for size, count in zip(dims, repeats.items, strict=True))]


def _flatten(table: ShapeTable, node: ir.Node, dims: Dims) -> Sequence[Dims | None]:
    axis = int_attribute(node, "axis", 1)
    axis += len(dims) if axis < 0 else 0
    return [(size_product(dims[:axis]), size_product(dims[axis:]))]


def _attention(table: ShapeTable, node: ir.Node, q: Dims) -> Sequence[Dims | None]:
    v = table.dims(node.inputs[2])
    return [(*q[:3], v[3])] if len(q) == 4 and v is not None and len(v) == 4 else [None]


def _constant_of_shape(table: ShapeTable, node: ir.Node, _: Dims) -> Sequence[Dims | None]:
    given = table.integers(node.inputs[0])
    return [given.items if given is not None and all(item.is_natural for item in given.items) else None]


_SHAPE_RULES: dict[str, ShapeRule] = {
    "Attention": _attention,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "Range": _range,
    "Reshape": lambda table, node, dims: [table.reshaped(node, dims)],
    "Slice": lambda table, node, dims: [table.sliced(node, dims)],
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}


def _skip(table: ShapeTable, node: ir.Node, x: Dims) -> Sequence[Dims | None]:
    """A normalisation of a sum, whose fourth output is the sum."""
    return [x, None, None, x]


def _quantized(table: ShapeTable, node: ir.Node, x: Dims) -> Sequence[Dims | None]:
    """The quantised values, a scale, a zero point."""
    return [x, (), ()]


def _matmul_in_blocks(table: ShapeTable, node: ir.Node, x: Dims) -> Sequence[Dims | None]:
    return [(*x[:-1], Size.of(node.attributes["N"].as_int()))] if x else [None]


_CONTRIB_RULES: dict[str, ShapeRule] = {
    "DynamicQuantizeLinear": _quantized,
    "MatMulNBits": _matmul_in_blocks,
    "SimplifiedLayerNormalization": lambda table, node, x: [x],
    "SkipLayerNormalization": _skip,
    "SkipSimplifiedLayerNormalization": _skip,
}

_SAME_TYPE = (
    (_SAME_SHAPE | _BROADCAST | _REDUCTIONS | frozenset(_SHAPE_RULES))
    - _LOGICAL
    - ({"ConstantOfShape", "DequantizeLinear", "MatMulInteger", "QuantizeLinear"})
)
"""Ops whose first output has the element type of their first input, for `Where` of the second."""
_SAME_TYPE_CONTRIB = _SAME_SHAPE_CONTRIB | _SKIPPED | {"MatMulNBits", "SimplifiedLayerNormalization"}

NumberRule: TypeAlias = Callable[[ShapeTable, ir.Node], "Integers | None"]


def _shape(table: ShapeTable, node: ir.Node) -> Integers | None:
    dims = table.dims(node.inputs[0])
    if dims is None:
        return None
    end = node.attributes.get("end")
    return Integers(dims[int_attribute(node, "start", 0) : None if end is None else end.as_int()], 1)


def _gather_numbers(table: ShapeTable, node: ir.Node) -> Integers | None:
    source, indices = table.integers(node.inputs[0]), table.integers(node.inputs[1])
    if source is None or source.rank != 1 or indices is None or indices.numbers is None:
        return None
    count = len(source.items)
    if not all(-count <= index < count for index in indices.numbers):
        return None
    return Integers(tuple(source.items[index] for index in indices.numbers), indices.rank)


def _concat_numbers(table: ShapeTable, node: ir.Node) -> Integers | None:
    parts = [table.integers(value) for value in node.inputs]
    items: list[Size] = []
    for part in parts:
        if part is None or part.rank != 1:
            return None
        items.extend(part.items)
    return Integers(tuple(items), 1)


def _slice_numbers(table: ShapeTable, node: ir.Node) -> Integers | None:
    source = table.integers(node.inputs[0])
    bounds = table.slice_bounds(node, 1) if source is not None and source.rank == 1 else None
    if source is None or bounds is None or set(bounds) != {0}:
        return None
    start, end = (bound.number for bound in bounds[0])
    return None if start is None or end is None else Integers(source.items[start:end], 1)


def _unsqueeze_numbers(table: ShapeTable, node: ir.Node) -> Integers | None:
    source = table.integers(node.inputs[0])
    axes = table._axes(node, 1)
    return Integers(source.items, 1) if source is not None and source.rank == 0 and axes is not None and len(axes) == 1 else None


def _squeeze_numbers(table: ShapeTable, node: ir.Node) -> Integers | None:
    source = table.integers(node.inputs[0])
    return Integers(source.items, 0) if source is not None and source.rank == 1 and len(source.items) == 1 else None


def _reshape_numbers(table: ShapeTable, node: ir.Node) -> Integers | None:
    source, target = table.integers(node.inputs[0]), table.integers(node.inputs[-1])
    if source is None or target is None or target.numbers is None or target.rank != 1:
        return None
    if target.numbers in ((-1,), (len(source.items),)):
        return Integers(source.items, 1)
    return Integers(source.items, 0) if target.numbers == () and len(source.items) == 1 else None


def _cast_numbers(table: ShapeTable, node: ir.Node) -> Integers | None:
    to = int_attribute(node, "to", 0)
    return table.integers(node.inputs[0]) if to in (ir.DataType.INT64, ir.DataType.INT32) else None


def _elementwise(compute: Callable[[Size, Size], Size | None]) -> NumberRule:
    def rule(table: ShapeTable, node: ir.Node) -> Integers | None:
        a, b = (table.integers(value) for value in node.inputs)
        if a is None or b is None:
            return None
        count = max(len(a.items), len(b.items)) if a.items and b.items else 0
        if any(len(each.items) not in (1, count) for each in (a, b)):
            return None
        results = [compute(*(each.items[0 if len(each.items) == 1 else index] for each in (a, b))) for index in range(count)]
        return Integers(tuple(result for result in results if result is not None), max(a.rank, b.rank)) if None not in results else None

    return rule


def _quotient(a: Size, b: Size) -> Size | None:
    if a.number is not None and b.number is not None:
        return Size.of(a.number // b.number) if a.number >= 0 and b.number > 0 else None
    return a.divided_by(b) if b.number is not None and b.number > 0 else None


def _is_equal(a: Size, b: Size) -> Size | None:
    """1 or 0 where that's provable: equal polynomials are equal, and a size isn't negative."""
    difference = a - b
    if difference.number is not None:
        return Size.of(int(difference.number == 0))
    constant = sum(factor for names, factor in difference.terms if not names)
    return Size.of(0) if constant > 0 and difference.is_natural else None


def _where_numbers(table: ShapeTable, node: ir.Node) -> Integers | None:
    parts = [table.integers(value) for value in node.inputs]
    condition = parts[0]
    if condition is None or condition.numbers is None or parts[1] is None or parts[2] is None:
        return None
    count = len(condition.items)
    if any(part is None or len(part.items) not in (1, count) for part in parts):
        return None
    chosen = [parts[1] if taken else parts[2] for taken in condition.numbers]
    items = tuple(part.items[0 if len(part.items) == 1 else index] for index, part in enumerate(chosen))
    return Integers(items, max(part.rank for part in parts if part is not None))


def _filled_numbers(table: ShapeTable, node: ir.Node) -> Integers | None:
    given = table.integers(node.inputs[0])
    count = None if given is None or given.numbers is None or len(given.numbers) != 1 else given.numbers[0]
    value = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else None
    if count is None or not 0 <= count <= _LONGEST or value is None or value.dtype.kind != "i":
        return None
    return Integers((Size.of(int(value.reshape(-1)[0])),) * count, 1)


def _product_numbers(table: ShapeTable, node: ir.Node) -> Integers | None:
    source = table.integers(node.inputs[0])
    return None if source is None else Integers((size_product(source.items),), 1 if int_attribute(node, "keepdims", 1) else 0)


def _neg_numbers(table: ShapeTable, node: ir.Node) -> Integers | None:
    source = table.integers(node.inputs[0])
    return None if source is None else Integers(tuple(-item for item in source.items), source.rank)


_NUMBER_RULES: dict[str, NumberRule] = {
    "Add": _elementwise(Size.__add__),
    "Cast": _cast_numbers,
    "Concat": _concat_numbers,
    "ConstantOfShape": _filled_numbers,
    "Div": _elementwise(_quotient),
    "Equal": _elementwise(_is_equal),
    "Gather": _gather_numbers,
    "Identity": lambda table, node: table.integers(node.inputs[0]),
    "Mul": _elementwise(Size.__mul__),
    "Neg": _neg_numbers,
    "ReduceProd": _product_numbers,
    "Reshape": _reshape_numbers,
    "Shape": _shape,
    "Slice": _slice_numbers,
    "Squeeze": _squeeze_numbers,
    "Sub": _elementwise(Size.__sub__),
    "Unsqueeze": _unsqueeze_numbers,
    "Where": _where_numbers,
}


def shape_tables(model: ir.Model, weights: WeightStore) -> Sequence[tuple[ir.Graph, ShapeTable]]:
    """Every graph of a model, bodies behind the graph that they are in, with the one table of all their values."""
    table = ShapeTable(weights)
    graphs: list[ir.Graph] = []
    _follow(model.graph, table, graphs)
    return [(graph, table) for graph in graphs]


def _follow(graph: ir.Graph, table: ShapeTable, graphs: list[ir.Graph]) -> None:
    graphs.append(graph)
    for node in graph:
        for body in (body for attribute in node.attributes.values() for body in attribute_graphs(attribute)):
            _follow(body, table, graphs)
        table.follow(node)
