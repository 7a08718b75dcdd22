"""What tests of several distributions share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tests run in several processes, and each would otherwise have as many BLAS threads as there are cores. Read when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from miniort.plugins import PluginManager, create_plugin_manager


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of test data."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def plugins() -> PluginManager:
    """Every installed plugin. Tests that change a manager make their own."""
    return create_plugin_manager()
