"""The kinds of model that this package opens: the demo model by its name, a folder of ONNX graphs, one ONNX file."""

from __future__ import annotations

import os.path
from functools import partial
from pathlib import Path

from miniort.errors import ModelError
from miniort.generation.sources import DecoderSource, ModelFormat
from miniort_models.configuration import read_configuration
from miniort_models.graph_files import find_graphs
from miniort_models.tokenizer import open_tokenizer

DEMO_NAME = "demo"
_DEMO_FOLDER = Path(__file__).parent / "demo"


def _is_demo(source: str) -> bool:
    return source == DEMO_NAME


def _open_demo(source: str) -> DecoderSource:
    return _describe(DEMO_NAME, find_graphs(_DEMO_FOLDER))


def _is_onnx_file(source: str) -> bool:
    return source.lower().endswith(".onnx") and not os.path.isdir(os.path.expanduser(source))


def _open_onnx_file(source: str) -> DecoderSource:
    path = Path(os.path.expanduser(source))
    if not os.path.isfile(path):
        raise ModelError(f"no such file or folder: {source}")
    return _describe(path.name, (path,))


def _is_folder(source: str) -> bool:
    """Whether it's a folder, or is written as a path to something that isn't there, which `open` then says."""
    path = os.path.expanduser(source)
    written_as_path = os.path.isabs(path) or source.startswith((".", "~"))
    return os.path.isdir(path) or (written_as_path and not os.path.exists(path) and not _is_onnx_file(source))


def _open_folder(source: str) -> DecoderSource:
    folder = Path(os.path.expanduser(source))
    if not os.path.isdir(folder):
        raise ModelError(f"no such file or folder: {source}")
    return _describe(folder.resolve().name, find_graphs(folder))


def _describe(name: str, graphs: tuple[Path, ...]) -> DecoderSource:
    """What the files beside the graphs say about a decoder."""
    places = _companion_folders(graphs[0].parent)
    configuration = read_configuration(places)
    tokenizers = [place / "tokenizer.json" for place in places if (place / "tokenizer.json").is_file()]
    return DecoderSource(
        name=name,
        graphs=graphs,
        tokenizer=partial(open_tokenizer, tokenizers[0]) if tokenizers else None,
        context_length=configuration.context_length,
        end_tokens=configuration.end_tokens,
        processors=configuration.processors,
    )


def _companion_folders(folder: Path) -> tuple[Path, ...]:
    """Where a decoder's other files lie: beside its graphs, and in the parent folder if that is a model's too.

    Hugging Face puts graphs in a sub-folder `onnx`. Any other parent must hold a tokenizer to be believed: its `config.json` may be
    anybody's.
    """
    parent = folder.absolute().parent
    return (folder, parent) if folder.absolute().name == "onnx" or (parent / "tokenizer.json").is_file() else (folder,)


MODEL_FORMATS = (
    ModelFormat(DEMO_NAME, recognise=_is_demo, open=_open_demo, priority=100, summary="the small model that comes with miniort-models"),
    ModelFormat("onnx_file", recognise=_is_onnx_file, open=_open_onnx_file, priority=10, summary="one ONNX file"),
    ModelFormat("onnx_folder", recognise=_is_folder, open=_open_folder, summary="a folder with one ONNX graph, or with a pair of them"),
)
"""Every format of this package."""
