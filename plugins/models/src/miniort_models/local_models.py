"""The models that are on this machine: what each is, where it's from, how big it is, and whether it's whole."""

from __future__ import annotations

import os.path
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions

from miniort.errors import ModelError
from miniort_models.converted import ConvertedModel, converted_models
from miniort_models.file_size import describe_size
from miniort_models.formats import DEMO_FOLDER, DEMO_NAME
from miniort_models.package_files import PREFIX, find_package_model
from miniort_models.pulled import PulledModel, model_folder, pulled_names, read_pulled, remove_pulled

_WEIGHTS = (".gguf", ".safetensors")


@dataclass(frozen=True)
class LocalModel:
    """A model that `--model` opens without the network, or what is left of one.

    name: what `--model` calls it. origin: where it's from, for people.
    revision, commit, dtype: None where it has none, or nothing says.
    size: bytes on disk that are the cache's. when: in UTC, as ISO 8601 has it; None where nothing says.
    trouble: why it can't be opened, and what to do; None if it can.
    """

    name: str
    origin: str
    size: int
    revision: str | None = None
    commit: str | None = None
    dtype: str | None = None
    when: str | None = None
    trouble: str | None = None


def list_models() -> list[LocalModel]:
    """The demo model, those that were pulled, those in installed packages, and those that were converted when they were first opened.

    Broken ones are among them.
    """
    return [
        _demo(),
        *map(_pulled, pulled_names()),
        *sorted(_in_packages(), key=lambda model: model.name),
        *map(_converted, converted_models()),
    ]


def find_removable(name: str) -> LocalModel:
    """A model that `remove_model` can delete. ModelError if there is none of that name."""
    if name == DEMO_NAME:
        raise ModelError(f"{DEMO_NAME} comes with miniort-models and goes only with that")
    if name.startswith(PREFIX):
        raise ModelError(f"{name} is a part of an installed package; pip uninstall {name.removeprefix(PREFIX)} deletes it")
    found = next((model for model in list_models() if model.name == name), None)
    if found is None:
        raise ModelError(f"there is no model {name!r} here to delete; `miniort models` lists what there is")
    return found


def remove_model(name: str) -> int:
    """Delete a model. Returns how many bytes that freed. ModelError if there is none of that name."""
    model = find_removable(name)
    converted = [each for each in converted_models() if str(each.source) == name]
    if not converted:
        return remove_pulled(name)
    for each in converted:
        shutil.rmtree(each.place)
    return model.size


def _demo() -> LocalModel:
    size = sum(path.stat().st_size for path in DEMO_FOLDER.iterdir())
    return LocalModel(DEMO_NAME, "comes with miniort-models", size, dtype="f32")


def _pulled(name: str) -> LocalModel:
    try:
        model = read_pulled(name)
        unfinished = read_pulled(name, unfinished=True)
    except ModelError as error:
        size = sum(path.stat().st_size for path in model_folder(name).rglob("*") if path.is_file())
        return LocalModel(name, "unknown", size, trouble=str(error))
    if model is not None:
        return _describe(model, _trouble(model))
    if unfinished is not None:
        return _describe(unfinished, _how_far(unfinished))
    trouble = f"nothing says what this is; `miniort models --remove {name}` clears it away"
    return LocalModel(name, "unknown", 0, trouble=trouble)


def _in_packages() -> Iterator[LocalModel]:
    """Packages that say of themselves that they hold weights. ONNX files don't count: there are many that are no decoders."""
    for found in distributions():
        if not any(ending in (found.read_text("RECORD") or "").lower() for ending in _WEIGHTS):
            continue  # before its thousands of files become objects
        paths = [str(file.locate()) for file in found.files or () if file.suffix.lower() in _WEIGHTS]
        if not paths:
            continue
        name, trouble = f"{PREFIX}{found.name}", None
        try:
            find_package_model(name)
        except ModelError as error:
            trouble = str(error)
        size = sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
        yield LocalModel(name, f"installed with {found.name} {found.version}", size, trouble=trouble)


def _converted(model: ConvertedModel) -> LocalModel:
    trouble = None if model.source.exists() else f"{model.source} has gone; `miniort models --remove {model.source}` deletes its graphs too"
    return LocalModel(str(model.source), "converted when it was first opened", model.size, when=model.when, trouble=trouble)


def _describe(model: PulledModel, trouble: str | None) -> LocalModel:
    origin = model.endpoint.removeprefix("https://")
    file = (*model.graphs, model.weights or "")[0] if model.kind != "safetensors" else ""
    return LocalModel(
        model.name,
        f"{origin}, {file}" if file else origin,
        model.size,
        model.revision,
        model.commit,
        model.dtype,
        model.when,
        trouble,
    )


def _trouble(model: PulledModel) -> str | None:
    try:
        model.find_graphs()
    except ModelError as error:
        return str(error)
    return None


def _how_far(model: PulledModel) -> str:
    have = sum(model.cache.received(model.commit, file.hub_file) for file in model.files)
    whole = sum(file.size for file in model.files)
    if have == whole:
        return f"fetched, but no graphs were made of it; `miniort pull {model.name}` tries again, and says why not"
    return f"not all here: {describe_size(have)} of {describe_size(whole)}; `miniort pull {model.name}` goes on"
