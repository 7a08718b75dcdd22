"""The exponential of a float32 in a form that compiles to vector instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
"""The logarithm of 2 as a sum: the first part times a whole number has no rounding."""

LEAST, _MOST, _OVERFLOW = np.float32(-87.33654), np.float32(88.02969), np.float32(88.72283)
HALF, ONE = np.float32(0.5), np.float32(1)
_INFINITY = np.float32(np.inf)
_TWO, _SATURATED = np.float32(2), np.float32(10)
"""From 9.01 on tanh is 1 in float32."""

POLYNOMIAL = tuple(
    np.float32(each) for each in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
"""(exp(r) - 1 - r) / r² for |r| up to half of ln 2, the highest power first."""

_P0, _P1, _P2, _P3, _P4, _P5 = POLYNOMIAL


@intrinsic
def power_of_2(typingctx: Any, exponent: Any) -> Any:
    """2 to a whole number from -126 to 127, both as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = ir.IntType(32)
        biased = builder.add(builder.fptosi(arguments[0], bits), ir.Constant(bits, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(bits, 23)), ir.FloatType())

    return types.float32(types.float32), generate


@intrinsic
def whole_below(typingctx: Any, x: Any) -> Any:
    """The largest whole number not above x, by LLVM's own instruction: NumPy's is a call, and a loop with a call uses no vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.floor.f32"), arguments)

    return types.float32(types.float32), generate


@njit(nogil=True, error_model="numpy", inline="always")
def exponential(x: np.float32) -> np.float32:
    """exp(x) within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN.

    x = n · ln 2 + r, then a polynomial in r (Cephes, expf) times 2 to the n.
    """
    z = x if x > LEAST else LEAST
    z = z if z < _MOST else _MOST
    n = whole_below(z * LOG2_E + HALF)
    r = z - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    y = (p * r * r + r + ONE) * power_of_2(n)
    y = np.float32(0) if x < LEAST else y
    y = _INFINITY if x > _OVERFLOW else y
    return y if x == x else x


@njit(nogil=True, error_model="numpy", inline="always")
def hyperbolic_tangent(x: np.float32) -> np.float32:
    """tanh(x) within 4 units in the last place; NaN for NaN.

    It's e / (e + 2) with e = exp(2x) - 1, which is 2^n · (exp(r) - 1) + (2^n - 1): without a difference of numbers that are nearly alike.
    """
    z = x if x > -_SATURATED else -_SATURATED
    z = z if z < _SATURATED else _SATURATED
    z = z + z
    n = whole_below(z * LOG2_E + HALF)
    r = z - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    power = power_of_2(n)
    e = (p * r * r + r) * power + (power - ONE)
    y = e / (e + _TWO)
    return y if x == x else x
