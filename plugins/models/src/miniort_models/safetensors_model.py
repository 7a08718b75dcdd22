"""A decoder in a folder with safetensors: converted to graphs once, with its tokenizer and the rest beside them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from miniort_models.conversion import OPSET, convert
from miniort_models.converted import converted_folder
from miniort_models.weights.dtypes import WeightDtype
from miniort_models.weights.safetensors_files import CONFIG, INDEX, companion_files, weight_files


def converted_safetensors(folder: Path) -> Path:
    """The folder with the graphs of a folder with weights, which are stored as they are there; it's made now if it isn't there yet.

    ModelError for weights that can't be read or converted.
    """
    files = [*weight_files(folder), folder / CONFIG, *companion_files(folder).values()]
    index = folder / INDEX
    return converted_folder(folder.resolve().name, [*files, *([index] if index.is_file() else [])], partial(write_safetensors, folder))


def write_safetensors(
    source: Path, folder: Path, *, opset: int = OPSET, dtype: WeightDtype | None = None, all_logits: bool = False, replace: bool = False
) -> None:
    """Convert a folder with safetensors to one with graphs, as `convert` does, with what else belongs to the decoder."""
    from miniort_models.weights.safetensors_folder import open_safetensors_folder

    weights = open_safetensors_folder(source)
    convert(weights, folder, opset=opset, dtype=dtype, all_logits=all_logits, files=companion_files(source), replace=replace)
