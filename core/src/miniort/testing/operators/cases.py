"""Cases: a node with inputs, drawn by the builder of its op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import helper

from miniort.kernels import Kernel
from miniort.types import STRING, Array, DType, dtype_to_onnx, dtypes_from_type_strings

T = TypeVar("T")

OLDEST_OPSET = 7
"""The default domain is covered from this opset on, `ai.onnx.ml` from its first."""

FAMILIES: tuple[str, ...] = (
    "attention",
    "casts",
    "concatenation",
    "constants",
    "control_flow",
    "convolution",
    "detection",
    "elementwise",
    "images",
    "indexing",
    "losses",
    "matrix",
    "ml_categories",
    "ml_features",
    "ml_linear",
    "ml_maps",
    "ml_trees",
    "normalization",
    "ordering",
    "padding",
    "pooling",
    "quantization",
    "random_numbers",
    "recurrent",
    "reduction",
    "sequences",
    "shape",
    "signal",
    "spatial",
    "text",
)
"""Modules of this package that hold builders."""

SMALL_FLOATS = frozenset(
    np.dtype(dtype)
    for dtype in (
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e5m2fnuz,
        ml_dtypes.float8_e8m0fnu,
        ml_dtypes.float6_e2m3fn,
        ml_dtypes.float6_e3m2fn,
        ml_dtypes.float4_e2m1fn,
    )
)


@dataclass(frozen=True)
class Operator:
    """An op at one schema version. `opset` is the oldest opset of at least OLDEST_OPSET that implies this version."""

    domain: str
    op: str
    version: int
    opset: int

    @cached_property
    def schema(self) -> Any:
        """onnx's schema."""
        return onnx.defs.get_schema(self.op, self.version, self.domain)

    def dtypes(self, parameter: str) -> list[DType]:
        """Element types that the schema allows for tensors of a type parameter (`"T"`), in the schema's order."""
        for constraint in self.schema.type_constraints:
            if constraint.type_param_str == parameter:
                allowed = dtypes_from_type_strings(frozenset(constraint.allowed_type_strs))
                return sorted(allowed, key=dtype_to_onnx)
        raise KeyError(f"{self} has no type parameter {parameter!r}")

    def has_attribute(self, name: str) -> bool:
        """Whether this version has the attribute."""
        return name in self.schema.attributes

    def __str__(self) -> str:
        return f"{self.domain + '.' if self.domain else ''}{self.op}-{self.version}"


@dataclass
class NodeCase:
    """A node and what it's fed.

    inputs: arrays, lists of arrays (sequences), or None for an absent input, which is written as "".
    attributes: as `onnx.helper.make_attribute` takes them. outputs: how many are asked for.
    constants: positions of inputs that are initializers, not graph inputs.
    input_types: TypeProtos of inputs whose type the value doesn't tell (empty sequences, optionals), by position.
    tolerance: relative, where that of the result's type won't do; `atol` absolute.
    shapes_only: compare shapes and types, as for random numbers.
    skipped: positions of outputs that are written as "", so they aren't asked for.
    captured: further graph inputs, by name, that sub-graphs of the node see.
    output_types: TypeProtos of outputs, by position, that the model declares.
    expected: the formula of the specification, for cases that no other runtime computes: takes the inputs, returns all outputs.
    """

    inputs: list[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    constants: frozenset[int] = frozenset()
    input_types: dict[int, onnx.TypeProto] = field(default_factory=dict)
    tolerance: float | None = None
    atol: float | None = None
    shapes_only: bool = False
    skipped: frozenset[int] = frozenset()
    captured: dict[str, Any] = field(default_factory=dict)
    output_types: dict[int, onnx.TypeProto] = field(default_factory=dict)
    expected: Callable[[list[Any]], list[Any]] | None = None

    def is_fed(self, index: int) -> bool:
        """Whether an input is a graph input; an empty optional is None, and told from an absent input by its type."""
        return index not in self.constants and (self.inputs[index] is not None or index in self.input_types)

    def model(self, operator: Operator) -> onnx.ModelProto:
        """The model of this one node. Shapes of inputs are open but for their rank, types of outputs are left to inference."""
        present = [self.is_fed(index) or value is not None for index, value in enumerate(self.inputs)]
        names = [f"x{index}" if there else "" for index, there in enumerate(present)]
        while names and not names[-1] and operator.schema.max_input > len(names):
            names.pop()
        outputs = ["" if index in self.skipped else f"y{index}" for index in range(self.outputs)]
        node = helper.make_node(operator.op, names, outputs, name="node", domain=operator.domain)
        for name, value in self.attributes.items():
            node.attribute.append(helper.make_attribute(name, value, attr_type=operator.schema.attributes[name].type.value))
        inputs = [
            helper.make_value_info(f"x{index}", self.input_types.get(index) or type_of(value))
            for index, value in enumerate(self.inputs)
            if self.is_fed(index)
        ]
        inputs += [helper.make_value_info(name, type_of(value)) for name, value in self.captured.items()]
        initializers = [
            onnx_tensor(f"x{index}", value) for index, value in enumerate(self.inputs) if index in self.constants and value is not None
        ]
        results = [onnx.ValueInfoProto(name=name, type=self.output_types.get(index)) for index, name in enumerate(outputs) if name]
        graph = helper.make_graph([node], "case", inputs, results, initializers)
        imports = [helper.make_opsetid(operator.domain, operator.opset)]
        if operator.domain:
            imports.append(helper.make_opsetid("", 18))
        return helper.make_model(graph, opset_imports=imports, ir_version=ir_version(operator))

    def feeds(self) -> dict[str, Any]:
        """What the model's inputs are given."""
        return {f"x{index}": value for index, value in enumerate(self.inputs) if self.is_fed(index)} | self.captured


def ir_version(operator: Operator) -> int:
    """An IR version that is old enough for other runtimes and new enough for the types in the model."""
    return int(max(8, min(onnx.IR_VERSION, helper.find_min_ir_version_for([helper.make_opsetid(operator.domain, operator.opset)], True))))


def type_of(value: Any) -> onnx.TypeProto:
    """The ONNX type of a value: an array of that rank with open sizes, or a sequence of such."""
    if isinstance(value, list):
        first = value[0]
        return helper.make_sequence_type_proto(helper.make_tensor_type_proto(dtype_to_onnx(first.dtype), None))
    return helper.make_tensor_type_proto(dtype_to_onnx(value.dtype), [None] * value.ndim)


def onnx_tensor(name: str, array: Array) -> onnx.TensorProto:
    """An array as an initializer."""
    return onnx.numpy_helper.from_array(array, name)


class Draws:
    """Random choices for builders, over hypothesis's `draw`."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        chosen: T = self.draw(st.sampled_from(items))
        return chosen

    def boolean(self) -> bool:
        """True or false."""
        return bool(self.draw(st.booleans()))

    def integer(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return int(self.draw(st.integers(low, high)))

    def number(self, low: float, high: float) -> float:
        """A float32 number between the two."""
        return float(np.float32(self.draw(st.floats(low, high, width=32))))

    def dtype(self, operator: Operator, parameter: str = "T", without: Sequence[Any] = ()) -> DType:
        """One of the element types that the schema allows for a type parameter."""
        left_out = {np.dtype(each) for each in without}
        return self.choice([dtype for dtype in operator.dtypes(parameter) if dtype not in left_out])

    def shape(self, min_rank: int = 0, max_rank: int = 4, min_size: int = 0, max_size: int = 4) -> tuple[int, ...]:
        """A shape; sizes of 0 are drawn now and then where `min_size` allows it."""
        rank = self.integer(min_rank, max_rank)
        sizes = [self.integer(max(1, min_size), max_size) for _ in range(rank)]
        if min_size == 0 and rank and self.integer(0, 9) == 0:
            sizes[self.integer(0, rank - 1)] = 0
        return tuple(sizes)

    def permutation(self, items: Sequence[T]) -> list[T]:
        """The items in any order."""
        return list(self.draw(st.permutations(items)))

    def rng(self) -> np.random.Generator:
        """A generator for arrays that are drawn at one go."""
        return np.random.default_rng(self.integer(0, 2**32 - 1))

    def some(self, **attributes: Any) -> dict[str, Any]:
        """Attributes, each there or left to its default."""
        return {name: value for name, value in attributes.items() if self.boolean()}

    def trimmed(self, inputs: list[Any]) -> list[Any]:
        """Inputs whose absent ones at the end are left out, or else written as ""."""
        if self.boolean():
            while inputs and inputs[-1] is None:
                inputs = inputs[:-1]
        return inputs

    def constants(self, *positions: int) -> frozenset[int]:
        """Inputs that are initializers: each of the positions or not."""
        return frozenset(position for position in positions if self.boolean())

    def axis(self, rank: int, operator: Operator | None = None) -> int:
        """An axis of a tensor of that rank, counted from either end; from the front for schema versions before opset 11."""
        return self.integer(0 if operator is not None and operator.version < 11 else -rank, rank - 1)

    def axes(self, rank: int, operator: Operator, at_least: int = 0) -> list[int]:
        """Axes of a tensor of that rank, in any order, each at most once."""
        drawn = self.permutation(range(rank))[: self.integer(at_least, rank)]
        return [axis - rank if operator.version >= 11 and self.boolean() else axis for axis in drawn]

    def broadcasting(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts to `shape`: leading axes left off, sizes replaced by 1."""
        kept = shape[self.integer(0, len(shape)) :]
        return tuple(size if self.boolean() else 1 for size in kept)

    def array(self, dtype: DType, shape: Sequence[int], low: float | None = None, high: float | None = None, special: bool = True) -> Array:
        """An array of that type and shape.

        Floats are drawn between `low` and `high` (-4 and 4), now and then with NaN, infinities and -0 among them if `special`; integers
        over a small range, now and then over their whole range if no bounds are given.
        """
        rng = self.rng()
        shape = tuple(shape)
        if dtype == STRING:
            words = np.array(["", "a", "b", "ab", "Ab", "ä", "c d", "12", "-1.5", "z" * 9], object)
            return np.asarray(words[rng.integers(0, len(words), shape)], object)
        if dtype.kind == "b":
            return rng.integers(0, 2, shape).astype(bool)
        if dtype.kind == "c":
            real = rng.uniform(-4 if low is None else low, 4 if high is None else high, (2, *shape))
            return np.asarray(real[0] + 1j * real[1]).astype(dtype)
        if is_float(dtype):
            values = rng.uniform(-4 if low is None else low, 4 if high is None else high, shape)
            if special and low is None and high is None and values.size and dtype not in SMALL_FLOATS and self.integer(0, 4) == 0:
                flat = values.reshape(-1)
                places = rng.integers(0, flat.size, min(3, flat.size))
                flat[places] = rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], len(places))
            return np.asarray(values).astype(dtype)
        info = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
        whole = low is None and high is None and special and self.integer(0, 4) == 0
        least = int(info.min) if whole else max(int(info.min), int(-9 if low is None else low))
        most = int(info.max) if whole else min(int(info.max), int(9 if high is None else high))
        numbers = rng.integers(least, most, shape, dtype=np.uint64 if info.max > 2**63 else np.int64, endpoint=True)
        return np.asarray(numbers).astype(dtype)

    def positive(self, dtype: DType, shape: Sequence[int], low: float = 0.1, high: float = 4) -> Array:
        """Numbers above 0, without special ones."""
        return self.array(dtype, shape, low=max(low, 1) if not is_float(dtype) else low, high=high, special=False)

    def ordinary(self, dtype: DType, shape: Sequence[int], low: float = -4, high: float = 4) -> Array:
        """Numbers without special ones, for ops that add many of them up."""
        return self.array(dtype, shape, low=low, high=high, special=False)


def is_float(dtype: DType) -> bool:
    """Whether it's a floating-point type of NumPy or ml_dtypes."""
    if dtype.kind == "f":
        return True
    return dtype.kind == "V" and not dtype.name.startswith(("int", "uint"))


def is_coarse(dtype: DType) -> bool:
    """Whether sums in it depend on how they're rounded on the way: floats of 16 bits and fewer."""
    return is_float(dtype) and dtype.itemsize <= 2


Builder: TypeAlias = Callable[[Draws, Operator], NodeCase]

_BUILDERS: dict[tuple[str, str], Builder] = {}


def builds(*ops: str, domain: str = "") -> Callable[[Builder], Builder]:
    """Decorator: the function draws nodes of these ops, for every schema version."""

    def decorate(builder: Builder) -> Builder:
        for op in ops:
            if (domain, op) in _BUILDERS:
                raise ValueError(f"two builders for {op}")
            _BUILDERS[domain, op] = builder
        return builder

    return decorate


@cache
def operator_versions() -> tuple[Operator, ...]:
    """Every op of the default domain and `ai.onnx.ml` with every schema version that an opset from OLDEST_OPSET on implies."""
    versions: dict[tuple[str, str], list[Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain in ("", "ai.onnx.ml"):
            versions.setdefault((schema.domain, schema.name), []).append(schema)
    found = []
    for (domain, op), schemas in sorted(versions.items()):
        oldest = OLDEST_OPSET if domain == "" else 1
        schemas.sort(key=lambda schema: schema.since_version)
        for schema, following in zip(schemas, [*schemas[1:], None], strict=True):
            still_meant = following is None or following.since_version > oldest
            if still_meant and not schema.deprecated:
                found.append(Operator(domain, op, schema.since_version, max(oldest, schema.since_version)))
    return tuple(found)


def operators_of(kernels: Iterable[Kernel]) -> tuple[Operator, ...]:
    """Those ops and versions of the default domain that some of the kernels take: what a provider's own tests run."""
    table = list(kernels)
    return tuple(
        each
        for each in operator_versions()
        if each.domain == "" and any(kernel.domain == "" and kernel.op == each.op and kernel.covers(each.version) for kernel in table)
    )


def operators_without_builder() -> list[Operator]:
    """What no builder draws."""
    _load_builders()
    return [operator for operator in operator_versions() if (operator.domain, operator.op) not in _BUILDERS]


def build_case(draw: Callable[[st.SearchStrategy[Any]], Any], operator: Operator) -> NodeCase:
    """A case of an op at one version. KeyError if it has no builder."""
    _load_builders()
    return _BUILDERS[operator.domain, operator.op](Draws(draw), operator)


@cache
def _load_builders() -> None:
    for family in FAMILIES:
        import_module(f"miniort.testing.operators.{family}")
