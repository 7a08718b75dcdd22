"""BatchNormalization of whole channels in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort_numba.kernels import FLOAT32, crew_of

KERNELS = KernelTable("numba")


def _refuse_training(node: NodeView) -> str | None:
    if node.attribute("training_mode", 0) or any(output is not None for output in node.outputs[1:]):
        return "it doesn't train"
    if not node.attribute("spatial", 1):
        return "it normalizes whole channels only"
    return None


@KERNELS.register("BatchNormalization", versions=(7, None), types={"T": [FLOAT32]}, refuse=_refuse_training)
def batch_normalization(node: NodeContext) -> Run:
    """(x - mean) / √(variance + epsilon) · scale + bias per channel (Ioffe and Szegedy 2015, arXiv:1502.03167).

    x: [N, C, *sizes] or [N], of one channel; scale, bias, mean, variance: [C] -> as x
    """
    from miniort_numba.compiled.channels import SCALE, scale_channels

    board, helpers = crew_of(node)
    allocate, epsilon = node.provider.allocate, node.attribute("epsilon", 1e-5)
    constants = [node.constant(index) for index in range(1, 5)]
    known = [each for each in constants if each is not None]
    with np.errstate(all="ignore"):
        fixed = _line(known, epsilon) if len(known) == 4 else None

    def run(x: Array, *statistics: Array) -> Array:
        factors, terms = fixed or _line(statistics, epsilon)
        y: Array = allocate(x.shape, FLOAT32)
        channels = x.shape[1] if x.ndim > 1 else 1
        if factors.shape != (channels,):
            raise ValueError(f"the statistics of {channels} channels have to be of shape ({channels},), but they are of {factors.shape}")
        if x.size:
            rows = x.shape[0] * channels
            scale_channels(board, helpers, SCALE, np.ascontiguousarray(x).reshape(rows, -1), factors, terms, y.reshape(rows, -1))
        return y

    return run


def _line(statistics: Sequence[Array], epsilon: float) -> tuple[Array, Array]:
    """The factor and the term that the normalization comes to. statistics: scale, bias, mean and variance, [C] -> [C] each."""
    scale, bias, mean, variance = (each.astype(np.float64) for each in statistics)
    factor = scale / np.sqrt(variance + epsilon)
    return factor.astype(FLOAT32), (bias - mean * factor).astype(FLOAT32)
