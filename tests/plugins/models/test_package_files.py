"""`pkg:NAME`: the model in an installed package, whose code is never run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from miniort.errors import ModelError
from miniort.generation.sources import ModelFormat
from miniort.plugins import create_plugin_manager, find_named
from miniort_models.package_files import find_package_model

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(package, *files)` installs a distribution with a package that must not be imported, and empty files in it."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def make(package: str, *files: str, distribution: str | None = None) -> Path:
        folder = site / package
        for name in ("__init__.py", *files):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("raise RuntimeError('imported')" if name == "__init__.py" else "")
        if distribution is not None:
            information = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
            information.mkdir()
            (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
            (information / "RECORD").write_text("".join(f"{package}/{name},,\n" for name in ("__init__.py", *files)))
        return folder

    return make


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["model.gguf", "other.txt"], "model.gguf"),
        (["data/model.ONNX"], "data/model.ONNX"),
        (["data/prefill.onnx", "data/decode.onnx", "data/tokenizer.json"], "data"),
        (["hf/config.json", "hf/model.safetensors"], "hf"),
        (["__pycache__/old.gguf", ".hidden/old.gguf", "model.gguf"], "model.gguf"),
    ],
)
def test_what_is_found(install: Install, files: list[str], found: str) -> None:
    folder = install("package_with_a_model", *files)
    assert find_package_model("pkg:package_with_a_model") == folder / found
    assert "package_with_a_model" not in sys.modules


def test_a_distribution_may_be_named(install: Install) -> None:
    folder = install("inner_name", "model.gguf", distribution="outer-name")
    assert find_package_model("pkg:outer-name") == folder / "model.gguf"
    assert find_package_model("pkg:inner-name") == folder / "model.gguf"


def test_one_of_several_is_named_by_its_path(install: Install) -> None:
    folder = install("several_models", "small.gguf", "large/model.gguf", "graphs/prefill.onnx", "graphs/decode.onnx")
    with pytest.raises(ModelError) as caught:
        find_package_model("pkg:several_models")
    for name in ("pkg:several_models/small.gguf", "pkg:several_models/large/model.gguf", "pkg:several_models/graphs"):
        assert name in str(caught.value)
        assert find_package_model(name) == folder / name.removeprefix("pkg:several_models/")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("pkg:nobody_has_this", "no package 'nobody_has_this' is installed here"),
        ("pkg:", "no package '' is installed here"),
        ("pkg:a..b", "no package 'a..b' is installed here"),
        ("pkg:json.decoder", "no package 'json.decoder' is installed here"),
        ("pkg:this", "no package 'this' is installed here"),
        ("pkg:empty_package", "the package empty_package holds no model"),
        ("pkg:one_model/other.gguf", "has no 'other.gguf'; it holds pkg:one_model/model.gguf"),
        ("pkg:one_model/../../secret", "the path must stay in the package"),
        ("pkg:one_model//etc/passwd", "the path must stay in the package"),
    ],
)
def test_what_is_not_found(install: Install, source: str, said: str) -> None:
    install("empty_package")
    install("one_model", "model.gguf")
    with pytest.raises(ModelError, match=said.replace("(", r"\(")):
        find_package_model(source)


def test_it_is_opened_by_the_format_of_what_is_found(install: Install) -> None:
    install("graphs_inside", "prefill.onnx", "decode.onnx", "tokenizer.json", "config.json")
    model_format = find_named(create_plugin_manager(allow=["models"]), "miniort_model_formats", ModelFormat, "package", "format")
    assert model_format.recognise("pkg:graphs_inside")
    assert not model_format.recognise("graphs_inside")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):  # it's empty
        model_format.open("pkg:graphs_inside")
    (Path(sys.path[0]) / "graphs_inside" / "config.json").write_text('{"n_positions": 7}')
    source = model_format.open("pkg:graphs_inside")
    assert (source.name, source.context_length, [path.name for path in source.graphs]) == (
        "pkg:graphs_inside",
        7,
        ["prefill.onnx", "decode.onnx"],
    )
