"""GPT-2's tokenizer out of the two files that OpenAI published it as: `vocab.json` and `merges.txt`."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniort.errors import TokenizerError
from miniort_models.fast_tokenizer import FastTokenizer

if TYPE_CHECKING:
    import tokenizers

VOCABULARY_FILE = "vocab.json"
MERGES_FILE = "merges.txt"

END_OF_TEXT = "<|endoftext|>"
"""GPT-2's one special token."""


def open_gpt2_tokenizer(vocabulary: Path, merges: Path) -> FastTokenizer:
    """Byte-level BPE with GPT-2's rule for splitting a text into words.

    vocabulary: tokens to ids, as JSON. merges: two pieces a line, the most frequent pair first.
    Tokens that `tokenizer_config.json` or `added_tokens.json` beside the vocabulary add are added, and so is `<|endoftext|>` where the
    vocabulary has it. TokenizerError that names a file that is missing or damaged.
    """
    ids = _read_json(vocabulary)
    if any(type(value) is not int for value in ids.values()):
        raise TokenizerError(f"{vocabulary} must map each token to its id; get it again")
    tokenizer = byte_level_bpe(ids, _read_merges(merges), str(merges))
    named = _added_tokens(vocabulary.parent)
    added = dict(named.values())
    if END_OF_TEXT in ids:
        added.setdefault(END_OF_TEXT, True)
    add_tokens(tokenizer, added)
    for token, (text, _) in named.items():
        found = tokenizer.token_to_id(text)
        if found != token:
            raise TokenizerError(
                f"{vocabulary.parent}: the added token {text!r} must have the id {token}, behind the others it has {found}"
            )
    return FastTokenizer(tokenizer)


def byte_level_bpe(ids: dict[str, int], merges: list[tuple[str, str]], name: str, **options: Any) -> tokenizers.Tokenizer:
    """A tokenizer whose tokens are written as bytes are by GPT-2, with GPT-2's split. TokenizerError for merges that aren't of its tokens.

    options: more for `tokenizers.models.BPE`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    for left, right in merges:  # the library panics at those that are wrong
        for piece in (left, right, left + right):
            if piece not in ids:
                raise TokenizerError(f"{name}: the merges don't fit the vocabulary, which has no {piece!r}; get both again")
    tokenizer = Tokenizer(models.BPE(ids, merges, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_tokens(tokenizer: tokenizers.Tokenizer, added: dict[str, bool]) -> None:
    """Tokens that are found in a text before it's split; True where they're special, and so have no text of their own.

    Those that aren't in the vocabulary get the next ids, in their order.
    """
    from tokenizers import AddedToken

    for special, group in groupby(added, key=added.__getitem__):
        chosen = [AddedToken(text, special=special, normalized=False) for text in group]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(chosen)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} can't be read as JSON: {error}; get it again") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must be a JSON object, found {type(content).__name__}; get it again")
    return content


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} can't be read: {error}; it belongs beside {VOCABULARY_FILE}") from None
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.rstrip("\r").partition(" ")
        if not (left and space and right) or " " in right:
            raise TokenizerError(f"{path}: line {number} must be two pieces with a space between, found {line[:40]!r}")
        merges.append((left, right))
    return merges


def _added_tokens(folder: Path) -> dict[int, tuple[str, bool]]:
    """Tokens that the files beside a vocabulary add to it, by their ids in order, and whether they're special."""
    added: dict[int, tuple[str, bool]] = {}
    if (folder / "added_tokens.json").is_file():
        added |= {token: (text, False) for text, token in _read_json(folder / "added_tokens.json").items()}
    if (folder / "tokenizer_config.json").is_file():
        entries = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
        added |= {int(token): (entry["content"], bool(entry.get("special"))) for token, entry in entries.items()}
    return dict(sorted(added.items()))
