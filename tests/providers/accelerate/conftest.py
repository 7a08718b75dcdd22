"""Fixtures for the Accelerate provider's tests: a stand-in for Apple's library, compiled from the C file beside this one."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniort.kernels import NodeContext
from miniort.types import ValueInfo
from miniort_accelerate.library import Accelerate
from miniort_accelerate.provider import AccelerateProvider

SOURCE = Path(__file__).with_name("stand_in.c")


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The compiled stand-in."""
    library = tmp_path_factory.mktemp("accelerate") / "stand_in.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SOURCE, "-lm"], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="session")
def accelerate(stand_in: ctypes.CDLL) -> Accelerate:
    return Accelerate(stand_in)


@pytest.fixture
def provider(accelerate: Accelerate) -> AccelerateProvider:
    return AccelerateProvider(accelerate)


@pytest.fixture
def run_node(provider: AccelerateProvider) -> Callable[..., np.ndarray]:
    """Runs one node: `run_node(op, *inputs, **attributes)` -> output."""

    def run(op: str, *inputs: np.ndarray | None, **attributes: Any) -> np.ndarray:
        (kernel,) = provider.kernels.find("", op)
        node = NodeContext(
            op=op,
            domain="",
            version=kernel.since,
            name=f"the_{op}",
            inputs=tuple(None if array is None else ValueInfo("x", array.dtype, array.shape) for array in inputs),
            outputs=(ValueInfo("y"),),
            attributes=attributes,
            provider=provider,
        )
        assert kernel.refuse is None or kernel.refuse(node) is None
        result: np.ndarray = kernel.compile(node)(*inputs)
        return result

    return run
