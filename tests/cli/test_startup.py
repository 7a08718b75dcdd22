"""What the command imports before it does anything: `miniort --help` is to answer in under 0.4 s, whatever is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LIBRARIES = {"numpy", "ml_dtypes", "onnx", "onnx_ir", "tokenizers", "rich", "pluggy"}

RUN = """
import json, sys
from miniort_cli.main import main
try:
    main()
except SystemExit as exit:
    assert not exit.code, exit.code
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def imported_modules(*arguments: str, site: Path | None = None) -> set[str]:
    environment = {**os.environ, **({} if site is None else {"PYTHONPATH": str(site)})}
    result = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, env=environment, check=True)
    return set(json.loads(result.stderr.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"], ["verify", "--help"], ["version"]])
def test_no_library_and_no_plugin_is_imported(arguments: list[str]) -> None:
    modules = imported_modules(*arguments)
    assert "click" in modules
    assert not {module.partition(".")[0] for module in modules} & LIBRARIES
    own = {module for module in modules if module.startswith("miniort")}
    assert {module.partition(".")[0] for module in own} == {"miniort", "miniort_cli"}
    light = {"miniort.default_layout", "miniort.errors", "miniort.late_sympy", "miniort.lazy"}
    assert {module for module in own if module.startswith("miniort.")} <= light


def test_a_slow_plugin_does_not_slow_the_help(install_plugin: Callable[[str, str], Path]) -> None:
    site = install_plugin("slow", "import time\ntime.sleep(2)\n")
    assert "plugin_slow" not in imported_modules("--help", site=site)
    assert "plugin_slow" in imported_modules("plugins", site=site)


def test_listing_plugins_needs_no_graph(install_plugin: Callable[[str, str], Path]) -> None:
    modules = imported_modules("plugins")
    assert not {"onnx", "onnx_ir", "tokenizers"} & modules
