"""Optionals: the value itself, or None where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run

kernels = KernelTable("cpu")


@kernels.register("Optional", versions=(15, None), view_of=0)
def optional(node: NodeContext) -> Run:
    """The input, None if it's absent."""
    return lambda x=None: x


@kernels.register("OptionalHasElement", versions=(15, None))
def optional_has_element(node: NodeContext) -> Run:
    """Whether there is a value -> [] bool."""
    return lambda x=None: np.array(x is not None)


@kernels.register("OptionalGetElement", versions=(15, None), view_of=0)
def optional_get_element(node: NodeContext) -> Run:
    """The value of an optional; of anything else that itself. ValueError where there is none."""

    def run(x: Any) -> Any:
        if x is None:
            raise ValueError("OptionalGetElement needs a value, and the optional has none; ask OptionalHasElement first")
        return x

    return run
