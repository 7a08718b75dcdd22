"""`miniort plugins`, `miniort providers`, `miniort version`: what is there, and why something isn't."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import miniort as miniort_package

Miniort = Callable[..., Result]
InstallPlugin = Callable[[str, str], Path]

RICH_PLUGIN = """
from miniort.graph.passes import GraphPass, Level
from miniort.kernels import Kernel
from miniort.plugins import hookimpl
from miniort.providers import Availability, ProviderInfo

def broken_check():
    raise OSError("the driver is gone")

@hookimpl
def miniort_providers():
    return [ProviderInfo("weak", 1, check=broken_check, open=None, summary="a weak one")]

@hookimpl
def miniort_kernels(provider):
    return [Kernel(provider, "Celu", "", 12, None, compile=None)] if provider == "cpu" else []

@hookimpl
def miniort_graph_passes():
    return [GraphPass("nothing", Level.BASIC, lambda model, context: None)]

@hookimpl
def miniort_observers(session):
    return []

@hookimpl
def miniort_samplers():
    raise ValueError("no samplers today")
"""


def plugins_by_name(miniort: Miniort) -> dict[str, dict[str, Any]]:
    result = miniort("plugins", "--json")
    assert result.exit_code == 0
    return {each["name"]: each for each in json.loads(result.stdout)["plugins"]}


def test_plugins_says_what_each_offers(miniort: Miniort) -> None:
    found = plugins_by_name(miniort)
    assert found["cpu"]["offers"] == {"providers": ["cpu"]}
    assert (found["cpu"]["distribution"], found["cpu"]["version"], found["cpu"]["status"]) == ("miniort-cpu", "0.1.0", "loaded")
    assert "greedy" in found["samplers"]["offers"]["samplers"]
    assert "concat_bhtd" in found["cache_layouts"]["offers"]["cache layouts"]
    assert "demo" in found["models"]["offers"]["model formats"]


def test_plugins_says_what_failed_and_why(miniort: Miniort, install_plugin: InstallPlugin) -> None:
    install_plugin("rich", RICH_PLUGIN)
    install_plugin("broken", "raise RuntimeError('broken on purpose')")
    found = plugins_by_name(miniort)
    assert found["rich"]["offers"] == {
        "providers": ["weak"],
        "graph passes": ["nothing"],
        "kernels for cpu": ["Celu"],
        "miniort_observers": [],
    }
    assert found["rich"]["failures"] == {"miniort_samplers": "ValueError: no samplers today"}
    assert (found["broken"]["status"], found["broken"]["reason"]) == ("failed", "RuntimeError: broken on purpose")
    assert (found["broken"]["distribution"], found["broken"]["version"]) == ("miniort-broken", "7.0")

    result = miniort("plugins")
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "miniort-broken 7.0" in lines["broken"]
    assert lines["broken"].endswith("failed  RuntimeError: broken on purpose")
    assert "kernels for cpu: Celu; miniort_observers; miniort_samplers failed: ValueError: no samplers today" in lines["rich"]


def test_plugins_says_what_is_disabled(miniort: Miniort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIORT_DISABLE_PLUGINS", "cpu")
    found = plugins_by_name(miniort)
    assert found["cpu"]["status"] == "disabled"
    assert "MINIORT_DISABLE_PLUGINS" in found["cpu"]["reason"]
    assert found["cpu"]["offers"] == {}


def test_providers(miniort: Miniort, install_plugin: InstallPlugin) -> None:
    install_plugin("rich", RICH_PLUGIN)
    install_plugin("broken", "raise RuntimeError('broken on purpose')")
    report = json.loads(miniort("providers", "--json").stdout)
    found = {each["name"]: each for each in report["providers"]}
    assert found["cpu"]["available"] is True
    assert found["cpu"]["priority"] == 100
    assert found["weak"]["available"] is False
    assert "the driver is gone" in found["weak"]["reason"]
    priorities = [each["priority"] for each in report["providers"]]
    assert priorities == sorted(priorities, reverse=True)
    assert report["failures"]["broken"] == "RuntimeError: broken on purpose"

    result = miniort("providers")
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines()}
    assert lines["cpu"][1:3] == ["100", "yes"]
    assert lines["weak"][1:3] == ["1", "no"]
    assert "plugin broken failed: RuntimeError: broken on purpose" in result.stderr


def test_version(miniort: Miniort) -> None:
    report = json.loads(miniort("version", "--json").stdout)
    assert report["miniort"] == miniort_package.__version__
    assert report["distributions"]["miniort-core"] == version("miniort-core")
    assert report["distributions"]["miniort-cli"] == version("miniort-cli")
    assert (report["onnx"], report["numpy"]) == (version("onnx"), version("numpy"))
    assert report["python"] == platform.python_version()
    lines = miniort("version").stdout.splitlines()
    assert lines[0] == f"miniort {miniort_package.__version__}"
    assert f"numpy {version('numpy')}" in lines
    assert miniort("--version").stdout == f"miniort {miniort_package.__version__}\n"


def test_help_tells_of_plugins(miniort: Miniort) -> None:
    assert miniort("--help").stdout.rstrip().endswith("Plugins may add commands; `miniort plugins` lists them.")
