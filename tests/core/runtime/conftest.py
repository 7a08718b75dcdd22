"""Fixtures for the runtime's tests: sessions from text, and the device that isn't the host."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from onnx import parser

from miniort import InferenceSession, SessionOptions, create_plugin_manager
from miniort.plugins import PluginManager

HEADER = '<ir_version: 10, opset_import: ["": 18, "test": 1, "com.microsoft": 1]>'


@pytest.fixture(scope="session")
def opaque() -> ModuleType:
    """The module beside this file. Test modules can't import each other by name."""
    spec = importlib.util.spec_from_file_location("miniort_test_opaque_device", Path(__file__).with_name("opaque_device.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plugins_with(*plugins: object) -> PluginManager:
    """The CPU provider, and these."""
    manager = create_plugin_manager(allow=["cpu"], deny=[])
    for index, plugin in enumerate(plugins):
        manager.register(plugin, name=f"test_{index}")
    return manager


@pytest.fixture
def with_plugins() -> Callable[..., PluginManager]:
    return plugins_with


@pytest.fixture
def build() -> Callable[..., InferenceSession]:
    """A session from a graph as text; `level` and `strict` are its options, `add` are plugins beside the CPU provider."""

    def build(text: str, *, level: str = "all", strict: bool = False, add: tuple[object, ...] = (), **options: Any) -> InferenceSession:
        options.setdefault("plugins", plugins_with(*add))
        return InferenceSession(parser.parse_model(HEADER + text), SessionOptions(level, strict), **options)

    return build
