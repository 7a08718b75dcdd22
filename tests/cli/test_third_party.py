"""Packages that miniort has never heard of, installed into an environment of their own and used by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from miniort.generation.sampling import LogitsProcessor, Sampler, TokenHistory
from miniort.testing import LogitsProcessorConformance, SamplerConformance, cache_layout_machine

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "tests" / "data" / "plugins"
EXAMPLE = PLUGINS / "miniort-example"
MEMBERS = ("core", "cli", "providers/*", "plugins/*")
WORKSPACE = [path.parent for member in MEMBERS for path in sorted(ROOT.glob(f"{member}/pyproject.toml"))]
PROMPT = ["generate", "In the beginning", "--max-new-tokens", "12", "--json"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`installed(*arguments)` is `miniort` in a fresh environment with wheels of the workspace and of both example packages.

    The libraries that miniort stands on are borrowed from the environment that the tests run in, so that nothing is downloaded but what
    builds the wheels, and that uv has in its cache once it has built the workspace.
    """
    folder = tmp_path_factory.mktemp("third-party") / "environment"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    python = Path(paths["scripts"]) / ("python.exe" if os.name == "nt" else "python")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(paths["purelib"]) / "borrowed.pth").write_text("\n".join(sorted(borrowed)))
    _install(python, [*WORKSPACE, EXAMPLE, PLUGINS / "miniort-broken"])

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("MINIORT_")}

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(paths["scripts"]) / "miniort"), *arguments]
        result = subprocess.run(
            command, capture_output=True, encoding="utf-8", env={**environment, **variables}, cwd=folder, timeout=120, check=False
        )
        assert "Traceback" not in result.stderr, result.stderr
        return result

    return run


def _install(python: Path, projects: list[Path]) -> None:
    """Build wheels of the projects and install them, and nothing that they depend on."""
    uv = os.environ.get("UV") or shutil.which("uv")
    sources = [str(project) for project in projects]
    if uv is None:
        commands = [[sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", *sources]]
    else:
        # --reinstall, because uv's cache can't tell that a source file has changed; first --offline, for where no index can be reached
        install = [uv, "pip", "install", "--no-config", "--python", str(python), "--no-deps", "--reinstall", *sources]
        commands = [[*install, "--offline"], install]
    for command in commands:
        result = subprocess.run(command, capture_output=True, text=True, cwd=python.parent, check=False)
        if result.returncode == 0:
            return
    raise AssertionError(result.stderr)


def as_json(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_third_partys_provider_sampler_and_layout_are_used_by_name(installed: Run) -> None:
    found = as_json(
        installed(*PROMPT, "--top-k-print", "2", "--providers", "example,cpu", "--sampler", "second_best", "--cache", "example_list")
    )
    assert found["providers"] == ["example", "cpu"]
    assert found["tokens"] == [candidates[1]["id"] for candidates in found["top_k"]]
    statistics = found["statistics"]
    assert statistics["cache_bytes"] == statistics["cache_bytes_by_formula"] > 0


def test_a_third_partys_command_shows_that_its_kernels_run(installed: Run) -> None:
    model = ROOT / "plugins" / "models" / "src" / "miniort_models" / "demo" / "decode.onnx"
    result = installed("count-nodes", str(model), "--providers", "example,cpu")
    counts = {tuple(line.split()[:2]): int(line.split()[2]) for line in result.stdout.splitlines()}
    assert counts["example", "MatMul"] > 0
    assert ("cpu", "MatMul") not in counts
    assert {op for provider, op in counts if provider == "example"} == {"Add", "MatMul"}


def test_a_broken_package_is_reported_and_changes_nothing_else(installed: Run, generate_json: Callable[..., dict[str, Any]]) -> None:
    plugins = {each["name"]: each for each in as_json(installed("plugins", "--json"))["plugins"]}
    broken = plugins.pop("broken")
    assert (broken["status"], broken["reason"]) == ("failed", "RuntimeError: this plugin is broken on purpose")
    assert (broken["distribution"], broken["version"]) == ("miniort-broken", "0.0.1")
    assert broken["offers"] == {}
    assert {each["status"] for each in plugins.values()} == {"loaded"}
    assert {"accelerate", "cache_layouts", "cpu", "cuda", "example", "models", "samplers"} <= plugins.keys()
    assert (plugins["example"]["distribution"], plugins["example"]["version"]) == ("miniort-example", "0.3.0")
    assert plugins["example"]["offers"] == {
        "providers": ["example"],
        "logits processors": ["bias"],
        "samplers": ["second_best"],
        "cache layouts": ["example_list"],
        "commands": ["count-nodes"],
    }

    result = installed(*PROMPT)
    found, wanted = as_json(result), generate_json(*PROMPT[1:-1])
    assert result.stderr == ""
    assert (found["tokens"], found["text"], found["finish_reason"]) == (wanted["tokens"], wanted["text"], wanted["finish_reason"])
    assert installed("--help").stdout.startswith("Usage: miniort")


def load_example(module: str) -> ModuleType:
    """A module of the example package, which isn't installed where the tests run."""
    specification = spec_from_file_location(f"example_{module}", EXAMPLE / "src" / "miniort_example" / f"{module}.py")
    assert specification is not None
    assert specification.loader is not None
    loaded = module_from_spec(specification)
    specification.loader.exec_module(loaded)
    return loaded


TestListCacheConforms = cache_layout_machine(load_example("list_cache").ListCache).TestCase


class TestSecondBestConforms(SamplerConformance):
    def create(self) -> Sampler:
        return load_example("second_best").second_best()


class TestBiasConforms(LogitsProcessorConformance):
    def create(self) -> LogitsProcessor:
        return load_example("bias").bias([0], amount=-3.0)


def test_bias_is_added() -> None:
    logits = np.zeros((2, 4), np.float32)
    history = TokenHistory(np.zeros((2, 1), np.int64), np.ones((2, 1), np.int64), prompt_length=1)
    biased = load_example("bias").bias([1, 3], amount=2.5)(history, logits)
    assert biased.tolist() == [[0, 2.5, 0, 2.5]] * 2
