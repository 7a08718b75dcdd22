"""The kinds of model that this package opens: the demo model by its name, a folder of ONNX graphs, one ONNX or GGUF file, a package."""

from __future__ import annotations

import os.path
from dataclasses import replace
from functools import partial
from pathlib import Path

from miniort.errors import ModelError
from miniort.generation.sources import DecoderSource, ModelFormat
from miniort_models.chat_template import has_chat_template, open_chat_template
from miniort_models.configuration import read_configuration
from miniort_models.graph_files import find_graphs, has_graphs
from miniort_models.hub import is_hub_name
from miniort_models.package_files import PREFIX, find_package_model
from miniort_models.pulled import open_pulled
from miniort_models.tokenizer import find_tokenizer, open_tokenizer
from miniort_models.weights.safetensors_files import holds_weights

DEMO_NAME = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo"


def _is_demo(source: str) -> bool:
    return source == DEMO_NAME


def _open_demo(source: str) -> DecoderSource:
    return _describe(DEMO_NAME, find_graphs(DEMO_FOLDER))


def _is_onnx_file(source: str) -> bool:
    return source.lower().endswith(".onnx") and not os.path.isdir(os.path.expanduser(source))


def _open_onnx_file(source: str) -> DecoderSource:
    path = Path(os.path.expanduser(source))
    if not os.path.isfile(path):
        raise ModelError(f"no such file or folder: {source}")
    return _describe(path.name, (path,))


def _is_gguf_file(source: str) -> bool:
    return source.lower().endswith(".gguf") and not os.path.isdir(os.path.expanduser(source))


def _open_gguf_file(source: str) -> DecoderSource:
    from miniort_models.gguf_model import converted_gguf

    path = Path(os.path.expanduser(source))
    if not os.path.isfile(path):
        raise ModelError(f"no such file or folder: {source}")
    return _with_tokenizer_of(path, _describe(path.name, find_graphs(converted_gguf(path))))


def _with_tokenizer_of(path: Path, source: DecoderSource) -> DecoderSource:
    """Where the tokenizer in a file couldn't be read, opening it says why."""
    return source if source.tokenizer is not None else replace(source, tokenizer=partial(open_tokenizer, path))


def _is_package(source: str) -> bool:
    return source.startswith(PREFIX)


def _open_package(source: str) -> DecoderSource:
    path = str(find_package_model(source))
    opened = next(each for each in (_GGUF_FILE, _ONNX_FILE, _WEIGHTS_FOLDER, _FOLDER) if each.recognise(path)).open(path)
    return replace(opened, name=source)


def _is_folder(source: str) -> bool:
    """Whether it's a folder, or is written as a path to something that isn't there, which `open` then says."""
    path = os.path.expanduser(source)
    written_as_path = os.path.isabs(path) or source.startswith((".", "~"))
    return os.path.isdir(path) or (written_as_path and not os.path.exists(path) and not (_is_onnx_file(source) or _is_gguf_file(source)))


def _open_folder(source: str) -> DecoderSource:
    folder = Path(os.path.expanduser(source))
    if not os.path.isdir(folder):
        raise ModelError(f"no such file or folder: {source}")
    return _describe(folder.resolve().name, find_graphs(folder))


def _is_weights_folder(source: str) -> bool:
    """Whether it's a folder with weights, and no graphs that were made of them already."""
    folder = Path(os.path.expanduser(source))
    return os.path.isdir(folder) and not has_graphs(folder) and holds_weights(folder)


def _open_weights_folder(source: str) -> DecoderSource:
    from miniort_models.safetensors_model import converted_safetensors

    folder = Path(os.path.expanduser(source))
    return _describe(folder.resolve().name, find_graphs(converted_safetensors(folder)))


def _is_hub_name(source: str) -> bool:
    """Whether it's OWNER/NAME, and not a path to something that is there."""
    return is_hub_name(source) and not os.path.exists(source)


def _open_hub_name(source: str) -> DecoderSource:
    return _describe(source, open_pulled(source).find_graphs())


def _describe(name: str, graphs: tuple[Path, ...]) -> DecoderSource:
    """What the files beside the graphs say about a decoder."""
    places = _companion_folders(graphs[0].parent)
    configuration = read_configuration(places)
    tokenizer = find_tokenizer(places)
    return DecoderSource(
        name=name,
        graphs=graphs,
        tokenizer=partial(open_tokenizer, tokenizer) if tokenizer else None,
        context_length=configuration.context_length,
        end_tokens=configuration.end_tokens,
        begin_token=configuration.begin_token,
        chat_template=partial(open_chat_template, places) if has_chat_template(places) else None,
        processors=configuration.processors,
    )


def _companion_folders(folder: Path) -> tuple[Path, ...]:
    """Where a decoder's other files lie: beside its graphs, and in the parent folder if that is a model's too.

    Hugging Face puts graphs in a sub-folder `onnx`. Any other parent must hold a tokenizer to be believed: its `config.json` may be
    anybody's.
    """
    parent = folder.absolute().parent
    return (folder, parent) if folder.absolute().name == "onnx" or (parent / "tokenizer.json").is_file() else (folder,)


_DEMO = ModelFormat(DEMO_NAME, recognise=_is_demo, open=_open_demo, priority=100, summary="the small model that comes with miniort-models")
_PACKAGE = ModelFormat(
    "package", recognise=_is_package, open=_open_package, priority=100, summary="pkg:NAME, the model file in an installed Python package"
)
_GGUF_FILE = ModelFormat("gguf_file", recognise=_is_gguf_file, open=_open_gguf_file, priority=10, summary="one GGUF file")
_ONNX_FILE = ModelFormat("onnx_file", recognise=_is_onnx_file, open=_open_onnx_file, priority=10, summary="one ONNX file")
_FOLDER = ModelFormat(
    "onnx_folder", recognise=_is_folder, open=_open_folder, summary="a folder with one ONNX graph, or with a pair of them"
)
_WEIGHTS_FOLDER = ModelFormat(
    "safetensors_folder",
    recognise=_is_weights_folder,
    open=_open_weights_folder,
    priority=5,
    summary="a folder with config.json and safetensors, as Hugging Face has it",
)
_HUB = ModelFormat(
    "hub", recognise=_is_hub_name, open=_open_hub_name, priority=-10, summary="OWNER/NAME, a model that `miniort pull` got from the hub"
)

MODEL_FORMATS = (_DEMO, _PACKAGE, _GGUF_FILE, _ONNX_FILE, _WEIGHTS_FOLDER, _FOLDER, _HUB)
"""Every format of this package."""
