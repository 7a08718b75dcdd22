"""Arrays as Accelerate takes them: an address, element types that it knows, and memory that it can walk."""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np

from miniort.errors import InputError
from miniort.kernels import NodeContext
from miniort.types import Array, DType, type_string
from miniort_accelerate.library import Accelerate

FLOAT32: frozenset[DType] = frozenset({np.dtype(np.float32)})
FLOATS: frozenset[DType] = FLOAT32 | {np.dtype(np.float64)}


class _HasLibrary(Protocol):
    @property
    def library(self) -> Accelerate: ...


def library_of(node: NodeContext) -> Accelerate:
    """The library that the node's provider was opened with."""
    return cast(_HasLibrary, node.provider).library


def require_types(node: NodeContext, allowed: frozenset[DType], *arrays: Array) -> None:
    """InputError unless all are of one allowed type. A type that wasn't known when the node was assigned is only seen now, and the
    library reads whatever it's pointed at.
    """
    first = arrays[0].dtype
    if first not in allowed or any(array.dtype != first for array in arrays):
        wanted = " or ".join(sorted(type_string(dtype) for dtype in allowed))
        found = ", ".join(type_string(array.dtype) for array in arrays)
        raise InputError(f"node {node.name!r} ({node.op}) takes {wanted}, found {found}; leave it to the provider 'cpu'")


def address(array: Array) -> int:
    """Where its first element lies. The caller holds the array until the library returns."""
    first: int = array.__array_interface__["data"][0]
    return first


def contiguous(array: Array) -> Array:
    """The array if it's C-contiguous and aligned, else a copy that is; vForce and vDSP walk one vector."""
    return np.require(array, requirements=["C", "A"])
