"""Turning time around, for rows of different lengths: ReverseSequence."""

from __future__ import annotations

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array

kernels = KernelTable("cpu")


@kernels.register("ReverseSequence", versions=(10, None))
def reverse_sequence(node: NodeContext) -> Run:
    """The first lengths[b] steps of row b backwards, the others as they are.

    x: [time, batch, ...], or [batch, time, ...] if `batch_axis` is 0 and `time_axis` 1; lengths: [batch] int64 -> same shape
    """
    time_axis, batch_axis = node.attribute("time_axis", 0), node.attribute("batch_axis", 1)
    if {time_axis, batch_axis} != {0, 1}:
        raise KernelError(
            f"node {node.name!r} (ReverseSequence): its time_axis and batch_axis must be 0 and 1, found {time_axis} and {batch_axis}"
        )

    def run(x: Array, lengths: Array) -> Array:
        steps = np.arange(x.shape[time_axis])[:, None]
        backwards = np.where(steps < lengths, lengths - 1 - steps, steps)  # [time, batch]
        rows = np.arange(x.shape[batch_axis])
        return x[backwards, rows] if time_axis == 0 else x[rows[:, None], backwards.T]

    return run
