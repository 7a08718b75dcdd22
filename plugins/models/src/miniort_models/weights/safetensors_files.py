"""The files of a folder as Hugging Face lays it out: which hold weights, and which belong to these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from miniort.errors import ModelError

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
"""Files that torch writes with pickle."""

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""What belongs to a decoder beside its weights."""


def holds_weights(folder: Path) -> bool:
    """Whether it's a folder as Hugging Face lays it out; if its weights are pickled, `weight_files` says what to do."""
    return (folder / CONFIG).is_file() and bool((folder / INDEX).is_file() or any(folder.glob("*.safetensors")) or _pickled(folder))


def weight_files(folder: Path) -> list[Path]:
    """The files that weights are in. ModelError if there is none, one is missing, or it can't be told which."""
    listed = sorted(set(listed_files(folder).values()))
    missing = [name for name in listed if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder}: {', '.join(missing)} of the {len(listed)} weight files in {INDEX} are missing; get them again")
    if listed:
        return [folder / name for name in listed]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(path.name for path in found)
        raise ModelError(f"{folder} holds {names}, and no {INDEX} that says which belong together; get that file too")
    pickled = _pickled(folder)
    if pickled:
        raise ModelError(
            f"{folder} has its weights in {pickled[0]}, which is pickled: reading it could run any code, so it's refused. Take a version "
            f"with {SINGLE}, or load this one with transformers, if you trust it, and save it with save_pretrained(FOLDER)"
        )
    raise ModelError(f"{folder} holds no weights: looked for {SINGLE} and {INDEX}")


def companion_files(folder: Path) -> dict[str, Path]:
    """What lies beside the weights and belongs to the decoder, by name: tokenizer files, chat templates, `generation_config.json`."""
    return {path.name: path for pattern in COMPANIONS for path in sorted(folder.glob(pattern)) if path.is_file()}


def _pickled(folder: Path) -> list[str]:
    return sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))


def listed_files(folder: Path) -> dict[str, str]:
    """The file that each weight is in, by the index; empty where there is no index."""
    if not (folder / INDEX).is_file():
        return {}
    listed = read_json(folder / INDEX).get("weight_map")
    plain = isinstance(listed, dict) and all(isinstance(file, str) and Path(file).name == file for file in listed.values())
    if not plain:
        raise ModelError(f"{folder / INDEX} must have a weight_map that gives a file of this folder for each weight; get it again")
    return dict(listed)  # type: ignore[arg-type]


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: it says what the weights are of; get it too") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON: {error}; get it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must be a JSON object, found {type(content).__name__}")
    return content
