"""The wheels: pure Python, and enough by themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {
    "miniort",
    "miniort_core",
    "miniort_cpu",
    "miniort_cuda",
    "miniort_accelerate",
    "miniort_numba",
    "miniort_samplers",
    "miniort_cache_layouts",
    "miniort_models",
    "miniort_cli",
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("uv") is None, reason="uv builds the wheels, and it isn't installed")]


def run(*command: str | Path, cwd: Path | None = None) -> str:
    # A plain environment: what the test runner put on the path must not help.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "MINIORT"))}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run("uv", "build", "--all-packages", "--wheel", "--out-dir", folder, cwd=ROOT)
    return folder


def test_all_wheels_are_pure_python(wheels: Path) -> None:
    names = {path.name for path in wheels.glob("*.whl")}
    assert names == {f"{name}-0.1.0-py3-none-any.whl" for name in DISTRIBUTIONS}
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            files = wheel.namelist()
        assert any(name.endswith("licenses/LICENSE") for name in files), f"{path.name} has no licence"
        if not path.name.startswith("miniort-"):
            assert any(name.endswith("py.typed") for name in files), f"{path.name} isn't marked as typed"


def test_a_fresh_environment_generates(wheels: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    scripts = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    run(scripts / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--find-links", wheels, "miniort")
    result = json.loads(run(scripts / "miniort", "generate", "In the beginning", "--max-new-tokens", "20", "--json", cwd=tmp_path))
    assert len(result["tokens"]) == 20
    assert result["text"].strip()
    freeze = run(scripts / "python", "-m", "pip", "freeze")
    assert "onnxruntime" not in freeze
    assert "torch" not in freeze
