"""Our CUDA C kernels, called with CuPy's arrays. Each checks whether it takes what it's given; where it doesn't, formulas do the same."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from math import prod, sqrt
from typing import Any, cast

import numpy as np

from miniort.kernels import NodeContext
from miniort_cuda.element_types import FLOAT16, FLOAT32

SOURCES = ("normalization", "softmax", "attention", "block_quantized", "rotary_embedding", "few_rows")
"""The files beside `reduction.cuh` and `half.cuh`, which each of them begins with."""

_READABLE = (FLOAT16, FLOAT32)
"""Element types of matrices, keys and values that `half.cuh` reads."""

THREADS = 128
MOST_DIM = 256
KEYS_OF_A_SPLIT = 256
MOST_SPLITS = 32
FEW_ROWS = 4
"""Rows up to which a kernel of ours reads a matrix again for each; a quantized one would else be dequantized into memory."""

FEW_BLOCKS = 256
"""Blocks below which a product is split along its sums as well, so that there's work for a whole device."""

ROWS_OF_A_SPLIT = 64


@cache
def source(name: str) -> str:
    """The CUDA C of a file, with what it begins with."""
    folder = files("miniort_cuda.cuda_c")
    return "".join((folder / file).read_text(encoding="utf-8") for file in ("reduction.cuh", "half.cuh", f"{name}.cu"))


class FusedKernels:
    """The kernels, compiled when they are first used. xp: a module that has `RawModule`, as `cupy` has."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._modules: dict[str, Any] = {}

    def _kernel(self, file: str, name: str) -> Any:
        return self._module(source(file), ("--std=c++14",)).get_function(name)

    def generated(self, code: str, name: str) -> Any:
        """The kernel of that name in CUDA C that was generated for a chain of ops, compiled once for all chains that are the same.

        A product and a sum aren't made one operation: each op rounds as it does alone.
        """
        return self._module(code, ("--std=c++14", "--fmad=false")).get_function(name)

    def _module(self, code: str, options: tuple[str, ...]) -> Any:
        if code not in self._modules:
            self._modules[code] = self._xp.RawModule(code=code, options=options)
        return self._modules[code]

    def normalized(self, x: Any, scale: Any, bias: Any, epsilon: float, centred: bool) -> Any | None:
        """LayerNormalization (`centred`) or RMSNormalization over the last axis. x: [..., N] -> same; None if it's not for this kernel."""
        size = x.shape[-1] if x.ndim else 0
        if not size or not x.size or not all(each is None or _is_plain(each) for each in (x, scale, bias)):
            return None
        if scale.shape != (size,) or (bias is not None and bias.shape != (size,)):
            return None
        y = self._xp.empty(x.shape, FLOAT32)
        grid = (prod(x.shape[:-1]),)
        if centred:
            arguments = (x, scale, _or_null(bias), y, np.int64(size), np.float32(epsilon))
            self._kernel("normalization", "layer_normalization")(grid, (THREADS,), arguments)
        else:
            self._kernel("normalization", "rms_normalization")(grid, (THREADS,), (x, scale, y, np.int64(size), np.float32(epsilon)))
        return y

    def softmax(self, x: Any, axis: int) -> Any | None:
        """Softmax over the last axis. x: [..., N] -> same; None if it's not for this kernel."""
        if not x.size or not _is_plain(x) or axis not in (-1, x.ndim - 1):
            return None
        y = self._xp.empty(x.shape, FLOAT32)
        self._kernel("softmax", "softmax")((prod(x.shape[:-1]),), (THREADS,), (x, y, np.int64(x.shape[-1])))
        return y

    def attention(self, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any | None:
        """softmax(scale · q · kᵀ + mask) · v of one query per head, its keys split over blocks.

        q: [batch, heads, 1, dim]; k, v: [batch, kv heads, T, dim], their rows contiguous; mask: bool or float, [.., .., 1, T], or None;
        all of float32, or all of float16, which is widened on the way -> [batch, heads, 1, dim of v]; None if it's not for this kernel
        """
        batch, heads, count, dim = q.shape
        kv_heads, length, value_dim = k.shape[1], k.shape[2], v.shape[3]
        if count != 1 or not length or max(dim, value_dim) > MOST_DIM or not q.size:
            return None
        if q.dtype not in _READABLE or any(each.dtype != q.dtype or each.strides[3] != each.itemsize for each in (k, v)):
            return None
        mask_steps = (0, 0)
        if mask is not None:
            broad = (1,) * (4 - mask.ndim) + mask.shape
            if mask.dtype not in (np.bool_, q.dtype) or not mask.flags.c_contiguous or broad[3] != length or broad[2] != 1:
                return None
            mask = mask if mask.dtype == np.bool_ else mask.astype(FLOAT32, copy=False)
            mask_steps = (broad[1] * length if broad[0] > 1 else 0, length if broad[1] > 1 else 0)
        dtype, q = q.dtype, self._xp.ascontiguousarray(q).astype(FLOAT32, copy=False)
        splits = min(max(-(-length // KEYS_OF_A_SPLIT), 1), MOST_SPLITS)
        partial = self._xp.empty((batch, heads, splits, value_dim + 2), FLOAT32)
        y = self._xp.empty((batch, heads, 1, value_dim), FLOAT32)
        steps = [np.int64(stride // each.itemsize) for each in (k, v) for stride in each.strides[:3]]
        is_bool = mask is not None and mask.dtype == np.bool_
        sizes = [np.int32(size) for size in (heads, kv_heads, length, dim, value_dim)]
        self._kernel("attention", "attention_splits")(
            (splits, heads, batch),
            (THREADS,),
            (
                *(q, k, v, _or_null(mask if is_bool else None), _or_null(None if is_bool else mask), partial),
                *sizes,
                *steps,
                *(np.int64(step) for step in mask_steps),
                np.float32(scale or sqrt(1 / dim)),
                np.int32(dtype == FLOAT16),
            ),
        )
        self._kernel("attention", "attention_joined")((batch * heads,), (THREADS,), (partial, y, np.int32(splits), np.int32(value_dim)))
        return y.astype(dtype, copy=False)

    def few_rows_product(self, a: Any, b: Any) -> Any | None:
        """`a` · `b` for a few rows. a: [..., K]; b: [K, N], its rows or its columns contiguous; float32, or float16 with sums in float32

        -> [..., N]; None if it's not for this kernel
        """
        if b.ndim != 2 or not a.ndim or not a.size or not b.size or a.dtype not in _READABLE or b.dtype != a.dtype:
            return None
        inner, columns = b.shape
        rows, (row_step, column_step) = a.size // inner, (stride // b.itemsize for stride in b.strides)
        if rows > FEW_ROWS or a.shape[-1] != inner:
            return None
        dtype, a = a.dtype, self._xp.ascontiguousarray(a).astype(FLOAT32, copy=False)
        is_half = np.int32(dtype == FLOAT16)
        y = self._xp.empty((*a.shape[:-1], columns), FLOAT32)
        if column_step == 1:
            blocks = -(-columns // 32)
            splits = max(min(-(-FEW_BLOCKS // blocks), inner // ROWS_OF_A_SPLIT), 1)
            partial = y if splits == 1 else self._xp.empty((splits, rows, columns), FLOAT32)
            sizes = [np.int32(size) for size in (inner, columns, rows)]
            arguments = (a, b, partial, *sizes, np.int64(row_step), is_half)
            self._kernel("few_rows", "rows_by_columns")((blocks, splits, rows), (THREADS,), arguments)
            if splits > 1:
                count = rows * columns
                arguments = (partial, y, np.int32(count), np.int32(splits))
                self._kernel("few_rows", "splits_joined")((-(-count // THREADS),), (THREADS,), arguments)
            return y.astype(dtype, copy=False)
        if row_step != 1:
            return None
        arguments = (a, b, y, np.int32(inner), np.int32(columns), np.int64(column_step), is_half)
        self._kernel("few_rows", "rows_by_contiguous_columns")((-(-columns // (THREADS // 32)), 1, rows), (THREADS,), arguments)
        return y.astype(dtype, copy=False)

    def block_quantized_product(self, a: Any, packed: Any, scales: Any, zero_points: Any, columns: int, bits: int) -> Any | None:
        """`a` · wᵀ for a few rows. a: [M, K]; packed: [N, blocks, bytes] -> [M, N]; None if it's not for this kernel."""
        if not 0 < a.shape[0] <= FEW_ROWS or not all(each.flags.c_contiguous for each in (a, packed, scales)):
            return None
        if a.dtype != FLOAT32 or scales.dtype != FLOAT32 or not packed.size:
            return None
        if zero_points is not None and (zero_points.dtype != np.uint8 or not zero_points.flags.c_contiguous):
            return None
        features, blocks, size = packed.shape
        y = self._xp.empty((a.shape[0], features), FLOAT32)
        sizes = (features, columns, blocks, size * 8 // bits, bits)
        self._kernel("block_quantized", "block_quantized_product")(
            (-(-features // (THREADS // 32)), a.shape[0]),
            (THREADS,),
            (a, packed, scales, _or_null(zero_points), y, *(np.int32(size) for size in sizes)),
        )
        return y

    def rotated(self, x: Any, cosines: Any, sines: Any, interleaved: bool) -> Any | None:
        """RotaryEmbedding. x: [batch, time, heads, size] -> same; cosines, sines: [batch, time, R/2]; None if it's not for this kernel."""
        batch, time, heads, size = x.shape
        if not x.size or not all(_is_plain(each) for each in (x, cosines, sines)) or cosines.shape[:2] != (batch, time):
            return None
        half = cosines.shape[2]
        y = self._xp.empty(x.shape, FLOAT32)
        work = batch * time * heads * (size - half)
        sizes = [np.int32(each) for each in (batch, time, heads, size, half)]
        steps = [np.int64(each) for each in (time * heads * size, heads * size, size)]
        arguments = (x, cosines, sines, y, *sizes, *steps, np.int32(interleaved))
        self._kernel("rotary_embedding", "rotary_embedding")((-(-work // THREADS),), (THREADS,), arguments)
        return y


def _is_plain(x: Any) -> bool:
    return bool(x.dtype == FLOAT32 and x.flags.c_contiguous)


def _or_null(array: Any) -> Any:
    """An array as a kernel's argument, the null pointer for None."""
    return np.uint64(0) if array is None else array


def fused_kernels(node: NodeContext) -> FusedKernels | None:
    """The kernels of a node's provider, None where there is no compiler for them."""
    return cast("FusedKernels | None", getattr(node.provider, "fused", None))
