"""What the JSON files of a model's folder say about its decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from miniort.errors import ModelError

T = TypeVar("T")

# (file, keys from the outermost inwards), the first that says something wins
_CONTEXT_LENGTH_KEYS = (
    ("config.json", ("n_positions",)),
    ("config.json", ("n_ctx",)),
    ("config.json", ("max_position_embeddings",)),
    ("genai_config.json", ("model", "context_length")),
)
_END_TOKEN_KEYS = (
    ("generation_config.json", ("eos_token_id",)),
    ("config.json", ("eos_token_id",)),
    ("genai_config.json", ("model", "eos_token_id")),
)

_BEGIN_TOKEN_KEYS = (
    ("generation_config.json", ("bos_token_id",)),
    ("config.json", ("bos_token_id",)),
    ("genai_config.json", ("model", "bos_token_id")),
)

_REPETITION_PENALTY_KEYS = (("generation_config.json", ("repetition_penalty",)),)


@dataclass(frozen=True)
class Configuration:
    """The most tokens that a model can see, the ids that end and the one that begins a text, and logits processors that are wanted.

    None where nothing says so.
    """

    context_length: int | None
    end_tokens: frozenset[int]
    begin_token: int | None
    processors: Mapping[str, Mapping[str, Any]]


def read_configuration(folders: Sequence[Path]) -> Configuration:
    """From `config.json`, `generation_config.json` and `genai_config.json`, each in the first of the folders that has it.

    The tokenizer's end token, in `tokenizer_config.json`, ends a text too: in models for conversations it's often the only one that ends a
    turn. ModelError that names the file if one is damaged, or says something that can't be.
    """
    files = {name: _read_first(folders, name) for name in _READ}
    penalty = next(_said(files, _REPETITION_PENALTY_KEYS, _as_penalty), 1.0)
    return Configuration(
        context_length=next(_said(files, _CONTEXT_LENGTH_KEYS, _as_length), None),
        end_tokens=next(_said(files, _END_TOKEN_KEYS, _as_ids), frozenset()) | _end_token_of_tokenizer(files),
        begin_token=next(_said(files, _BEGIN_TOKEN_KEYS, _as_id), None),
        processors={} if penalty == 1 else {"repetition_penalty": {"penalty": penalty}},
    )


_READ = ("config.json", "generation_config.json", "genai_config.json", "tokenizer_config.json")

_Files = dict[str, "tuple[Path, dict[str, Any]] | None"]


def _read_first(folders: Sequence[Path], name: str) -> tuple[Path, dict[str, Any]] | None:
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON: {error}; get it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must be a JSON object, found {type(content).__name__}")
    return path, content


def _said(files: _Files, keys: Sequence[tuple[str, tuple[str, ...]]], convert: Callable[[Path, str, Any], T]) -> Iterator[T]:
    """What the files say under these keys, in their order; null says nothing."""
    for name, key_path in keys:
        found = files[name]
        if found is None:
            continue
        path, value = found
        inner: Any = value
        for key in key_path:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if inner is not None:
            yield convert(path, ".".join(key_path), inner)


def _end_token_of_tokenizer(files: _Files) -> frozenset[int]:
    """The id of the token that `tokenizer_config.json` calls `eos_token`, if it also says which id that text has."""
    found = files["tokenizer_config.json"]
    content = {} if found is None else found[1]
    said, known = content.get("eos_token"), content.get("added_tokens_decoder")
    text = said.get("content") if isinstance(said, dict) else said
    if text is None or not isinstance(known, dict):
        return frozenset()
    said_of = ((token, entry.get("content")) for token, entry in known.items() if isinstance(entry, dict))
    return frozenset(int(token) for token, content in said_of if content == text and token.isdecimal())


def _as_length(path: Path, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{path}: {key} must be a number of tokens, found {value!r}")
    return value


def _as_penalty(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{path}: {key} must be a number above 0, found {value!r}")
    return float(value)


def _as_id(path: Path, key: str, value: Any) -> int:
    first = value[0] if isinstance(value, list) and value else value
    if type(first) is not int or first < 0:
        raise ModelError(f"{path}: {key} must be a token id, found {value!r}")
    return first


def _as_ids(path: Path, key: str, value: Any) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise ModelError(f"{path}: {key} must be a token id or a list of them, found {value!r}")
    return frozenset(ids)
