"""`miniort models`: what is here, also what is broken, and how it goes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from miniort import create_plugin_manager
from miniort.generation import find_source

Miniort = Callable[..., Result]

NAME = "tiny/gpt2"


@pytest.fixture
def files(data: Path) -> dict[str, bytes]:
    folder = data / "fixtures" / "gpt2_optimum"
    return {
        "config.json": (folder / "config.json").read_bytes(),
        "tokenizer.json": (data / "tokenizer" / "tokenizer.json").read_bytes(),
        "onnx/model.onnx": (folder / "model.onnx").read_bytes(),
    }


@pytest.fixture
def listed(miniort: Miniort) -> Callable[[], dict[str, dict[str, Any]]]:
    """What `miniort models --json` lists, by name."""

    def list_models() -> dict[str, dict[str, Any]]:
        result = miniort("models", "--json")
        assert (result.exit_code, result.stderr) == (0, "")
        return {model["name"]: model for model in json.loads(result.stdout)["models"]}

    return list_models


def contents(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_the_demo_model_is_always_there(hub: Any, miniort: Miniort, listed: Callable[[], dict[str, Any]]) -> None:
    assert list(listed()) == ["demo"]
    assert listed()["demo"]["trouble"] is None
    header, row = miniort("models").stdout.splitlines()
    assert header.split()[:4] == ["model", "size", "dtype", "revision"]
    assert row.startswith("demo ")


def test_a_pulled_model(hub: Any, files: dict[str, bytes], miniort: Miniort, listed: Callable[[], dict[str, Any]]) -> None:
    commit = hub.add(NAME, files).revisions["main"].commit
    miniort("pull", NAME)
    model = listed()[NAME]
    assert model["size"] == sum(map(len, files.values()))
    assert (model["revision"], model["commit"], model["trouble"]) == ("main", commit, None)
    assert model["origin"] == f"{hub.endpoint}, onnx/model.onnx"
    assert model["when"].startswith("20")
    row = miniort("models").stdout.splitlines()[2]
    assert row.split()[:5] == [NAME, "1.0", "MB", "main", commit[:7]]


def test_half_a_model(hub: Any, files: dict[str, bytes], miniort: Miniort, listed: Callable[[], dict[str, Any]]) -> None:
    hub.add(NAME, files)
    hub.status["onnx/model.onnx"] = 500
    assert miniort("pull", NAME).exit_code == 2
    trouble = "not all here: 22.1 kB of 1.0 MB; `miniort pull tiny/gpt2` goes on"
    assert listed()[NAME]["trouble"] == trouble
    assert trouble in miniort("models").stdout
    assert "was pulled only in part" in miniort("generate", "x", "--model", NAME).stderr


def test_a_model_whose_files_have_gone(
    hub: Any, files: dict[str, bytes], miniort: Miniort, listed: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    hub.add(NAME, files)
    miniort("pull", NAME)
    for blob in (tmp_path / "hf-home").rglob("blobs/*"):
        blob.unlink()
    assert "config.json, tokenizer.json, onnx/model.onnx has gone from" in listed()[NAME]["trouble"]
    result = miniort("generate", "x", "--model", NAME)
    assert result.exit_code == 2
    assert "`miniort pull tiny/gpt2` gets it again" in result.stderr
    assert miniort("pull", NAME).exit_code == 0
    assert listed()[NAME]["trouble"] is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"name": "tiny/gpt2"}', '{"files": [1], "graphs": []}', "[" * 100_000, "\udcff"],
    ids=["empty", "cut", "a list", "too little", "wrong", "deep", "no text"],
)
def test_a_damaged_note(
    hub: Any, miniort: Miniort, listed: Callable[[], dict[str, Any]], tmp_path: Path, content: str, files: dict[str, bytes]
) -> None:
    folder = tmp_path / "miniort-cache" / "hub" / "tiny--gpt2"
    folder.mkdir(parents=True)
    (folder / "pulled.json").write_bytes(content.encode(errors="surrogateescape"))
    assert "`miniort models --remove tiny/gpt2` clears it away" in listed()[NAME]["trouble"]
    result = miniort("generate", "x", "--model", NAME)
    assert result.exit_code == 2
    assert "`miniort models --remove tiny/gpt2` clears it away" in result.stderr
    assert miniort("models", "--remove", NAME, "--yes").exit_code == 0
    assert list(listed()) == ["demo"]


def test_a_new_pull_makes_a_damaged_note_good(hub: Any, files: dict[str, bytes], miniort: Miniort, listed: Any, tmp_path: Path) -> None:
    hub.add(NAME, files)
    miniort("pull", NAME)
    (tmp_path / "miniort-cache" / "hub" / "tiny--gpt2" / "pulled.json").write_text("{")
    assert miniort("pull", NAME).exit_code == 0
    assert listed()[NAME]["trouble"] is None


def test_other_things_in_the_cache(hub: Any, listed: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    for name in ("tiny--gpt2", "something else", ".hidden"):
        (tmp_path / "miniort-cache" / "hub" / name).mkdir(parents=True)
    (tmp_path / "miniort-cache" / "hub" / "a--file").write_text("")
    assert "clears it away" in listed().pop(NAME)["trouble"]
    assert list(listed()) == ["demo", NAME]


@pytest.fixture
def weights(data: Path, tmp_path: Path) -> Path:
    """A folder with safetensors, which is converted when it's first opened."""
    return shutil.copytree(data / "huggingface_gpt2", tmp_path / "weights")


def test_what_was_converted_when_it_was_opened(
    hub: Any, miniort: Miniort, listed: Callable[[], dict[str, Any]], weights: Path, tmp_path: Path
) -> None:
    find_source(str(weights), create_plugin_manager())
    model = listed()[str(weights)]
    assert model["origin"] == "converted when it was first opened"
    assert model["size"] > 500_000
    assert model["trouble"] is None
    shutil.rmtree(weights)
    assert f"{weights} has gone; `miniort models --remove {weights}`" in listed()[str(weights)]["trouble"]
    assert miniort("models", "--remove", str(weights), "--yes").exit_code == 0
    assert list(listed()) == ["demo"]
    assert contents(tmp_path / "miniort-cache") == []


def test_models_in_installed_packages(
    hub: Any, miniort: Miniort, listed: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "tiny_models-3.0.dist-info").mkdir(parents=True)
    (site / "tiny_models-3.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-models\nVersion: 3.0\n")
    names = ["tiny_models/__init__.py", "tiny_models/one.gguf", "tiny_models/two.GGUF"]
    (site / "tiny_models-3.0.dist-info" / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    (site / "tiny_models").mkdir()
    for name in names:
        (site / name).write_bytes(b"raise RuntimeError")
    monkeypatch.syspath_prepend(str(site))
    model = listed()["pkg:tiny-models"]
    assert (model["origin"], model["size"]) == ("installed with tiny-models 3.0", 36)
    assert "several models; name one of pkg:tiny-models/one.gguf, pkg:tiny-models/two.GGUF" in model["trouble"]
    result = miniort("models", "--remove", "pkg:tiny-models", "--yes")
    assert result.exit_code == 2
    assert "pip uninstall tiny-models deletes it" in result.stderr


# ------------------------------------------------------------------------------------------------------ --remove


@pytest.mark.parametrize("half", [False, True], ids=["whole", "half"])
def test_removing_frees_the_disk(
    hub: Any, files: dict[str, bytes], miniort: Miniort, listed: Callable[[], dict[str, Any]], tmp_path: Path, half: bool
) -> None:
    hub.add(NAME, files)
    if half:
        hub.status["onnx/model.onnx"] = 500
    miniort("pull", NAME)
    before = sum(path.lstat().st_size for path in contents(tmp_path))
    result = miniort("models", "--remove", NAME, "--yes", "--json")
    assert result.exit_code == 0
    freed = json.loads(result.stdout)["freed"]
    assert freed > 20_000
    assert contents(tmp_path) == []
    assert freed <= before
    assert list(listed()) == ["demo"]


def test_removing_asks(hub: Any, files: dict[str, bytes], miniort: Miniort, listed: Callable[[], dict[str, Any]]) -> None:
    hub.add(NAME, files)
    miniort("pull", NAME)
    result = miniort("models", "--remove", NAME, stdin="n\n")
    assert result.exit_code != 0
    assert f"Delete tiny/gpt2 (1.0 MB, from {hub.endpoint}, onnx/model.onnx)?" in result.stderr
    assert NAME in listed()
    assert "deleted tiny/gpt2: 1.0 MB are free again" in miniort("models", "--remove", NAME, stdin="y\n").stdout
    assert NAME not in listed()


def test_what_others_fetched_stays(hub: Any, files: dict[str, bytes], miniort: Miniort) -> None:
    from huggingface_hub import hf_hub_download

    hub.add(NAME, files)
    graph = Path(hf_hub_download(NAME, "onnx/model.onnx"))
    miniort("pull", NAME)
    assert miniort("models", "--remove", NAME, "--yes").exit_code == 0
    assert graph.read_bytes() == files["onnx/model.onnx"]
    assert not (graph.parents[1] / "config.json").exists()


def test_what_another_revision_needs_stays(hub: Any, files: dict[str, bytes], miniort: Miniort) -> None:
    from huggingface_hub import constants, scan_cache_dir, snapshot_download

    hub.add(NAME, files)
    miniort("pull", NAME)
    hub.add(NAME, {**files, "config.json": b"{}"}, revision="v2")
    other = Path(snapshot_download(NAME, revision="v2"))
    assert miniort("models", "--remove", NAME, "--yes").exit_code == 0
    assert (other / "onnx" / "model.onnx").read_bytes() == files["onnx/model.onnx"]
    scanned = scan_cache_dir(constants.HF_HUB_CACHE)
    assert scanned.warnings == []
    assert [revision.refs for repository in scanned.repos for revision in repository.revisions] == [frozenset({"v2"})]


def test_yes_to_nothing(miniort: Miniort) -> None:
    result = miniort("models", "--yes")
    assert result.exit_code == 2
    assert "--yes is of use only with --remove" in result.stderr


@pytest.mark.parametrize(
    ("name", "part"),
    [("demo", "demo comes with miniort-models"), ("a/b", "no model 'a/b' here to delete"), ("../x", "no model '../x' here to delete")],
)
def test_what_cannot_be_removed(hub: Any, miniort: Miniort, name: str, part: str) -> None:
    result = miniort("models", "--remove", name, "--yes")
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert part in line
