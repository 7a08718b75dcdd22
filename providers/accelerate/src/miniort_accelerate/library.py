"""The functions of Accelerate that we call, with their C types. Nothing here knows of kernels or nodes.

Source of the signatures: Apple's headers `cblas.h`, `vDSP.h` and `vForce.h`, with 32-bit BLAS indices (the default, not ILP64).
All take addresses; whoever calls keeps the arrays alive, and has checked their types, strides and sizes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

from miniort.errors import ProviderError

PATH = "/System/Library/Frameworks/Accelerate.framework/Accelerate"

ROW_MAJOR = 101  # CBLAS_ORDER
NO_TRANSPOSE = 111  # CBLAS_TRANSPOSE
TRANSPOSE = 112

INT_MAX = 2**31 - 1
"""The largest size or stride that the default BLAS, and the largest count that vForce, can be told."""

_address = ctypes.c_void_p
_int = ctypes.c_int
_stride = ctypes.c_long  # vDSP_Stride
_length = ctypes.c_ulong  # vDSP_Length

Function: TypeAlias = Callable[..., None]

Unary: TypeAlias = Callable[[int, int, int], None]
"""(y, x, count): y[i] = function(x[i]) for two contiguous vectors."""

Binary: TypeAlias = Callable[[int, int, int, int, int, int, int], None]
"""(x, x stride, y, y stride, z, z stride, count): z[i] = x[i] ∘ y[i]; strides count elements."""


class Accelerate:
    """The functions of a loaded library. `handle` is a `ctypes.CDLL` of the framework, or what stands in for it in a test."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        """ProviderError if the library lacks a function."""
        self._handle = handle
        self.sgemm = self._gemm("cblas_sgemm", ctypes.c_float)
        self.dgemm = self._gemm("cblas_dgemm", ctypes.c_double)
        self.vadd: Binary = self._vdsp("vDSP_vadd")
        self.vmul: Binary = self._vdsp("vDSP_vmul")
        self.vsub: Binary = _swapped(self._vdsp("vDSP_vsub"))
        self.vdiv: Binary = _swapped(self._vdsp("vDSP_vdiv"))
        self.vexpf, self.vexp = self._vforce("vvexpf"), self._vforce("vvexp")
        self.vlogf, self.vlog = self._vforce("vvlogf"), self._vforce("vvlog")
        self.vsqrtf, self.vsqrt = self._vforce("vvsqrtf"), self._vforce("vvsqrt")
        self.vtanhf, self.vtanh = self._vforce("vvtanhf"), self._vforce("vvtanh")
        self.vrecf, self.vrec = self._vforce("vvrecf"), self._vforce("vvrec")

    def _bind(self, name: str, *argument_types: Any) -> Function:
        try:
            function = getattr(self._handle, name)
        except AttributeError:
            raise ProviderError(f"the Accelerate library has no function {name}; macOS 10.15 or newer is needed") from None
        function.argtypes = argument_types
        function.restype = None
        bound: Function = function
        return bound

    def _gemm(self, name: str, real: Any) -> Function:
        """(order, transpose a, transpose b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc): C = alpha · A · B + beta · C."""
        return self._bind(
            name, _int, _int, _int, _int, _int, _int, real, _address, _int, _address, _int, real, _address, _int
        )  # fmt: skip

    def _vdsp(self, name: str) -> Function:
        return self._bind(name, _address, _stride, _address, _stride, _address, _stride, _length)

    def _vforce(self, name: str) -> Unary:
        """The count is an int that is given by its address; longer vectors are handed over in pieces of that many."""
        function = self._bind(name, _address, _address, ctypes.POINTER(_int))
        itemsize = 4 if name.endswith("f") else 8

        def call(y: int, x: int, count: int) -> None:
            while count > 0:
                piece = min(count, INT_MAX)
                function(y, x, ctypes.byref(_int(piece)))
                y, x, count = y + piece * itemsize, x + piece * itemsize, count - piece

        return call


def _swapped(function: Function) -> Binary:
    """vDSP_vsub and vDSP_vdiv take what is subtracted, or divided by, first: vDSP_vsub(B, A, C) is C = A - B."""

    def call(x: int, x_stride: int, y: int, y_stride: int, z: int, z_stride: int, count: int) -> None:
        function(y, y_stride, x, x_stride, z, z_stride, count)

    return call


def load_accelerate() -> Accelerate:
    """The framework. OSError if it can't be loaded, ProviderError if it lacks a function."""
    return Accelerate(ctypes.CDLL(PATH))
