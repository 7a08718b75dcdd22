"""Running the command in this process, and plugins and models made for a test."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from miniort_cli.main import cli
from miniort_models import __file__ as models_package

DEMO = Path(models_package).parent / "demo"


@pytest.fixture
def miniort() -> Callable[..., Result]:
    """`miniort(*arguments)` as a shell would run it. What isn't an exit is raised: in the command it's a bug."""

    def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(cli, arguments, input=stdin, prog_name="miniort")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def generate_json(miniort: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """The object that `miniort generate ... --json` prints, which must be all that's on standard output."""

    def run(*arguments: str, **options: Any) -> dict[str, Any]:
        result = miniort("generate", "--json", *arguments, **options)
        assert result.exit_code == 0, result.stderr
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return run


@pytest.fixture
def demo_copy(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the demo model's folder, with some keys of its `config.json` changed."""

    def copy(**changes: Any) -> Path:
        folder = tmp_path / "demo-copy"
        shutil.copytree(DEMO, folder)
        config = folder / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
        return folder

    return copy


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """`install_plugin(name, source)` makes an installed distribution with one module and one entry point. Returns the folder it's in."""
    site = tmp_path / "site"
    modules: list[str] = []

    def install(name: str, source: str) -> Path:
        module = f"plugin_{name}"
        information = site / f"miniort_{name}-7.0.dist-info"
        information.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: miniort-{name}\nVersion: 7.0\n")
        (information / "entry_points.txt").write_text(f"[miniort]\n{name} = {module}\n")
        monkeypatch.syspath_prepend(str(site))
        modules.append(module)
        return site

    yield install
    for module in modules:
        sys.modules.pop(module, None)
