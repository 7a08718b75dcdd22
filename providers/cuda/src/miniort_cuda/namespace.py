"""Where a kernel finds the functions that it computes with: in its node's provider, never in an import."""

from __future__ import annotations

from typing import Any, Protocol, cast

from miniort.kernels import NodeContext

CONTRIB = "com.microsoft"
"""The domain of onnxruntime's own ops."""


class ArrayModules(Protocol):
    """What this package's kernels need of their provider."""

    @property
    def xp(self) -> Any:
        """The array namespace: `cupy`, or another module with NumPy's names."""

    @property
    def special(self) -> Any:
        """SciPy's special functions for arrays of `xp`: `cupyx.scipy.special`."""


def array_namespace(node: NodeContext) -> Any:
    """The namespace whose arrays the node is given."""
    return cast(ArrayModules, node.provider).xp


def special_functions(node: NodeContext) -> Any:
    """The special functions for the node's arrays."""
    return cast(ArrayModules, node.provider).special
