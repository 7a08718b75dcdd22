"""The provider `example`: two kernels for float32, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run, TypeKey
from miniort.providers import HOST, MemoryStats, ProviderOptions
from miniort.types import Array, DType

FLOAT: dict[TypeKey, list[DType]] = {"T": [np.dtype(np.float32)]}

kernels = KernelTable("example")


@kernels.register("Add", versions=(7, None), types=FLOAT)
def add(node: NodeContext) -> Run:
    """left + right, with broadcasting: float32 [...], float32 [...] -> float32 [...]."""

    def run(left: Array, right: Array) -> Array:
        return left + right

    return run


@kernels.register("MatMul", versions=(1, None), types=FLOAT)
def matmul(node: NodeContext) -> Run:
    """Matrix product, with broadcasting: float32 [..., m, k], float32 [..., k, n] -> float32 [..., m, n]."""

    def run(left: Array, right: Array) -> Array:
        return left @ right

    return run


class ExampleProvider:
    """Its arrays are NumPy's, so values go from it to other host providers as they are. ProviderError if an option is given."""

    device = HOST
    kernels = kernels

    def __init__(self, options: ProviderOptions) -> None:
        options.reject_unknown("example")

    def allocate(self, shape: Sequence[int], dtype: DType) -> Array:
        """A new array with undefined contents."""
        return np.empty(shape, dtype)

    def upload(self, array: Array) -> Array:
        """The array itself."""
        return array

    def download(self, array: Array) -> Array:
        """The array itself."""
        return array

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def memory(self) -> MemoryStats:
        """Nothing is counted: NumPy owns the memory."""
        return MemoryStats(active=0, reserved=0, peak=0)

    def close(self) -> None:
        """Nothing to give back."""
