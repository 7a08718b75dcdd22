"""Ops that compute each element from the elements beside it: vForce for one operand, vDSP for two of one shape."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from miniort.errors import InputError
from miniort.kernels import CompileKernel, Kernel, KernelTable, NodeContext, NodeView, Run
from miniort.types import Array, format_shape
from miniort_accelerate.library import Binary, Unary
from miniort_accelerate.operands import FLOAT32, FLOATS, address, contiguous, library_of, require_types

# op, schema version since which it means what it does today, function for float32, function for float64
_UNARY = (
    ("Exp", 6, "vexpf", "vexp"),
    ("Log", 6, "vlogf", "vlog"),
    ("Sqrt", 6, "vsqrtf", "vsqrt"),
    ("Tanh", 6, "vtanhf", "vtanh"),
    ("Reciprocal", 6, "vrecf", "vrec"),
)

# op, the first schema version whose operands broadcast as today's do, function for float32
_BINARY = (("Add", 7, "vadd"), ("Sub", 7, "vsub"), ("Mul", 7, "vmul"), ("Div", 7, "vdiv"))


def apply_unary(function: Unary, x: Array, out: Array) -> None:
    """Compute out = function(x). Both C-contiguous and of one size."""
    function(address(out), address(x), x.size)


def apply_binary(function: Binary, x: Array, y: Array, out: Array) -> None:
    """Compute out = x ∘ y. All C-contiguous and of one size; out may be x or y."""
    function(address(x), 1, address(y), 1, address(out), 1, out.size)


def _unary(single: str, double: str) -> CompileKernel:
    def compile_unary(node: NodeContext) -> Run:
        library, allocate = library_of(node), node.provider.allocate
        for_single: Unary = getattr(library, single)
        for_double: Unary = getattr(library, double)

        def run(x: Array) -> Array:
            require_types(node, FLOATS, x)
            out: Array = allocate(x.shape, x.dtype)
            apply_unary(for_single if x.dtype == np.float32 else for_double, contiguous(x), out)
            return out

        return run

    return compile_unary


def refuse_broadcasting(node: NodeView) -> str | None:
    """VDSP takes two vectors of one length, so both shapes must be known to be the same."""
    shapes = [None if info is None else info.shape for info in node.inputs]
    first, second = shapes
    if first is not None and first == second and None not in first:
        return None
    return f"its kernel takes operands of one known shape, the node has {format_shape(first)} and {format_shape(second)}"


def _binary(name: str) -> CompileKernel:
    def compile_binary(node: NodeContext) -> Run:
        function: Binary = getattr(library_of(node), name)
        allocate = node.provider.allocate

        def run(x: Array, y: Array) -> Array:
            require_types(node, FLOAT32, x, y)
            if x.shape != y.shape:
                raise InputError(f"{node.op}: shapes that the model says are the same differ: {list(x.shape)} and {list(y.shape)}")
            out: Array = allocate(x.shape, x.dtype)
            apply_binary(function, contiguous(x), contiguous(y), out)
            return out

        return run

    return compile_binary


def _kernels() -> Iterator[Kernel]:
    for op, since, single, double in _UNARY:
        yield Kernel("accelerate", op, "", since, None, _unary(single, double), {"T": FLOATS})
    for op, since, name in _BINARY:
        yield Kernel("accelerate", op, "", since, None, _binary(name), {"T": FLOAT32}, refuse=refuse_broadcasting)


kernels = KernelTable("accelerate", _kernels())


@kernels.register("Erf", (9, None), types={"T": FLOAT32})
def erf(node: NodeContext) -> Run:
    """The error function 2/√π ∫₀ˣ e^-t² dt. x: any shape -> same shape. Only where this macOS has `vverff`."""
    library, allocate = library_of(node), node.provider.allocate
    function = library.verff
    assert function is not None

    def run(x: Array) -> Array:
        require_types(node, FLOAT32, x)
        out: Array = allocate(x.shape, x.dtype)
        apply_unary(function, contiguous(x), out)
        return out

    return run


def refuse_power(node: NodeView) -> str | None:
    """The exponents must be one constant number, of the element type of x."""
    exponent = node.constant(1)
    if exponent is not None and exponent.size == 1 and exponent.ndim == 0 and node.dtype(1) == np.float32:
        return None
    return "its kernel takes one exponent that is a float32 constant"


@kernels.register("Pow", (7, 11), types={"T": FLOAT32}, refuse=refuse_power)
@kernels.register("Pow", (12, None), types={"T": FLOAT32, "T1": FLOAT32}, refuse=refuse_power)
def power(node: NodeContext) -> Run:
    """`x` to a constant power, which for 2 is a product. x: any shape -> same shape. Only where this macOS has `vvpowf`."""
    library, allocate = library_of(node), node.provider.allocate
    constant = node.constant(1)
    assert constant is not None
    exponent = constant.item()

    def run(x: Array, _: Array) -> Array:
        require_types(node, FLOAT32, x)
        out: Array = allocate(x.shape, x.dtype)
        x = contiguous(x)
        if exponent == 2:
            apply_binary(library.vmul, x, x, out)
        else:
            library.power(address(out), address(np.full(x.shape, exponent, np.float32)), address(x), x.size)
        return out

    return run
