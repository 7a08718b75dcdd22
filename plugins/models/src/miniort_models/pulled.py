"""Models that were pulled from a hub: what is noted of each on disk, and what is found out by that.

<cache>/hub/OWNER--NAME/pulled.json       what the model is and where its files are
<cache>/hub/OWNER--NAME/unfinished.json   the same for a pull that didn't come to its end
<cache>/hub/OWNER--NAME/<decoder>/        the graphs, where they were made from weights; else they lie in the hub's cache
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from miniort.cache_directory import cache_directory
from miniort.errors import ModelError
from miniort_models.hub import HubFile, check_hub_name, is_hub_name
from miniort_models.hub_cache import CachedRepository

_FORMAT = 1
_RECORD = "pulled.json"
_UNFINISHED = "unfinished.json"


@dataclass(frozen=True)
class PulledFile:
    """A file of the hub's cache. fetched: by a pull; false if it had been there before, and so may be somebody else's too."""

    path: str
    size: int
    digest: str
    fetched: bool

    @property
    def hub_file(self) -> HubFile:
        """The same, as the hub lists it."""
        return HubFile(self.path, self.size, self.digest)


@dataclass(frozen=True)
class PulledModel:
    """A model of a hub, as it's on this machine.

    kind: the form of its weights on the hub: `safetensors`, `gguf` or `onnx`.
    weights: the file that the others are found from; None for ONNX.
    graphs: paths in the snapshot of ONNX files; empty where the graphs were made of weights.
    decoder: the sub-folder with graphs that were made of weights.
    dtype: how weights are stored, for people; None where nothing says.
    when: in UTC, as ISO 8601 has it.
    """

    name: str
    endpoint: str
    revision: str
    commit: str
    kind: str
    files: tuple[PulledFile, ...]
    hub_cache: str
    when: str
    weights: str | None = None
    graphs: tuple[str, ...] = ()
    decoder: str | None = None
    dtype: str | None = None
    format: int = field(default=_FORMAT)

    @property
    def cache(self) -> CachedRepository:
        """Where the files are."""
        return CachedRepository(Path(self.hub_cache), self.name)

    @property
    def snapshot(self) -> Path:
        """The folder with the files, by their names in the repository."""
        return self.cache.snapshot(self.commit)

    @property
    def weights_path(self) -> Path:
        """The folder with safetensors, or the GGUF file, that the graphs were made of. ModelError for graphs that came as they are."""
        if self.kind == "onnx" or self.weights is None:
            raise ModelError(f"{self.name} was pulled as ONNX graphs, so no weights are here to convert; pull it without --onnx and --file")
        return self.snapshot / self.weights if self.kind == "gguf" else self.snapshot

    @property
    def size(self) -> int:
        """Bytes on disk: what is there of the files, and the graphs that were made of them."""
        fetched = sum(self.cache.received(self.commit, file.hub_file) for file in self.files)
        return fetched + (0 if self.decoder is None else _size_of_folder(model_folder(self.name) / self.decoder))

    def find_graphs(self) -> tuple[Path, ...]:
        """The ONNX files to run. ModelError if they, or files that they need, have gone."""
        from miniort_models.conversion import DECODE, PREFILL, WEIGHTS  # not at the top, because it brings NumPy

        if self.decoder is not None:
            folder = model_folder(self.name) / self.decoder
            gone = [name for name in (PREFILL, DECODE, WEIGHTS) if not (folder / name).is_file()]
            if gone:
                raise ModelError(f"{self.name}: {', '.join(gone)} has gone from {folder}; `miniort pull {self.name}` makes it again")
            return folder / PREFILL, folder / DECODE
        gone = [file.path for file in self.files if not self.cache.has(self.commit, file.hub_file)]
        if gone:
            raise ModelError(f"{self.name}: {', '.join(gone)} has gone from {self.snapshot}; `miniort pull {self.name}` gets it again")
        return tuple(self.snapshot / graph for graph in self.graphs)


def model_folder(name: str) -> Path:
    """The folder with what is noted of a model, and its graphs if they were made here."""
    return cache_directory() / "hub" / name.replace("/", "--")


def lock_of_pull(name: str) -> Path:
    """What a pull locks, so that there is one of a model at a time."""
    folder = model_folder(name)
    return folder.with_name(f"{folder.name}.lock")


def read_pulled(name: str, *, unfinished: bool = False) -> PulledModel | None:
    """What is noted of a model, or of a pull that didn't come to its end; None if there is nothing. ModelError if it can't be read."""
    path = model_folder(name) / (_UNFINISHED if unfinished else _RECORD)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} can't be read: {error}; `miniort models --remove {name}` clears it away") from None
    try:
        return _parse(name, json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelError(f"{path} is damaged; `miniort models --remove {name}` clears it away") from None


def open_pulled(name: str) -> PulledModel:
    """A model that was pulled. ModelError if it wasn't, or only in part."""
    model = read_pulled(name)
    if model is not None:
        return model
    if read_pulled(name, unfinished=True) is not None:
        raise ModelError(f"{name} was pulled only in part; `miniort pull {name}` goes on")
    raise ModelError(f"there is no folder {name}, and no model of this name was pulled; `miniort pull {name}` gets it from the hub")


def _parse(name: str, content: Any) -> PulledModel:
    files = tuple(PulledFile(str(file["path"]), int(file["size"]), str(file["digest"]), bool(file["fetched"])) for file in content["files"])
    model = PulledModel(**{**content, "files": files, "graphs": tuple(content["graphs"])})
    if not re.fullmatch("[0-9a-f]{40}", model.commit) or Path(model.decoder or "").name != (model.decoder or ""):
        raise ValueError
    texts = (model.endpoint, model.revision, model.commit, model.kind, model.hub_cache, model.when)
    if model.name != name or model.format != _FORMAT or not all(isinstance(text, str) for text in texts):
        raise ValueError
    if not all(isinstance(text, str | None) for text in (model.weights, model.decoder, model.dtype)):
        raise ValueError
    return model


def write_pulled(model: PulledModel, *, unfinished: bool = False) -> None:
    """Note it, whole or not at all. A finished model replaces what is noted of an unfinished pull."""
    folder = model_folder(model.name)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (_UNFINISHED if unfinished else _RECORD)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(json.dumps(asdict(model), indent=1), encoding="utf-8")
    os.replace(new, path)
    if not unfinished:
        forget_unfinished(model.name)


def forget_unfinished(name: str) -> None:
    """Drop what is noted of a pull that didn't come to its end, and the folder if nothing else is in it."""
    folder = model_folder(name)
    (folder / _UNFINISHED).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def pulled_names() -> list[str]:
    """Every model of which something is noted, sorted; whether it's whole or readable isn't looked at."""
    folder = cache_directory() / "hub"
    names = (path.name.replace("--", "/", 1) for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
    return sorted(name for name in names if is_hub_name(name))


def remove_pulled(name: str) -> int:
    """Delete a model: its graphs, what was fetched for it, what is noted of it. Returns how many bytes that freed.

    Files that were in the hub's cache before stay there. A damaged note is deleted as well; what it told of stays in the hub's cache.
    """
    check_hub_name(name)
    folder = model_folder(name)
    if not folder.is_dir():
        raise ModelError(f"there is no pulled model {name}; `miniort models` lists what there is")
    freed = 0
    for model in _readable(name):
        freed += model.cache.remove(model.commit, [file.hub_file for file in model.files if file.fetched])
    freed += _size_of_folder(folder)
    shutil.rmtree(folder)
    lock_of_pull(name).unlink(missing_ok=True)
    return freed


def _readable(name: str) -> Iterator[PulledModel]:
    for unfinished in (False, True):
        try:
            model = read_pulled(name, unfinished=unfinished)
        except ModelError:
            continue
        if model is not None:
            yield model


def _size_of_folder(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
