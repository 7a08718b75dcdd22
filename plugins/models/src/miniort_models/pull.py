"""Getting a model from the hub, once: look it up, choose files, fetch them, make graphs of weights, note what is here."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Protocol

from miniort import __version__
from miniort.errors import ModelError
from miniort_models.convertible import write_decoder
from miniort_models.external_data import external_locations
from miniort_models.file_size import describe_size
from miniort_models.hub import DEFAULT_REVISION, HubFile, Repository, check_hub_name, look_up
from miniort_models.hub_cache import CachedRepository, hub_cache
from miniort_models.hub_download import RETRY_WAITS, fetch
from miniort_models.hub_selection import COMPANIONS, Selection, external_files, select, weight_files
from miniort_models.pulled import (
    PulledFile,
    PulledModel,
    forget_unfinished,
    lock_of_pull,
    model_folder,
    read_pulled,
    write_pulled,
)
from miniort_models.weights.dtypes import WeightDtype
from miniort_models.weights.gguf_header import read_header
from miniort_models.weights.safetensors_files import CONFIG, INDEX, listed_files, read_json

_CONFIGURED_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""What `config.json` calls them."""


class PullWatcher(Protocol):
    """Is told how a pull goes."""

    def waiting(self) -> None:
        """Another process pulls the same model."""

    def planned(self, size: int) -> None:
        """So many bytes are needed, those that are here already included. Said again where more are found to be needed."""

    def received(self, count: int) -> None:
        """So many of them have come, or were here; a negative number had to be dropped."""

    def converting(self) -> None:
        """All is here; graphs are being made of weights."""


@dataclass(frozen=True)
class Pulled:
    """A model that is here now. changed: whether anything was fetched or made for that."""

    model: PulledModel
    changed: bool


def pull(
    name: str,
    *,
    revision: str = DEFAULT_REVISION,
    file: str | None = None,
    onnx: bool = False,
    dtype: WeightDtype | None = None,
    watcher: PullWatcher,
    retry_waits: Sequence[float] = RETRY_WAITS,
) -> Pulled:
    """Make a model of the hub be here, so that it opens by its name without the network; see `miniort pull`.

    file, onnx: what to take where there are several forms; see `select`.
    dtype: how weights of graphs that are made here are stored; None as they come.
    retry_waits: see `fetch`.

    A model of this name that was here is replaced when the new one is whole, and stays otherwise. ModelError says what went wrong; what had
    come whole by then, and the beginning of a file that was cut, stay in the hub's cache for the next time.
    """
    check_hub_name(name)
    try:
        with _alone(name, watcher):
            return _pull(name, revision, file, onnx, dtype, watcher, retry_waits)
    except OSError as error:
        raise ModelError(f"{name} can't be pulled: {error}") from None


def _pull(
    name: str, revision: str, file: str | None, onnx: bool, dtype: WeightDtype | None, watcher: PullWatcher, retry_waits: Sequence[float]
) -> Pulled:
    cache = hub_cache(name)
    before, unfinished = _readable(name), _readable(name, unfinished=True)
    repository = _look_up(name, revision, before)
    selection = select(repository, file=file, onnx=onnx)
    if selection.kind == "onnx" and dtype is not None:
        raise ModelError(f"{name} comes as ONNX graphs, whose weights stay as they are; leave --dtype out")
    model = PulledModel(
        name=name,
        endpoint=repository.endpoint,
        revision=repository.revision,
        commit=repository.commit,
        kind=selection.kind,
        files=(),
        hub_cache=str(cache.cache),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        weights=selection.weights,
        graphs=selection.graphs,
        decoder=None if selection.weights is None else _decoder_name(repository.commit, selection.weights, dtype),
    )
    ours = {each.digest for noted in (before, unfinished) if noted is not None for each in noted.files if each.fetched}
    download = _Download(repository, cache, watcher, retry_waits, ours, model)
    try:
        download.check_room(selection.files)
        download.fetch([file for file in selection.files if PurePosixPath(file.path).name in COMPANIONS])
        if selection.kind == "safetensors":
            try:
                _check_architecture(repository, cache)
            except ModelError:  # another pull would come to the same
                download.undo()
                raise
        download.fetch(selection.files)
        download.fetch(_further_files(repository, cache, selection))
    except BaseException:
        download.give_up()
        raise
    model = replace(download.model, dtype=dtype or _dtype_there(download.model))
    changed = download.changed
    if model.decoder is not None and (before is None or before.decoder != model.decoder or not _is_whole(before)):
        watcher.converting()
        _make_graphs(model, dtype)
        changed = True
    cache.name_commit(repository)
    if before is not None and not changed:
        model = replace(model, when=before.when)
    write_pulled(model)
    for earlier in (before, unfinished):
        if earlier is not None:
            _remove_what_was_replaced(earlier, model)
    _remove_other_graphs(model)
    return Pulled(model, changed)


def _look_up(name: str, revision: str, before: PulledModel | None) -> Repository:
    """What the hub has; without the network, what was pulled of that revision."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and before is not None and revision in (before.revision, before.commit):
        files = tuple(file.hub_file for file in before.files)
        return Repository(name, before.endpoint, before.revision, before.commit, files)
    return look_up(name, revision)


class _Download:
    """The files of a pull: fetches them, and notes on disk what is on its way."""

    def __init__(
        self,
        repository: Repository,
        cache: CachedRepository,
        watcher: PullWatcher,
        retry_waits: Sequence[float],
        ours: set[str],
        model: PulledModel,
    ) -> None:
        self.repository, self.cache, self.watcher, self.retry_waits, self.ours = repository, cache, watcher, retry_waits, ours
        self.model = model
        self.changed = False

    def fetch(self, files: Sequence[HubFile]) -> None:
        """Make files be in the cache: small ones first, so that what can be wrong with the whole is known before large ones come."""
        new = [
            PulledFile(file.path, file.size, file.digest, fetched=file.digest in self.ours or not self._had(file))
            for file in sorted(files, key=lambda file: file.size)
            if file.path not in {each.path for each in self.model.files}
        ]
        if not new:
            return
        self.check_room([file.hub_file for file in new])
        self.model = replace(self.model, files=(*self.model.files, *new))
        write_pulled(self.model, unfinished=True)
        self.watcher.planned(sum(file.size for file in self.model.files))
        for file in new:
            self.changed |= fetch(self.repository, file.hub_file, self.cache, self.watcher.received, retry_waits=self.retry_waits)

    def give_up(self) -> None:
        """Leave nothing noted of a pull of which nothing is here."""
        if self.model.files and not any(self.cache.received(self.model.commit, file.hub_file) for file in self.model.files if file.fetched):
            self.undo()

    def undo(self) -> None:
        """Leave nothing of this pull."""
        self.cache.remove(self.model.commit, [file.hub_file for file in self.model.files if file.fetched and file.digest not in self.ours])
        forget_unfinished(self.model.name)

    def _had(self, file: HubFile) -> bool:
        return self.cache.received(self.model.commit, file) == file.size

    def check_room(self, files: Sequence[HubFile]) -> None:
        """ModelError now, if the disk will be full when these files have come."""
        missing = sum(file.size - self.cache.received(self.model.commit, file) for file in files)
        there = next(folder for folder in (self.cache.folder, *self.cache.folder.parents) if folder.is_dir())
        free = shutil.disk_usage(there).free
        if missing > free:
            raise ModelError(
                f"{self.model.name} needs {describe_size(missing)} more in {self.cache.cache}, where {describe_size(free)} are free; "
                "make room, or set HF_HOME to a folder where there is"
            )


def _check_architecture(repository: Repository, cache: CachedRepository) -> None:
    """ModelError before gigabytes of weights are fetched from which no graph can be made."""
    from miniort.plugins import create_plugin_manager
    from miniort_models.architectures import find_architecture

    if repository.file(CONFIG) is None:
        raise ModelError(f"{repository.name} has no {CONFIG}, so it isn't known what its weights are for; tell the repository's owner")
    config = read_json(cache.snapshot(repository.commit) / CONFIG)
    try:
        find_architecture(config, repository.name, create_plugin_manager())
    except ModelError as error:
        has_graphs = any(file.path.endswith(".onnx") for file in repository.files)
        raise ModelError(f"{error}{'; it has ONNX graphs too, which --onnx takes' if has_graphs else ''}") from None


def _further_files(repository: Repository, cache: CachedRepository, selection: Selection) -> tuple[HubFile, ...]:
    """Files that are known only by what stands in those that have come: shards of weights, external data of graphs."""
    snapshot = cache.snapshot(repository.commit)
    if selection.weights == INDEX:
        return weight_files(repository, sorted(set(listed_files(snapshot).values())))
    found = [external_files(repository, graph, external_locations(snapshot / graph)) for graph in selection.graphs]
    return tuple(file for files in found for file in files)


def _decoder_name(commit: str, weights: str, dtype: WeightDtype | None) -> str:
    """A folder's name for graphs that are made of weights: another one for all that would make them different."""
    made_from = "\n".join((__version__, commit, weights, dtype or ""))
    return f"decoder-{hashlib.sha256(made_from.encode()).hexdigest()[:12]}"


def _dtype_there(model: PulledModel) -> str | None:
    """How weights are stored that are kept as they come, as far as their files say."""
    if model.kind == "gguf":
        from gguf import LlamaFileType

        number = read_header(model.snapshot / str(model.weights)).integer("general.file_type")
        names = [each.name.removeprefix("MOSTLY_").removeprefix("ALL_") for each in LlamaFileType if each == number]
        return names[0] if names else None
    if model.kind == "safetensors":
        config = read_json(model.snapshot / CONFIG)
        return _CONFIGURED_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
    return None


def _make_graphs(model: PulledModel, dtype: WeightDtype | None) -> None:
    assert model.decoder is not None
    folder = model_folder(model.name) / model.decoder
    if folder.exists():  # and is of no use, or this function weren't called
        shutil.rmtree(folder)
    write_decoder(model.weights_path, folder, dtype=dtype)


def _is_whole(model: PulledModel) -> bool:
    try:
        model.find_graphs()
    except ModelError:
        return False
    return True


def _remove_what_was_replaced(before: PulledModel, now: PulledModel) -> None:
    """Files that only an earlier pull needs."""
    needed = {(now.commit, file.path) for file in now.files} if before.cache == now.cache else set()
    before.cache.remove(
        before.commit, [file.hub_file for file in before.files if file.fetched and (before.commit, file.path) not in needed]
    )


def _remove_other_graphs(now: PulledModel) -> None:
    """Those of earlier pulls, and what is left of a conversion that was killed."""
    for path in model_folder(now.name).iterdir():
        if path.is_dir() and path.name != now.decoder:
            shutil.rmtree(path, ignore_errors=True)


def _readable(name: str, *, unfinished: bool = False) -> PulledModel | None:
    """What is noted, None also where that is damaged: a new pull makes it good."""
    try:
        return read_pulled(name, unfinished=unfinished)
    except ModelError:
        return None


@contextmanager
def _alone(name: str, watcher: PullWatcher) -> Iterator[None]:
    """One pull of a model at a time."""
    from filelock import FileLock, Timeout

    path = lock_of_pull(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        watcher.waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
