"""Optimised graphs on disk, so that the next start of a model needn't make them again.

    <cache>/graphs/<name of the model>-<identity>    an entry: see `graph_entry`

An entry that's damaged, or whose weights have changed, counts as none and is written anew. Entries are written under another name and then
renamed, so of several processes that write the same one the last wins, and nobody reads half of one. What can't be read or written
costs the time of optimisation and nothing else: there's a line in the log `miniort` at level DEBUG.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from miniort.cache_directory import cache_directory
from miniort.errors import ModelError
from miniort.graph.passes import GraphPass, Level
from miniort.kernels import Kernel
from miniort.model.file_stamps import FileStamp
from miniort.model.weights import WeightStore
from miniort.plugins import PluginManager
from miniort.runtime.assignment import OpenProvider
from miniort.runtime.graph_entry import PreparedGraph, UnusableEntryError, pack, rebuild, unpack
from miniort.runtime.graph_identity import graph_identity
from miniort.runtime.model_recipe import ModelRecipe
from miniort.runtime.same_graph import same_model
from miniort.types import Array

SIZE_VARIABLE = "MINIORT_GRAPH_CACHE_MB"
_DEFAULT_MB = 2048

_LARGE = 64_000_000
"""Bytes from which on a file is mapped."""

_UNFINISHED = ".unfinished-"
_ABANDONED = 3600
"""Seconds after which an unfinished entry is one of a process that was ended."""

_log = logging.getLogger("miniort")


@dataclass(frozen=True)
class GraphPlace:
    """Where one optimised graph is kept, or will be. limit: bytes that all entries together may take.

    folder: where the model's external data is. contents: those of the model's files, uint8. stamps: of these files, from before they were
    read.
    """

    path: Path
    limit: int
    folder: Path | None
    contents: Sequence[Array]
    stamps: Mapping[Path, FileStamp]

    def read(self, weights: WeightStore) -> PreparedGraph | None:
        """The graph, if it's there; its constants become this store's own."""
        try:
            graph = unpack(_contents(self.path), self.contents, self.folder, weights)
        except FileNotFoundError:
            return None
        except Exception as error:
            # Whatever is wrong with an entry, the model that it was made of is there.
            _log.debug("%s is left aside: %s: %s", self.path, type(error).__name__, error)
            return None
        try:
            os.utime(self.path)  # entries that were read last stay longest
        except OSError:
            _log.debug("%s can be read only", self.path)
        return graph

    def write(self, graph: PreparedGraph, weights: WeightStore) -> None:
        """Keep the graph, if it's read back as it is, and let go of entries that weren't used for long where there are too many."""
        try:
            for path, stamp in self.stamps.items():
                if not stamp.same_file(FileStamp.of(path)):
                    raise UnusableEntryError(f"{path} has changed meanwhile")
            parts = pack(graph, self.contents, weights, self.limit)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=_UNFINISHED, delete=False) as file:
                unfinished = Path(file.name)
                try:
                    for part in parts:
                        file.write(part)
                    file.close()
                    self._check(unfinished, graph, weights)
                    os.replace(unfinished, self.path)
                finally:
                    unfinished.unlink(missing_ok=True)
            self._make_room()
        except Exception as error:
            # A full disk, a folder that's read-only, a graph that ONNX can't write: the session has what it needs.
            _log.debug("%s isn't kept: %s: %s", self.path, type(error).__name__, error)

    def _check(self, unfinished: Path, graph: PreparedGraph, weights: WeightStore) -> None:
        own = WeightStore()
        read = rebuild(_contents(unfinished), self.contents, self.folder, own)
        if read.changes != tuple(graph.changes) or read.notes != graph.notes or not same_model(graph.model, read.model, (weights, own)):
            raise UnusableEntryError("ONNX has no place for something in this graph")

    def _make_room(self) -> None:
        found = []
        for path in self.path.parent.iterdir():
            with suppress(OSError):  # other processes do the same
                status = path.stat()
                if not path.name.startswith(_UNFINISHED):
                    found.append((path == self.path, status.st_mtime_ns, status.st_size, path))
                elif time.time() - status.st_mtime > _ABANDONED:
                    path.unlink()
        taken = 0
        for _, _, size, path in sorted(found, reverse=True):
            taken += size
            if taken > self.limit:
                with suppress(OSError):
                    path.unlink()


def graph_place(
    recipe: ModelRecipe,
    level: Level,
    passes: Sequence[GraphPass],
    providers: Sequence[OpenProvider],
    plugins: PluginManager,
    kernels: Sequence[Kernel],
    weights: WeightStore,
) -> GraphPlace | None:
    """Where the optimised graph of a model is kept; arguments as for `graph_identity`. weights: the store that the session will use.

    None where none is: it's turned off (MINIORT_GRAPH_CACHE_MB=0), the model is in memory or can't be read, or nobody knows whose code
    decides about it.
    """
    limit = _limit()
    if not recipe.files or limit == 0:
        return None
    try:
        stamps = {path: FileStamp.of(path) for path in recipe.files}
        contents = [_contents(path) for path in recipe.files]
        digests = [_digest(content, path, stamps[path], weights) for content, path in zip(contents, recipe.files, strict=True)]
        identity = graph_identity(recipe, digests, level, passes, providers, plugins, kernels)
    except (OSError, ValueError):
        return None  # whoever loads the model has the error for it
    if identity is None:
        return None
    name = "".join(character if character.isalnum() or character in "-_." else "_" for character in recipe.files[-1].stem)
    return GraphPlace(cache_directory() / "graphs" / f"{name[:40]}-{identity[:32]}", limit, recipe.folder, contents, stamps)


def _digest(content: Array, path: Path, stamp: FileStamp, weights: WeightStore) -> str:
    """SHA-256 of a file, worked out once for sessions that share their weights, such as those of a decoder's two graphs."""
    digest: str = weights.made(("SHA-256", path, stamp), lambda: hashlib.sha256(content.data).hexdigest())
    return digest


def _limit() -> int:
    text = os.environ.get(SIZE_VARIABLE, str(_DEFAULT_MB))
    if not text.isdecimal():
        raise ModelError(f"{SIZE_VARIABLE} is a number of megabytes, 0 to keep no optimised graphs; found {text!r}")
    return int(text) * 1_000_000


def _contents(path: Path) -> Array:
    """The bytes of a file. Only large ones are mapped: a mapped file that somebody cuts short while it's read ends the process."""
    if path.stat().st_size < _LARGE:
        return np.fromfile(path, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, mode="r"))
