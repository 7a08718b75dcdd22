"""What can be converted to graphs: a folder with safetensors, a GGUF file, a package or a pulled model with one of these."""

from __future__ import annotations

from pathlib import Path

from miniort.errors import ModelError
from miniort_models.conversion import OPSET
from miniort_models.hub import is_hub_name
from miniort_models.package_files import PREFIX, find_package_model
from miniort_models.pulled import open_pulled
from miniort_models.weights.dtypes import WeightDtype
from miniort_models.weights.safetensors_files import weight_files


def find_weights(source: str) -> Path:
    """The folder or the GGUF file that a path, `pkg:NAME`, or OWNER/NAME stands for. ModelError for anything else."""
    path = _find(source)
    if not path.exists():
        raise ModelError(f"no such file or folder: {source}")
    if path.is_dir():
        weight_files(path)
    elif path.suffix.lower() != ".gguf":
        raise ModelError(f"{source} can't be converted; wanted a folder with config.json and safetensors, or a .gguf file")
    return path


def _find(source: str) -> Path:
    path = Path(source).expanduser()
    if source.startswith(PREFIX):
        return find_package_model(source)
    if path.exists() or not is_hub_name(source):
        return path
    pulled = open_pulled(source)
    if pulled.weights is None:
        raise ModelError(f"{source} was pulled as ONNX graphs, so there is nothing to convert; --model {source} runs them")
    return pulled.snapshot / pulled.weights if pulled.kind == "gguf" else pulled.snapshot


def size_of(weights: Path) -> int:
    """Bytes of the files with weights in them."""
    return sum(path.stat().st_size for path in (weight_files(weights) if weights.is_dir() else [weights]))


def write_decoder(
    weights: Path, folder: Path, *, opset: int = OPSET, dtype: WeightDtype | None = None, all_logits: bool = False, replace: bool = False
) -> None:
    """Convert what `find_weights` found, as `conversion.convert` does, with what else belongs to the decoder."""
    from miniort_models.gguf_model import write_gguf
    from miniort_models.safetensors_model import write_safetensors

    write = write_safetensors if weights.is_dir() else write_gguf
    write(weights, folder, opset=opset, dtype=dtype, all_logits=all_logits, replace=replace)
