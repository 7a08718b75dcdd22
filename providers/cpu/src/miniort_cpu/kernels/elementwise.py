"""Arithmetic element by element: one value of each input gives one of the output, with NumPy's broadcasting (opset 7 and later)."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.pool import SMALLEST
from miniort.types import Array
from miniort_cpu.floating_point import FLOAT64, as_dtype, compute_dtype
from miniort_cpu.integers import is_integer, truncated_quotient
from miniort_cpu.ufuncs import Ufunc, binary, by_kind, unary, variadic

kernels = KernelTable("cpu")

UNARY: dict[str, tuple[int, Ufunc]] = {
    "Neg": (6, np.negative),
    "Abs": (6, np.absolute),
    "Sign": (9, np.sign),
    "Floor": (6, np.floor),
    "Ceil": (6, np.ceil),
    "Sqrt": (6, np.sqrt),
    "Exp": (6, np.exp),
    "Log": (6, np.log),
    "Reciprocal": (6, np.reciprocal),
    "Sin": (7, np.sin),
    "Cos": (7, np.cos),
}
"""Op -> the first version covered, and the ufunc that is the op. ml_dtypes has these for bfloat16, rounded once from float32."""

for op, (since, ufunc) in UNARY.items():
    kernels.register(op, versions=(since, None))(unary(ufunc))

kernels.register("Add", versions=(7, None), written_over=(0, 1))(binary(np.add))
kernels.register("Sub", versions=(7, None), written_over=(0, 1))(binary(np.subtract))
kernels.register("Mul", versions=(7, None), written_over=(0, 1))(binary(np.multiply))


kernels.register("Div", versions=(7, None), written_over=(0, 1))(by_kind(integer=binary(truncated_quotient), floating=binary(np.divide)))


@kernels.register("Mod", versions=(10, None))
def mod(node: NodeContext) -> Run:
    """Remainder of the divisor's sign (fmod 0, as Python's %), or of the dividend's (fmod 1, as C's fmod). a, b broadcast."""
    return binary(np.fmod if node.attribute("fmod", 0) else np.remainder)(node)


def _maximum_then_minimum(x: Array, low: Array | None, high: Array | None, out: Any) -> Array:
    """min(high, max(x, low)): where low > high, that is high."""
    y = x if low is None else np.maximum(x, low, out=out)
    return y if high is None else np.minimum(y, high, out=out if y is x else y)


@kernels.register("Clip", versions=(11, None), view_of=0)
def clip(node: NodeContext) -> Run:
    """min(high, max(x, low)), either bound absent for none. x: [...]; low, high: [] -> same shape as x."""
    allocate = node.provider.allocate

    def run(x: Array, low: Array | None = None, high: Array | None = None) -> Array:
        if low is None and high is None:
            return x
        return _maximum_then_minimum(x, low, high, ... if x.nbytes < SMALLEST else allocate(x.shape, x.dtype))

    return run


@kernels.register("Clip", versions=(6, 10))
def clip_attributes(node: NodeContext) -> Run:
    """Clip with its bounds in attributes; without them, the bounds of float32. x: [...] -> same shape."""
    allocate = node.provider.allocate
    limit = float(np.finfo(np.float32).max)
    low, high = node.attribute("min", -limit), node.attribute("max", limit)

    def run(x: Array) -> Array:
        bounds = np.array([low, high]).astype(x.dtype)
        return _maximum_then_minimum(x, bounds[0], bounds[1], allocate(x.shape, x.dtype))

    return run


kernels.register("Min", versions=(1, None), view_of=0)(variadic(np.minimum))
kernels.register("Max", versions=(1, None), view_of=0)(variadic(np.maximum))


def _total(node: NodeContext, xs: tuple[Array, ...]) -> Array:
    """Sum of two or more floats tensors, of any shapes that broadcast, in the type to compute in."""
    shape = np.broadcast_shapes(*(x.shape for x in xs))
    total = node.provider.allocate(shape, compute_dtype(xs[0].dtype))
    np.copyto(total, xs[0])
    for x in xs[1:]:
        np.add(total, x, out=total)
    return total  # type: ignore[no-any-return]


@kernels.register("Sum", versions=(1, None), view_of=0)
def sum_inputs(node: NodeContext) -> Run:
    """Sum of all inputs, floats of any shapes that broadcast."""

    def run(*xs: Array) -> Array:
        return xs[0] if len(xs) == 1 else as_dtype(_total(node, xs), xs[0].dtype)

    return run


@kernels.register("Mean", versions=(1, None), view_of=0)
def mean_inputs(node: NodeContext) -> Run:
    """Mean of all inputs, floats of any shapes that broadcast."""

    def run(*xs: Array) -> Array:
        if len(xs) == 1:
            return xs[0]
        total = _total(node, xs)
        return as_dtype(np.divide(total, total.dtype.type(len(xs)), out=total), xs[0].dtype)

    return run


POWERS: dict[float, Ufunc] = {2.0: np.square, 0.5: np.sqrt, -1.0: np.reciprocal}
"""Exponents that have a ufunc of their own."""


def _cube(x: Array, out: Any) -> Array:
    square = np.multiply(x, x, out=out)
    return np.multiply(square, x, out=square)  # type: ignore[no-any-return]


@kernels.register("Pow", versions=(7, None))
def power(node: NodeContext) -> Run:
    """`x` ** y, of x's type whatever y's is. x, y: any two shapes that broadcast."""
    exponent, dtype = node.constant(1), node.dtype(0)
    if exponent is not None and exponent.size == 1 and dtype is not None and not is_integer(dtype):
        special = _cube if float(exponent.ravel()[0]) == 3.0 else POWERS.get(float(exponent.ravel()[0]))
        if special is not None:
            return _power_of_constant(node, special, exponent.ndim)
    same_type = binary(np.power)(node)

    def run(x: Array, y: Array) -> Array:
        if x.dtype.kind in "iu":
            return _integer_power(x, y)
        return same_type(x, as_dtype(y, x.dtype))  # type: ignore[no-any-return]

    return run


def _power_of_constant(node: NodeContext, ufunc: Ufunc, exponent_rank: int) -> Run:
    compute = unary(ufunc)(node)

    def run(x: Array, _: Array) -> Array:
        y: Array = compute(x)
        return y if x.ndim >= exponent_rank else y.reshape((1,) * (exponent_rank - x.ndim) + y.shape)

    return run


def _integer_power(x: Array, y: Array) -> Array:
    """Integers to any power: exact and wrapping where no exponent is negative, else through float64, rounded toward zero."""
    if is_integer(y.dtype) and not (y < 0).any():
        return np.power(x, as_dtype(y, x.dtype), out=...)
    return np.power(x.astype(FLOAT64), y.astype(FLOAT64), out=...).astype(x.dtype)
