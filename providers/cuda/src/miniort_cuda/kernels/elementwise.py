"""Ops that compute each element from the elements beside it; operands broadcast as NumPy's do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from miniort.kernels import CompileKernel, Kernel, KernelTable, NodeContext, NodeView, Run, TypeKey
from miniort.types import DType, dtype_from_onnx, type_string
from miniort_cuda.bfloat16 import rounded
from miniort_cuda.element_types import ALL, BFLOAT16, BOOL, FLOAT32, FLOATS, NUMBERS, SIGNED_INTEGERS
from miniort_cuda.namespace import array_namespace, special_functions

# op, the first schema version whose operands broadcast as today's do, its restricted types, the function of the namespace
_FUNCTIONS: tuple[tuple[str, int, dict[TypeKey, frozenset[DType]], str], ...] = (
    ("Add", 7, {"T": NUMBERS}, "add"),
    ("Sub", 7, {"T": NUMBERS}, "subtract"),
    ("Mul", 7, {"T": NUMBERS}, "multiply"),
    ("Neg", 6, {"T": FLOATS | SIGNED_INTEGERS}, "negative"),
    ("Abs", 6, {"T": NUMBERS}, "abs"),
    ("Sign", 9, {"T": NUMBERS}, "sign"),
    ("Reciprocal", 6, {"T": FLOATS}, "reciprocal"),
    ("Floor", 6, {"T": FLOATS}, "floor"),
    ("Ceil", 6, {"T": FLOATS}, "ceil"),
    ("Round", 11, {"T": FLOATS}, "rint"),
    ("Log", 6, {"T": FLOATS}, "log"),
    ("Sqrt", 6, {"T": FLOATS}, "sqrt"),
    ("Exp", 6, {"T": FLOATS}, "exp"),
    ("Tanh", 6, {"T": FLOATS}, "tanh"),
    ("Sin", 7, {"T": FLOATS}, "sin"),
    ("Cos", 7, {"T": FLOATS}, "cos"),
    ("And", 7, {"T": BOOL}, "logical_and"),
    ("Or", 7, {"T": BOOL}, "logical_or"),
    ("Xor", 7, {"T": BOOL}, "logical_xor"),
    ("Not", 1, {"T": BOOL}, "logical_not"),
    ("Equal", 7, {"T": ALL}, "equal"),
    ("Less", 7, {"T": NUMBERS}, "less"),
    ("LessOrEqual", 12, {"T": NUMBERS}, "less_equal"),
    ("Greater", 7, {"T": NUMBERS}, "greater"),
    ("GreaterOrEqual", 12, {"T": NUMBERS}, "greater_equal"),
    ("IsNaN", 9, {"T1": FLOATS}, "isnan"),
    ("Where", 9, {"T": ALL}, "where"),
)


def _function(name: str) -> CompileKernel:
    """A kernel that is one function of the namespace, of the same operands."""

    def compile_function(node: NodeContext) -> Run:
        run: Run = getattr(array_namespace(node), name)
        return run

    return compile_function


def _function_kernels() -> Iterator[Kernel]:
    for op, since, types, name in _FUNCTIONS:
        yield Kernel("cuda", op, "", since, None, _function(name), types)


kernels = KernelTable("cuda", _function_kernels())


@kernels.register("Div", (7, None), types={"T": NUMBERS})
def div(node: NodeContext) -> Run:
    """Quotient x / y; integers are cut off toward zero, where NumPy's floor_divide goes down."""
    xp = array_namespace(node)

    def run(x: Any, y: Any) -> Any:
        if x.dtype.kind == "f":
            return xp.divide(x, y)
        floor = xp.floor_divide(x, y)
        if x.dtype.kind == "u":
            return floor
        negative = xp.not_equal(xp.less(x, 0), xp.less(y, 0))
        inexact = xp.not_equal(xp.multiply(floor, y), x)
        return xp.add(floor, xp.logical_and(negative, inexact))

    return run


@kernels.register("Pow", (7, 11), types={"T": NUMBERS})
@kernels.register("Pow", (12, None), types={"T": NUMBERS, "T1": NUMBERS})
def pow(node: NodeContext) -> Run:
    """Power x ** y, in the type of x. An integer x to a float power is computed in the float type that both promote to."""
    xp = array_namespace(node)

    def run(x: Any, y: Any) -> Any:
        if x.dtype.kind == "f":
            return xp.power(x, y.astype(x.dtype, copy=False))
        return xp.power(x, y).astype(x.dtype, copy=False)

    return run


@kernels.register("Erf", (9, None), types={"T": FLOATS})
def erf(node: NodeContext) -> Run:
    """The error function 2/√π ∫₀ˣ e^-t² dt."""
    special = special_functions(node)

    def run(x: Any) -> Any:
        return special.erf(x).astype(x.dtype, copy=False)

    return run


def _fold(name: str) -> CompileKernel:
    """A kernel of any number of operands, of which the function takes two."""

    def compile_fold(node: NodeContext) -> Run:
        function = getattr(array_namespace(node), name)

        def run(first: Any, *others: Any) -> Any:
            return reduce(function, others, first) if others else first.copy()

        return run

    return compile_fold


for _op, _name in (("Max", "maximum"), ("Min", "minimum"), ("Sum", "add")):
    kernels.register(_op, (8, None), types={"T": FLOATS if _op == "Sum" else NUMBERS})(_fold(_name))


@kernels.register("Mod", (10, None), types={"T": NUMBERS})
def mod(node: NodeContext) -> Run:
    """The rest of x / y: with the sign of y, or if `fmod` with that of x, as C has it."""
    xp = array_namespace(node)
    run: Run = xp.fmod if node.attribute("fmod", 0) else xp.remainder
    return run


@kernels.register("IsInf", (10, None), types={"T1": FLOATS})
def is_inf(node: NodeContext) -> Run:
    """Where x is infinite, of the signs that the attributes ask for."""
    xp = array_namespace(node)
    negative, positive = node.attribute("detect_negative", 1), node.attribute("detect_positive", 1)

    def run(x: Any) -> Any:
        found = xp.isinf(x)
        if not positive:
            found = xp.logical_and(found, x < 0)
        return found if negative else xp.logical_and(found, x > 0)

    return run


def _refuse_cast(node: NodeView) -> str | None:
    dtype = dtype_from_onnx(node.attribute("to"))
    return None if dtype in ALL else f"it has no arrays of {type_string(dtype)}"


@kernels.register("Cast", (6, None), types={"T1": ALL}, refuse=_refuse_cast)
def cast(node: NodeContext) -> Run:
    """The same values in element type `to`; floats are cut off toward zero on their way to integers."""
    xp, dtype = array_namespace(node), dtype_from_onnx(node.attribute("to"))

    def run(x: Any) -> Any:
        return rounded(xp, x.astype(FLOAT32)) if dtype == BFLOAT16 else x.astype(dtype)

    return run


@kernels.register("CastLike", (15, None), types={"T1": ALL, "T2": ALL}, metadata_inputs=(1,))
def cast_like(node: NodeContext) -> Run:
    """The same values in the element type of the second input."""
    xp = array_namespace(node)

    def run(x: Any, like: Any) -> Any:
        return rounded(xp, x.astype(FLOAT32)) if like.dtype == BFLOAT16 else x.astype(like.dtype)

    return run
