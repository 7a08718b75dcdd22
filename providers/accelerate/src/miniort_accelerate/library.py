"""The functions of Accelerate that we call, with their C types. Nothing here knows of kernels or nodes.

Source of the signatures: Apple's headers `cblas.h`, `vDSP.h` and `vForce.h`. BLAS has 32-bit indices by default; from macOS 13.3 on there
are the same functions with 64-bit ones under names of their own (`ILP64` below).
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

ILP64 = "$NEWLAPACK$ILP64"
"""What the names of BLAS functions with 64-bit indices end with."""

_address = ctypes.c_void_p
_int = ctypes.c_int
_stride = ctypes.c_long  # vDSP_Stride
_length = ctypes.c_ulong  # vDSP_Length

Function: TypeAlias = Callable[..., None]

Unary: TypeAlias = Callable[[int, int, int], None]
"""(y, x, count): y[i] = function(x[i]) for two contiguous vectors."""

Binary: TypeAlias = Callable[[int, int, int, int, int, int, int], None]
"""(x, x stride, y, y stride, z, z stride, count): z[i] = x[i] ∘ y[i]; strides count elements."""


Reduction: TypeAlias = Callable[[int, int, int, int], None]
"""(x, x stride, result, count): one number of a vector."""


class Accelerate:
    """The functions of a loaded library. `handle` is a `ctypes.CDLL` of the framework, or what stands in for it in a test.

    wide_indices: bind BLAS with 64-bit indices. `vpowf` and `verff` are None where this macOS doesn't have them.
    """

    def __init__(self, handle: ctypes.CDLL, wide_indices: bool = False) -> None:
        """ProviderError if the library lacks a function."""
        self._handle = handle
        self._index = ctypes.c_long if wide_indices else _int
        self._suffix = ILP64 if wide_indices else ""
        self.largest_index = 2**63 - 1 if wide_indices else INT_MAX
        self.sgemm = self._gemm("cblas_sgemm", ctypes.c_float)
        self.dgemm = self._gemm("cblas_dgemm", ctypes.c_double)
        self.sgemv = self._gemv("cblas_sgemv", ctypes.c_float)
        self.dgemv = self._gemv("cblas_dgemv", ctypes.c_double)
        self.vadd: Binary = self._vdsp("vDSP_vadd")
        self.vmul: Binary = self._vdsp("vDSP_vmul")
        self.vsub: Binary = _swapped(self._vdsp("vDSP_vsub"))
        self.vdiv: Binary = _swapped(self._vdsp("vDSP_vdiv"))
        self.vma: Function = self._bind("vDSP_vma", *(_address, _stride) * 4, _length)
        self.vsadd: Function = self._bind("vDSP_vsadd", _address, _stride, _address, _address, _stride, _length)
        self.vsmul: Function = self._bind("vDSP_vsmul", _address, _stride, _address, _address, _stride, _length)
        self.sve: Reduction = self._bind("vDSP_sve", _address, _stride, _address, _length)
        self.svesq: Reduction = self._bind("vDSP_svesq", _address, _stride, _address, _length)
        self.maxv: Reduction = self._bind("vDSP_maxv", _address, _stride, _address, _length)
        self.meanv: Reduction = self._bind("vDSP_meanv", _address, _stride, _address, _length)
        self.mtrans: Function = self._bind("vDSP_mtrans", _address, _stride, _address, _stride, _length, _length)
        self.widen: Function = self._bind("vDSP_vspdp", _address, _stride, _address, _stride, _length)
        self.narrow: Function = self._bind("vDSP_vdpsp", _address, _stride, _address, _stride, _length)
        self.from_int32: Function = self._bind("vDSP_vflt32", _address, _stride, _address, _stride, _length)
        self.from_uint8: Function = self._bind("vDSP_vfltu8", _address, _stride, _address, _stride, _length)
        self.vpowf: Function | None = self._optional("vvpowf", _address, _address, _address, ctypes.POINTER(_int))
        self.verff: Unary | None = self._vforce("vverff") if self._has("vverff") else None
        self.vexpf, self.vexp = self._vforce("vvexpf"), self._vforce("vvexp")
        self.vlogf, self.vlog = self._vforce("vvlogf"), self._vforce("vvlog")
        self.vsqrtf, self.vsqrt = self._vforce("vvsqrtf"), self._vforce("vvsqrt")
        self.vtanhf, self.vtanh = self._vforce("vvtanhf"), self._vforce("vvtanh")
        self.vrecf, self.vrec = self._vforce("vvrecf"), self._vforce("vvrec")

    def _bind(self, name: str, *argument_types: Any) -> Function:
        try:
            function = getattr(self._handle, name)
        except AttributeError:
            raise ProviderError(
                f"the Accelerate library has no function {name}; macOS 10.15 or newer is needed, 13.3 for 64-bit indices"
            ) from None
        function.argtypes = argument_types
        function.restype = None
        bound: Function = function
        return bound

    def _has(self, name: str) -> bool:
        return hasattr(self._handle, name)

    def _optional(self, name: str, *argument_types: Any) -> Function | None:
        return self._bind(name, *argument_types) if self._has(name) else None

    def _gemm(self, name: str, real: Any) -> Function:
        """(order, transpose a, transpose b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc): C = alpha · A · B + beta · C."""
        index = self._index
        return self._bind(
            f"{name}{self._suffix}",
            _int, _int, _int, index, index, index, real, _address, index, _address, index, real, _address, index,
        )  # fmt: skip

    def _gemv(self, name: str, real: Any) -> Function:
        """(order, transpose, m, n, alpha, a, lda, x, x stride, beta, y, y stride): y = alpha · A · x + beta · y, A: [m, n] as it lies."""
        index = self._index
        return self._bind(
            f"{name}{self._suffix}", _int, _int, index, index, real, _address, index, _address, index, real, _address, index
        )  # fmt: skip

    def _vdsp(self, name: str) -> Function:
        return self._bind(name, _address, _stride, _address, _stride, _address, _stride, _length)

    def power(self, z: int, exponents: int, x: int, count: int) -> None:
        """z[i] = x[i] ** exponents[i], of contiguous float32 vectors. Only where `vpowf` isn't None."""
        assert self.vpowf is not None
        while count > 0:
            piece = min(count, INT_MAX)
            self.vpowf(z, exponents, x, ctypes.byref(_int(piece)))
            z, exponents, x, count = z + 4 * piece, exponents + 4 * piece, x + 4 * piece, count - piece

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


def load_accelerate(wide_indices: bool = False) -> Accelerate:
    """The framework. OSError if it can't be loaded, ProviderError if it lacks a function."""
    return Accelerate(ctypes.CDLL(PATH), wide_indices)
