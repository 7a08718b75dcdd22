"""How matrices are multiplied: by cuBLAS, but not in a run that is recorded, for CuPy doesn't call it while a stream is captured."""

from __future__ import annotations

from typing import Any

from miniort.errors import ProviderError
from miniort.kernels import NodeContext, Run
from miniort.types import format_shape
from miniort_cuda.fused import FEW_ROWS, FusedKernels, fused_kernels
from miniort_cuda.namespace import array_namespace


def product_of(node: NodeContext) -> Run:
    """What multiplies a node's matrices. a: [..., M, K], b: [..., K, N] -> [..., M, N], as NumPy's `matmul`."""
    xp, fused, provider = array_namespace(node), fused_kernels(node), node.provider

    def product(a: Any, b: Any) -> Any:
        return recordable_product(fused, a, b) if getattr(provider, "is_recording", False) else xp.matmul(a, b)

    return product


def recordable_product(fused: FusedKernels | None, a: Any, b: Any) -> Any:
    """The product without cuBLAS. ProviderError where there is no kernel for it."""
    if a.ndim > 1 and b.ndim > 1 and a.shape[-1] == 1:
        return a * b  # [..., M, 1] · [..., 1, N]: an outer product
    y = None if fused is None else fused.few_rows_product(a, b)
    if y is None:
        raise ProviderError(
            f"a product of {a.dtype} {format_shape(a.shape)} and {b.dtype} {format_shape(b.shape)} can't be recorded: CuPy doesn't call "
            f"cuBLAS while it records, and our own kernel multiplies up to {FEW_ROWS} rows by a matrix of float32 or float16"
        )
    return y
