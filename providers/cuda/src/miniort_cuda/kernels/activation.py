"""Activation functions that are ops of their own."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort_cuda.element_types import FLOATS
from miniort_cuda.namespace import array_namespace, special_functions

kernels = KernelTable("cuda")


@kernels.register("Gelu", (20, None), types={"T": FLOATS})
def gelu(node: NodeContext) -> Run:
    """Gaussian error linear unit x · Φ(x) (Hendrycks and Gimpel, 2016), Φ by the error function, or by tanh if `approximate` says so."""
    xp, special = array_namespace(node), special_functions(node)

    def exact(x: Any) -> Any:
        return 0.5 * x * (1 + special.erf(x * (1 / sqrt(2))).astype(x.dtype, copy=False))

    def by_tanh(x: Any) -> Any:
        return 0.5 * x * (1 + xp.tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)))

    ways = {"none": exact, "tanh": by_tanh}
    approximate = node.attribute("approximate", "none")
    if approximate not in ways:
        raise KernelError(f"node {node.name!r} (Gelu): approximate must be 'none' or 'tanh', found {approximate!r}")
    return ways[approximate]
