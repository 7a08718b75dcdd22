"""From weights to a folder with a decoder: `prefill.onnx`, `decode.onnx` and the one weights file that both read."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from miniort.errors import MiniortError, ModelError
from miniort_models.graphs.operators import NEWEST_OPSET, OLDEST_OPSET
from miniort_models.weights.dtypes import WeightDtype
from miniort_models.weights.safetensors_files import COMPANIONS, CONFIG
from miniort_models.weights.source import WeightSource

if TYPE_CHECKING:
    from miniort.generation.sources import Architecture
    from miniort.plugins import PluginManager
    from miniort_models.graphs.decoder import DecoderGraph

PREFILL, DECODE, WEIGHTS = "prefill.onnx", "decode.onnx", "weights.bin"

DECODER_FILES = frozenset({PREFILL, DECODE, WEIGHTS, CONFIG, *COMPANIONS})
"""What a converted decoder's folder may hold."""

OPSET = 23
"""What graphs are written for, unless asked. 24 has one operator more of those that decoders need (Swish)."""

BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias|attention\.bias|attention\.masked_bias)$")
"""Weights by name only: what can be computed, and old checkpoints hold all the same (masks, frequencies)."""


def convert(
    source: WeightSource,
    folder: Path,
    *,
    opset: int = OPSET,
    dtype: WeightDtype | None = None,
    all_logits: bool = False,
    files: Mapping[str, Path | bytes] | None = None,
    replace: bool = False,
    plugins: PluginManager | None = None,
) -> None:
    """Write a decoder's graphs and weights into a folder that isn't there yet, or is empty; whole, or not at all.

    They're written into a folder beside it, which is renamed when all is done, so nothing half-written is left by an error or Ctrl-C.
    `config.json` is written from `source.config`.

    opset: from 13 to 24. Below 23, attention, norms and rotary embeddings are spelled out in older operators.
    dtype: how weights are stored; None keeps what the source has, float or in blocks.
    all_logits: the prefill graph gives logits for every position, not only for the last.
    files: what else goes into the folder, by its name there: a file to copy, or its content (tokenizer.json, generation_config.json, …).
    replace: a folder that holds something already is replaced, if there is nothing in it but a decoder's files.
    plugins: who is asked for architectures; None for those that are installed.

    ModelError for an architecture that nobody knows, a variant that the graphs don't compute, and weights that don't fit.
    """
    from miniort.plugins import create_plugin_manager
    from miniort_models.architectures import find_architecture

    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise ModelError(f"graphs are written for the opsets {OLDEST_OPSET} to {NEWEST_OPSET}, found {opset}")
    architecture = find_architecture(source.config, source.name, plugins or create_plugin_manager())
    check_target(folder, replace, files or {})
    with _written_whole(folder) as partial:
        _write_graphs(architecture, source, partial, opset, dtype, all_logits)
        (partial / CONFIG).write_text(json.dumps(dict(source.config), indent=2) + "\n", encoding="utf-8")
        for name, content in (files or {}).items():
            if isinstance(content, bytes):
                (partial / name).write_bytes(content)
            else:
                shutil.copyfile(content, partial / name)


def check_target(folder: Path, replace: bool, files: Iterable[str] = ()) -> None:
    """ModelError if a decoder can't be written to a folder: it holds something at all, or with `replace`, something else than a decoder.

    files: names that a decoder may have beside those that all have.
    """
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} is a file; name a folder that isn't there yet")
    found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if not found:
        return
    if not replace:
        raise ModelError(f"{folder} isn't empty; name another folder, or ask for it to be replaced (--force)")
    foreign = [name for name in found if name not in DECODER_FILES and name not in files] or ([] if PREFILL in found else found)
    if foreign:
        shown = ", ".join(foreign[:3])
        raise ModelError(f"{folder} holds something else than a converted decoder ({shown}), so it's not replaced; name another folder")


def _write_graphs(
    architecture: Architecture, source: WeightSource, folder: Path, opset: int, dtype: WeightDtype | None, all_logits: bool
) -> None:
    """Both graphs and the weights, which are written as they're asked for."""
    import onnx

    from miniort_models.graphs.decoder import DecoderGraph
    from miniort_models.weights.weights_file import WeightsFile

    with closing(WeightsFile(source, folder / WEIGHTS, dtype)) as weights:
        for name, with_past in ((PREFILL, False), (DECODE, True)):
            graph = DecoderGraph(weights, opset, with_past=with_past, all_logits=all_logits)
            _build(architecture, graph, source)
            onnx.save(graph.model(f"{architecture.name}_{name.removesuffix('.onnx')}"), folder / name)
        unused = [name for name in weights.unused() if not BUFFERS.search(name)]
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise ModelError(
                f"{source.name} has weights that the {architecture.name} graphs don't use: {', '.join(unused[:3])}{more}; "
                "it's another variant than config.json says, or one that isn't known"
            )


def _build(architecture: Architecture, graph: DecoderGraph, source: WeightSource) -> None:
    """ModelError for whatever the architecture stumbles over: an odd `config.json`, as a rule."""
    try:
        architecture.build(graph, source.config)
    except (MiniortError, OSError):
        raise
    except Exception as error:
        raise ModelError(
            f"{source.name}: no {architecture.name} graphs can be made of its config.json and its weights: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _written_whole(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, that takes its place at the end, or vanishes if an exception comes before."""
    folder = folder.absolute()
    partial = folder.parent / f".{folder.name}.{token_hex(4)}.partial"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        if folder.exists() and any(folder.iterdir()):
            old = partial.with_suffix(".replaced")
            os.rename(folder, old)
            os.rename(partial, folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):
                folder.rmdir()
            os.rename(partial, folder)
    except OSError as error:
        raise ModelError(f"{folder} can't be written: {error}; make room there, or name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
