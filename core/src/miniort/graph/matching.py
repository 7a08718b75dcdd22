"""The vocabulary of passes that search by meaning: constants by value, products and polynomials in any spelling, and who reads what.

`x * x * x`, `Pow(x, 3)` and `Mul(x, Pow(x, 2))` are one polynomial; `x / Sqrt(v)`, `x * Reciprocal(Sqrt(v))` and `x * Pow(v, -0.5)` are one
product of powers. A pass compares these, and so doesn't list the nodes that one exporter writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import TypeAlias

import onnx_ir as ir

from miniort.model.constants import constant_array, is_constant, shape_of
from miniort.model.weights import WeightStore

_EPSILONS = {ir.DataType.FLOAT: 2**-23, ir.DataType.FLOAT16: 2**-10, ir.DataType.BFLOAT16: 2**-7, ir.DataType.DOUBLE: 2**-52}
"""The distance from 1 to the next number of each floating-point type."""
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Neg", "Sqrt", "Reciprocal", "Identity"})
_DEPTH = 10
"""How many nodes one behind the other are looked at: more than any spelling has, and few enough to be fast."""

Polynomial: TypeAlias = "dict[tuple[float, ...], float]"
"""The coefficient of each monomial; a monomial is the exponent of each atom."""


def producer(value: ir.Value | None, *ops: str) -> ir.Node | None:
    """The node of the default domain that computes a value, identities left out; None if it's none of these ops."""
    node = None if value is None else value.producer()
    while node is not None and node.domain == "" and node.op_type == "Identity":
        value = node.inputs[0]
        node = None if value is None else value.producer()
    return node if node is not None and node.domain == "" and node.op_type in ops else None


def consumers(value: ir.Value, *ops: str) -> Iterator[ir.Node]:
    """The nodes of the default domain and of these ops that read a value, each once."""
    seen: dict[ir.Node, None] = {node: None for node, _ in value.uses()}
    return (node for node in seen if node.domain == "" and node.op_type in ops)


def scalar(value: ir.Value | None, weights: WeightStore) -> float | None:
    """The number that a constant of one element stands for."""
    if value is None or not is_constant(value) or value.dtype is None or value.dtype == ir.DataType.STRING:
        return None
    array = constant_array(value, weights)
    return None if array is None or array.size != 1 else float(array.reshape(-1)[0])


def integers(value: ir.Value | None, weights: WeightStore) -> tuple[int, ...] | None:
    """The numbers of a constant vector of integers."""
    array = constant_array(value, weights)
    return None if array is None or array.dtype.kind not in "iu" else tuple(int(item) for item in array.reshape(-1))


def is_float(value: ir.Value | None) -> bool:
    """Whether a value is known to hold floating-point numbers."""
    return value is not None and value.dtype in _EPSILONS


def tolerance(value: ir.Value) -> float:
    """How far, relatively, a constant may be from the formula's: what rounding to the value's type explains, or six digits."""
    assert value.dtype is not None
    return max(1e-5, 4 * _EPSILONS[value.dtype])


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """A number that is an attribute; `default` where it's absent, or of another type as in the oldest opsets."""
    attribute = node.attributes.get(name)
    return default if attribute is None or attribute.type != ir.AttributeType.INT else attribute.as_int()


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The input of a commutative node of two that isn't `value`."""
    first, second = node.inputs
    return second if first is value else first


def is_enclosed(nodes: Collection[ir.Node], root: ir.Value) -> bool:
    """Whether nobody but these nodes reads what they compute, `root` left out: only then may they be replaced by one."""
    inner = set(nodes)
    return all(
        value is root or (not value.is_graph_output() and all(node in inner for node, _ in value.uses()))
        for node in inner
        for value in node.outputs
    )


def upstream(value: ir.Value, depth: int = _DEPTH) -> Iterator[ir.Value]:
    """A value and those that it's computed from by arithmetic alone, nearest first."""
    yield from _spread(value, depth, backwards=True)


def downstream(value: ir.Value, depth: int = _DEPTH) -> Iterator[ir.Value]:
    """The values that are computed from one by arithmetic alone, nearest first; the value itself isn't among them."""
    reached = _spread(value, depth, backwards=False)
    next(reached)
    return reached


def _spread(value: ir.Value, depth: int, *, backwards: bool) -> Iterator[ir.Value]:
    seen, layer = {value}, [value]
    for _ in range(depth):
        yield from layer
        reached: dict[ir.Value, None] = {}
        for each in layer:
            if backwards:
                node = each.producer()
                near = [] if node is None or not _is_arithmetic(node) else [x for x in node.inputs if x is not None and not is_constant(x)]
            else:
                near = [node.outputs[0] for node, _ in each.uses() if _is_arithmetic(node)]
            reached.update((x, None) for x in near if x not in seen)
        seen.update(reached)
        layer = list(reached)


def _is_arithmetic(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _ARITHMETIC and not node.attributes  # before opset 7 they say how to broadcast


@dataclass
class Algebra:
    """Reads values as polynomials, or as products of powers, of given values: the atoms. `nodes` collects what was read through."""

    atoms: Sequence[ir.Value]
    weights: WeightStore
    nodes: set[ir.Node] = field(default_factory=set)

    def polynomial(self, value: ir.Value | None, depth: int = _DEPTH) -> Polynomial | None:
        """A value as a polynomial of the atoms, whose exponents may be negative or fractions; None if it isn't one."""
        if value is None or depth < 0:
            return None
        if value in self.atoms:
            return {tuple(float(value is atom) for atom in self.atoms): 1.0}
        if is_constant(value):
            number = scalar(value, self.weights)
            fits = number is not None and len(shape_of(value) or ()) <= self._rank
            return {self._one: number} if fits and number is not None else None
        node = value.producer()
        if node is None or not _is_arithmetic(node):
            return None
        self.nodes.add(node)
        parts: list[Polynomial] = []
        for x in node.inputs:
            part = self.polynomial(x, depth - 1)
            if part is None:
                return None
            parts.append(part)
        return self._combined(node.op_type, parts)

    @property
    def _one(self) -> tuple[float, ...]:
        return (0.0,) * len(self.atoms)

    @property
    def _rank(self) -> int:
        return max(len(shape_of(atom) or ()) for atom in self.atoms)

    def _combined(self, op: str, parts: Sequence[Polynomial]) -> Polynomial | None:
        a, b = parts[0], parts[-1]
        match op:
            case "Identity":
                return a
            case "Neg":
                return _times(a, {self._one: -1.0})
            case "Add":
                return _plus(a, b)
            case "Sub":
                return _plus(a, _times(b, {self._one: -1.0}))
            case "Mul":
                return _times(a, b)
            case "Div":
                inverse = _power(b, -1.0)
                return None if inverse is None else _times(a, inverse)
            case "Reciprocal":
                return _power(a, -1.0)
            case "Sqrt":
                return _power(a, 0.5)
            case "Pow" if set(b) == {self._one}:
                return _power(a, b[self._one])
        return None


def _plus(a: Polynomial, b: Polynomial) -> Polynomial:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in (*a, *(key for key in b if key not in a))}


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    product: Polynomial = {}
    for x, p in a.items():
        for y, q in b.items():
            key = tuple(i + j for i, j in zip(x, y, strict=True))
            product[key] = product.get(key, 0.0) + p * q
    return product


def _power(a: Polynomial, exponent: float) -> Polynomial | None:
    """aⁿ; None for a sum to a power that isn't 1, 2 or 3, and where √x² would have to be |x|."""
    if exponent in (1.0, 2.0, 3.0):
        result = a
        for _ in range(int(exponent) - 1):
            result = _times(result, a)
        return result
    if len(a) != 1:
        return None
    ((key, factor),) = a.items()
    if factor <= 0 or (exponent != int(exponent) and any(abs(each) not in (0.0, 1.0) for each in key)):
        return None
    return {tuple(each * exponent for each in key): factor**exponent}


def equals(found: Polynomial | None, wanted: Polynomial, relative: float) -> bool:
    """Whether two polynomials have the same monomials, and coefficients that are equal within a relative tolerance."""
    if found is None:
        return False
    found = {key: factor for key, factor in found.items() if factor}
    return set(found) == set(wanted) and all(isclose(found[key], factor, rel_tol=relative) for key, factor in wanted.items())


@dataclass(frozen=True)
class Product:
    """A number times values to powers, and the nodes that multiply them."""

    factor: float
    powers: Mapping[ir.Value, float]
    nodes: frozenset[ir.Node]


def product(value: ir.Value, stops: Collection[ir.Value], weights: WeightStore, depth: int = _DEPTH) -> Product:
    """A value as a product of powers. It's taken apart through nodes whose result nobody else reads, and not beyond `stops`."""
    whole = Product(1.0, {value: 1.0}, frozenset())
    node = value.producer()
    if value in stops or depth < 0 or node is None or not _is_arithmetic(node):
        number = scalar(value, weights)
        return whole if number is None or shape_of(value) not in ((), (1,)) else Product(number, {}, frozenset())
    parts = [product(x, stops, weights, depth - 1) if _is_read_once(x, node) else Product(1.0, {x: 1.0}, frozenset())
             for x in node.inputs if x is not None]  # fmt: skip
    signs = {"Identity": (1.0,), "Mul": (1.0, 1.0), "Div": (1.0, -1.0), "Reciprocal": (-1.0,), "Sqrt": (0.5,)}
    exponents = signs.get(node.op_type)
    if node.op_type == "Pow":
        number = scalar(node.inputs[1], weights)
        exponents = None if number is None else (number,)
    if exponents is None:
        return whole
    powers: dict[ir.Value, float] = {}
    factor, nodes = 1.0, {node}
    for part, exponent in zip(parts, exponents, strict=False):
        if exponent not in (1.0, -1.0) and (part.factor < 0 or any(abs(each) != 1.0 for each in part.powers.values())):
            return whole
        if part.factor == 0 and exponent < 0:
            return whole
        factor *= part.factor**exponent
        nodes |= part.nodes
        for x, power in part.powers.items():
            powers[x] = powers.get(x, 0.0) + power * exponent
    return Product(factor, powers, frozenset(nodes))


def _is_read_once(value: ir.Value, reader: ir.Node) -> bool:
    return is_constant(value) or (not value.is_graph_output() and all(node is reader for node, _ in value.uses()))
