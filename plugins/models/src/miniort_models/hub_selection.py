"""Which of a repository's files are needed to run its decoder. Others, such as the weights in further forms, stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from miniort.errors import ModelError
from miniort_models.file_size import describe_size
from miniort_models.graph_files import choose_graphs
from miniort_models.hub import HubFile, Repository
from miniort_models.weights.safetensors_files import COMPANIONS as BESIDE_WEIGHTS
from miniort_models.weights.safetensors_files import CONFIG, INDEX, SINGLE

Kind = Literal["safetensors", "onnx", "gguf"]

COMPANIONS = (CONFIG, "genai_config.json", *BESIDE_WEIGHTS)
"""What lies beside weights and is small."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_GRAPHS_FOLDER = "onnx"


@dataclass(frozen=True)
class Selection:
    """What is needed of a repository.

    weights: the file, or the index of files, that the rest is read from: graphs of a kind of its own, see `graphs`.
    graphs: ONNX files, in the order that a `DecoderSource` has them.
    """

    kind: Kind
    files: tuple[HubFile, ...]
    weights: str | None = None
    graphs: tuple[str, ...] = ()


def select(repository: Repository, *, file: str | None = None, onnx: bool = False) -> Selection:
    """Choose by what there is: safetensors, else ONNX graphs, else a GGUF file.

    file: the ONNX or GGUF file to take, or a part of its name that no other has.
    onnx: take the ONNX graphs, though there are safetensors.

    ModelError where nothing fits, several do, or all that there is are pickles.
    """
    if file is not None:
        return _named(repository, file)
    paths = [each.path for each in repository.files]
    weights = None if onnx else _safetensors(paths)
    if weights is not None:
        return Selection("safetensors", (_file(repository, weights), *_companions(repository, [""])), weights=weights)
    graphs = [path for path in paths if path.endswith(".onnx")]
    if graphs:
        return _onnx(repository, _choose_graphs(repository, graphs))
    if onnx:
        raise ModelError(f"{repository.name} has no ONNX files{_instead(repository)}; leave --onnx out")
    ggufs = _ggufs(repository)
    if len(ggufs) > 1:
        raise ModelError(f"{repository.name} has several GGUF files: {_sizes(ggufs)}; choose one with --file")
    if ggufs:
        return Selection("gguf", tuple(ggufs), weights=ggufs[0].path)
    raise ModelError(_nothing(repository))


def _named(repository: Repository, wanted: str) -> Selection:
    """The one file that has this path, or else this name, or else has that in its path."""
    offered = [each for each in repository.files if each.path.endswith((".onnx", ".gguf"))]
    found = [each for each in repository.files if each.path == wanted]
    found = found or [each for each in repository.files if PurePosixPath(each.path).name == wanted]
    found = found or [each for each in offered if wanted.lower() in each.path.lower()]
    if len(found) != 1:
        which = f"{len(found)} such files: {_sizes(found)}" if found else f"no such ONNX or GGUF file; it has {_sizes(offered) or 'none'}"
        raise ModelError(f"--file {wanted}: {repository.name} has {which}")
    [file] = found
    if file.path.endswith(".gguf"):
        return Selection("gguf", (file,), weights=file.path)
    if file.path.endswith(".onnx"):
        return _onnx(repository, (file.path,))
    if file.path.endswith(_PICKLES):
        raise ModelError(_refused_pickles(repository, [file]))
    raise ModelError(f"--file {wanted}: wanted an ONNX or a GGUF file; leave --file out to take safetensors")


def _safetensors(paths: Sequence[str]) -> str | None:
    """The index of weights, or the file with all of them; None if there is no such thing, as in a repository with an adapter only."""
    if INDEX in paths or SINGLE in paths:
        return INDEX if INDEX in paths else SINGLE
    others = [path for path in paths if path.endswith(".safetensors") and "/" not in path and not path.startswith("adapter")]
    return others[0] if len(others) == 1 else None


def weight_files(repository: Repository, names: Sequence[str]) -> tuple[HubFile, ...]:
    """The files that an index of weights lists. ModelError if the repository lacks one."""
    missing = [name for name in names if repository.file(name) is None]
    if missing:
        raise ModelError(f"{repository.name} lacks {', '.join(missing)}, though {INDEX} lists it; tell the repository's owner")
    return tuple(_file(repository, name) for name in names)


def external_files(repository: Repository, graph: str, locations: Sequence[str]) -> tuple[HubFile, ...]:
    """The files that a graph's weights lie in, by their locations relative to the graph. ModelError if the repository lacks one."""
    paths = [str(PurePosixPath(graph).parent / location) for location in locations]
    missing = [path for path in paths if repository.file(path) is None]
    if missing:
        raise ModelError(
            f"{repository.name} lacks {', '.join(missing)}, where {graph} says that its weights are; tell the repository's owner"
        )
    return tuple(_file(repository, path) for path in paths)


def _onnx(repository: Repository, graphs: tuple[str, ...]) -> Selection:
    """Graphs, files that by their names hold their weights, and what lies beside them or one folder further up."""
    data = [each for each in repository.files for graph in graphs if each.path.startswith((f"{graph}_data", f"{graph}.data"))]
    folder = PurePosixPath(graphs[0]).parent
    companions = _companions(repository, [str(folder), str(folder.parent)])
    return Selection("onnx", (*(_file(repository, graph) for graph in graphs), *data, *companions), graphs=graphs)


def _choose_graphs(repository: Repository, graphs: list[str]) -> tuple[str, ...]:
    """Those in the root, else in `onnx`, else in the only other folder that has any."""
    by_folder: dict[str, list[str]] = {}
    for graph in sorted(graphs):
        by_folder.setdefault(str(PurePosixPath(graph).parent), []).append(PurePosixPath(graph).name)
    usual = [folder for folder in (".", _GRAPHS_FOLDER) if folder in by_folder]
    if not usual and len(by_folder) > 1:
        raise ModelError(
            f"{repository.name} has several ONNX files: {_sizes([_file(repository, g) for g in graphs])}; choose one with --file"
        )
    folder = usual[0] if usual else next(iter(by_folder))
    candidates = choose_graphs(f"{repository.name}/{folder}".removesuffix("/."), by_folder[folder])
    if len(candidates) > 1:
        several = [_file(repository, str(PurePosixPath(folder) / name)) for candidate in candidates for name in candidate]
        raise ModelError(f"{repository.name} has several ONNX decoders: {_sizes(several)}; choose one with --file")
    return tuple(str(PurePosixPath(folder) / name) for name in candidates[0])


def _companions(repository: Repository, folders: Sequence[str]) -> tuple[HubFile, ...]:
    paths = dict.fromkeys(str(PurePosixPath(folder) / name) for folder in folders for name in COMPANIONS)
    found = [file for path in paths if (file := repository.file(path)) is not None]
    names = {PurePosixPath(file.path).name for file in found}
    return tuple(file for file in found if not file.path.endswith("tokenizer.model") or "tokenizer.json" not in names)


def _ggufs(repository: Repository) -> list[HubFile]:
    """Decoders; not the vision part or the statistics that go with one."""
    named = [(each, PurePosixPath(each.path).name.lower()) for each in repository.files]
    return [each for each, name in named if name.endswith(".gguf") and not name.startswith("mmproj") and "imatrix" not in name]


def _nothing(repository: Repository) -> str:
    pickles = [each for each in repository.files if each.path.endswith(_PICKLES)]
    if pickles:
        return _refused_pickles(repository, pickles)
    other = [each for each in repository.files if each.path.endswith(".safetensors")]
    if other:
        return f"{repository.name} has no {SINGLE}, only {_sizes(other)}: parts of a model, such as an adapter; pull the whole model"
    return f"{repository.name} has no weights: looked for {SINGLE}, {INDEX}, ONNX and GGUF files"


def _refused_pickles(repository: Repository, pickles: Sequence[HubFile]) -> str:
    discussions = f"{repository.endpoint}/{repository.name}/discussions"
    return (
        f"{repository.name} has its weights only as a pickle ({_sizes(pickles[:3])}), which may run any code when it's read: refused. "
        f"Look for a conversion to safetensors at {discussions}, and pull it with --revision refs/pr/NUMBER"
    )


def _instead(repository: Repository) -> str:
    weights = [each for each in repository.files if each.path.endswith((".safetensors", ".gguf"))]
    return f", but {_sizes(weights)}" if weights else ""


def _sizes(files: Sequence[HubFile]) -> str:
    """Files with their sizes, for people."""
    return ", ".join(f"{each.path} ({describe_size(each.size)})" for each in files)


def _file(repository: Repository, path: str) -> HubFile:
    file = repository.file(path)
    assert file is not None  # it was taken from the repository's own list
    return file
