"""Logic on the bits of integers: BitwiseAnd, BitwiseOr, BitwiseXor, BitwiseNot, BitShift."""

from __future__ import annotations

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort_cpu.ufuncs import binary, unary

kernels = KernelTable("cpu")

kernels.register("BitwiseAnd", versions=(18, None))(binary(np.bitwise_and))
kernels.register("BitwiseOr", versions=(18, None))(binary(np.bitwise_or))
kernels.register("BitwiseXor", versions=(18, None))(binary(np.bitwise_xor))
kernels.register("BitwiseNot", versions=(18, None))(unary(np.invert))

SHIFTS = {"LEFT": binary(np.left_shift), "RIGHT": binary(np.right_shift)}
"""NumPy defines what C doesn't, as ONNX does: where the amount is negative or too large, only copies of the sign, or zeros, are left."""


@kernels.register("BitShift", versions=(11, None))
def bit_shift(node: NodeContext) -> Run:
    """`a` shifted by b bits; to the right, the sign fills up. a, b: integers, any two shapes that broadcast -> their common shape."""
    direction = node.attribute("direction")
    if direction not in SHIFTS:
        raise KernelError(f"node {node.name!r} (BitShift): its direction must be LEFT or RIGHT, found {direction!r}")
    return SHIFTS[direction](node)
