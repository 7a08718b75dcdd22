"""Activation functions, and the error function that one of them rests on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import inf, pi, sqrt
from typing import Any, TypeAlias

import numpy as np

from miniort.kernels import CompileKernel, KernelTable, NodeContext, Run
from miniort.tape import call
from miniort.types import Array
from miniort_cpu.floating_point import FLOAT32, FLOAT64, NARROW_FLOATS, as_dtype
from miniort_cpu.threads import threads_of
from miniort_cpu.ufuncs import unary

kernels = KernelTable("cpu")

BLOCK = 16 * 1024
"""Elements that a function of several passes takes at a time, so that all its passes but the first find them in the cache."""

SMALLEST_RANGE = 128 * 1024
"""Elements that are worth waking a thread for."""

Formula: TypeAlias = Callable[[Array, Array], None]
"""f(x, y) writes its result into y. x, y: [N], N at most BLOCK, float32 or float64; x may not be written."""


def blockwise(formula: Callable[[NodeContext], Formula]) -> CompileKernel:
    """A kernel for a function of one value that is written as several passes over an array. x: [...] float -> same shape, dtype.

    Types narrower than float32 are computed in float32 and rounded once; integers in float64.
    """

    @wraps(formula)
    def compile_blockwise(node: NodeContext) -> Run:
        compute = formula(node)
        allocate, threads = node.provider.allocate, threads_of(node.provider)
        dies = 0 in node.dying_inputs

        def run(x: Array) -> Array:
            dtype = x.dtype
            over = dies and x.size > BLOCK and x.flags.c_contiguous and x.flags.writeable  # then x's memory takes the result
            if dtype != FLOAT32 and dtype != FLOAT64:
                x = x.astype(FLOAT32 if dtype in NARROW_FLOATS else FLOAT64)
            y = x if over else allocate(x.shape, x.dtype)
            if x.size <= BLOCK:
                call(compute, x, y, writes=(y,))
            else:
                if not x.flags.c_contiguous:  # part of a Split, say: a copy into y costs no more memory
                    np.copyto(y, x)
                    x, over = y, True
                flat_x, flat_y = x.reshape(-1), y.reshape(-1)

                def part(first: int, last: int) -> None:
                    for start in range(first, last, BLOCK):
                        block = slice(start, min(start + BLOCK, last))
                        compute(flat_x[block].copy() if over else flat_x[block], flat_y[block])

                threads.split(x.size, SMALLEST_RANGE, part)
            return as_dtype(y, dtype)

        return run

    return compile_blockwise


def _relu(x: Array, out: Any) -> Array:
    if x.dtype == FLOAT32 or x.dtype == FLOAT64:
        return x.clip(0, inf, out=out)  # four times as fast as a comparison with one number
    return np.maximum(x, x.dtype.type(0), out=out)  # type: ignore[no-any-return]


kernels.register("Relu", versions=(6, None))(unary(_relu))
kernels.register("Tanh", versions=(6, None))(unary(np.tanh))


def sigmoid(x: Array, y: Array) -> None:
    """1 / (1 + exp(-x))."""
    np.multiply(x, -1, out=y)  # np.negative from one strided array to another is wrong in NumPy 2.4 for some strides
    np.exp(y, out=y)
    np.add(y, 1, out=y)
    np.reciprocal(y, out=y)


@kernels.register("Sigmoid", versions=(6, None))
@blockwise
def sigmoid_op(node: NodeContext) -> Formula:
    """1 / (1 + exp(-x)) (Sigmoid)."""
    return sigmoid


@kernels.register("Swish", versions=(24, None), written_over=(0,))
@blockwise
def swish(node: NodeContext) -> Formula:
    """`x` · sigmoid(alpha · x) = x / (1 + exp(-alpha · x)) (Swish; with alpha 1 it's also called SiLU)."""
    alpha = node.attribute("alpha", 1.0)

    def compute(x: Array, y: Array) -> None:
        np.multiply(x, -alpha, out=y)
        np.exp(y, out=y)
        np.add(y, 1, out=y)
        np.divide(x, y, out=y)

    return compute


@kernels.register("HardSwish", versions=(14, None))
@blockwise
def hard_swish(node: NodeContext) -> Formula:
    """`x` · max(0, min(1, x/6 + 1/2)) (HardSwish)."""

    def compute(x: Array, y: Array) -> None:
        np.multiply(x, 1 / 6, out=y)
        np.add(y, 0.5, out=y)
        np.maximum(y, 0, out=y)
        np.minimum(y, 1, out=y)
        np.multiply(x, y, out=y)

    return compute


@kernels.register("Gelu", versions=(20, None), written_over=(0,))
@blockwise
def gelu(node: NodeContext) -> Formula:
    """`x` · Φ(x), Φ the normal distribution (Hendrycks and Gimpel 2016, arXiv:1606.08415); approximate "tanh" is their equation 2."""
    if node.attribute("approximate", "none") == "tanh":
        return gelu_tanh

    def compute(x: Array, y: Array) -> None:
        erf(np.multiply(x, sqrt(0.5)), y)
        np.add(y, 1, out=y)
        np.multiply(y, x, out=y)
        np.multiply(y, 0.5, out=y)

    return compute


def gelu_tanh(x: Array, y: Array) -> None:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))."""
    np.multiply(x, x, out=y)
    np.multiply(y, 0.044715 * sqrt(2 / pi), out=y)
    np.add(y, sqrt(2 / pi), out=y)
    np.multiply(y, x, out=y)
    np.tanh(y, out=y)
    np.add(y, 1, out=y)
    np.multiply(y, x, out=y)
    np.multiply(y, 0.5, out=y)


@kernels.register("Erf", versions=(9, None))
@blockwise
def erf_op(node: NodeContext) -> Formula:
    """2/√π · ∫₀ˣ exp(-t²) dt (Erf)."""
    return erf


def erf(x: Array, y: Array) -> None:
    """The error function. x, y: the same shape, float32 or float64. Errors: below 4e-7 in float32, 4e-16 in float64, relative."""
    if x.dtype == FLOAT32:
        _erf_single(x, y)
    else:
        _erf_double(x, y)


# erf(x)/x is near P(x²)/Q(x²) for |x| ≤ 4, where erf becomes 1 in float32: an iterated least-squares fit to 40 digits, 2.6e-8 off at most.
_SINGLE_P = (1.1283791065, 0.19322758913, 0.053057938814, 3.8694003597e-3, 2.8419983648e-4, 1.9884412268e-6)
_SINGLE_Q = (1.0, 0.504576087, 0.11521717906, 0.015179147013, 1.1821051594e-3, 3.7418405555e-5)

# Chebyshev interpolants in powers of their scaled variable, computed with 40 digits; both are exact to float64's last place.
# erf(x)/x in u = (x² - 2)/2 for |x| ≤ 2:
_NEAR = (
    *(0.674933236039655, -0.2611118609312454, 0.11947913860985186, -0.04866277744915503, 0.017128344571816667),
    *(-0.0052348758361588765, 0.0014050914236518719, -0.0003351435335239757, 7.1801008439299e-05, -1.3946273745397808e-05),
    *(2.475802047377872e-06, -4.045094610710336e-07, 6.119568107896591e-08, -8.617701405603135e-09, 1.1348209944033648e-09),
    *(-1.4013468256449332e-10, 1.6333492632134225e-11, -1.892293166904461e-12, 1.9677349461986228e-13),
)
# x · exp(x²) · (1 - erf(x)) in v = 6/x - 2 for 2 ≤ x ≤ 6, where erf becomes 1 in float64:
_FAR = (
    *(0.5370034535441699, -0.02382655673980729, -0.0032048013171038447, 0.00090592689852599, -7.918369000748392e-05),
    *(-1.2430256581458006e-05, 5.915637459721023e-06, -1.017269648326905e-06, 1.123988435951922e-08, 4.793588496067791e-08),
    *(-1.5839419473041883e-08, 2.542738230373935e-09, 7.098089876568261e-11, -1.9419537188322138e-10, 6.742373802608665e-11),
    *(-8.026070348896283e-12, -1.266954529157733e-12),
)


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    """c₀ + c₁x + c₂x² + … by Horner's rule, in a new array."""
    y = np.multiply(x, coefficients[-1], out=...)
    for coefficient in coefficients[-2:0:-1]:
        np.add(y, coefficient, out=y)
        np.multiply(y, x, out=y)
    return np.add(y, coefficients[0], out=y)


def _erf_single(x: Array, y: Array) -> None:
    near = np.minimum(np.maximum(x, -4, out=y), 4, out=...)
    square = np.multiply(near, near, out=y)
    ratio = _polynomial(_SINGLE_P, square)
    np.divide(ratio, _polynomial(_SINGLE_Q, square), out=ratio)
    np.multiply(near, ratio, out=y)
    np.maximum(y, -1, out=y)
    np.minimum(y, 1, out=y)


def _erf_double(x: Array, y: Array) -> None:
    square = np.minimum(np.multiply(x, x, out=...), 4, out=...)
    np.multiply(x, _polynomial(_NEAR, (square - 2) / 2), out=y)
    size = np.absolute(x, out=...)
    size = np.minimum(np.maximum(size, 2, out=size), 6, out=size)
    far = 1 - np.exp(-size * size) / size * _polynomial(_FAR, 6 / size - 2)
    np.copyto(y, np.copysign(far, x), where=np.abs(x) > 2)
