"""Activations in float32, in one pass over memory: Relu, LeakyRelu, Sigmoid, HardSigmoid and HardSwish."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_numba.kernels import FLOAT32, crew_of

KERNELS = KernelTable("numba")


def _activation(node: NodeContext, *parameters: float) -> Run:
    from miniort_numba.compiled.activations import ACTIVATE, KINDS, activate

    board, helpers = crew_of(node)
    allocate, over, kind = node.provider.allocate, 0 in node.dying_inputs, KINDS[node.op]
    numbers = np.array([*parameters, 0, 0][:2], np.float32)

    def run(x: Array) -> Array:
        y: Array = x if over and x.flags.c_contiguous and x.flags.writeable else allocate(x.shape, FLOAT32)
        activate(board, helpers, ACTIVATE, kind, np.ascontiguousarray(x).reshape(-1), numbers, y.reshape(-1))
        return y

    return run


@KERNELS.register("Relu", versions=(6, None), types={"T": [FLOAT32]}, written_over=(0,))
@KERNELS.register("Sigmoid", versions=(6, None), types={"T": [FLOAT32]}, written_over=(0,))
@KERNELS.register("HardSwish", versions=(14, None), types={"T": [FLOAT32]}, written_over=(0,))
def activation(node: NodeContext) -> Run:
    """An activation without parameters, see `miniort_numba.compiled.activations`. x: any shape -> the same."""
    return _activation(node)


@KERNELS.register("LeakyRelu", versions=(6, None), types={"T": [FLOAT32]}, written_over=(0,))
def leaky_relu(node: NodeContext) -> Run:
    """x where it isn't negative, else alpha · x. x: any shape -> the same."""
    return _activation(node, node.attribute("alpha", 0.01))


@KERNELS.register("HardSigmoid", versions=(6, None), types={"T": [FLOAT32]}, written_over=(0,))
def hard_sigmoid(node: NodeContext) -> Run:
    """max(0, min(1, alpha · x + beta)). x: any shape -> the same."""
    return _activation(node, node.attribute("alpha", 0.2), node.attribute("beta", 0.5))
