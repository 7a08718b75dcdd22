"""What tests of several distributions share."""

from __future__ import annotations

from pathlib import Path

import pytest

from miniort.plugins import PluginManager, create_plugin_manager


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of test data."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def plugins() -> PluginManager:
    """Every installed plugin. Tests that change a manager make their own."""
    return create_plugin_manager()
