"""The provider `example`: two kernels for float32, on the host."""

from __future__ import annotations

import numpy as np

from miniort.host_provider import HostProvider
from miniort.kernels import KernelTable, NodeContext, Run, TypeKey
from miniort.providers import ProviderOptions
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


class ExampleProvider(HostProvider):
    """Its arrays are NumPy's, so values go from it to other host providers as they are. ProviderError if an option is given."""

    def __init__(self, options: ProviderOptions) -> None:
        options.reject_unknown("example")
        super().__init__(kernels)
