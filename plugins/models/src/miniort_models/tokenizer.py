"""Opens a tokenizer, whatever file it lies in: `tokenizer.json`, GPT-2's `vocab.json` and `merges.txt`, or a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miniort.errors import ModelError, TokenizerError
from miniort_models.fast_tokenizer import FastTokenizer
from miniort_models.gguf_tokenizer import open_gguf_tokenizer
from miniort_models.gpt2_tokenizer import MERGES_FILE, VOCABULARY_FILE, open_gpt2_tokenizer
from miniort_models.weights.gguf_header import read_header

TOKENIZER_FILE = "tokenizer.json"
_SENTENCEPIECE_FILE = "tokenizer.model"


def find_tokenizer(folders: Sequence[Path]) -> Path | None:
    """The file of a tokenizer in the first of the folders that has one, None where none has."""
    for folder in folders:
        if (folder / TOKENIZER_FILE).is_file():
            return folder / TOKENIZER_FILE
        if (folder / VOCABULARY_FILE).is_file() and (folder / MERGES_FILE).is_file():
            return folder / VOCABULARY_FILE
    return None


def open_tokenizer(path: Path) -> FastTokenizer:
    """Read a `tokenizer.json`; the pair `vocab.json` and `merges.txt`, either of which may be named; a GGUF file; or a folder with one.

    TokenizerError if it's missing or damaged.
    """
    if path.is_dir():
        found = find_tokenizer([path])
        if found is None:
            pickled = f"; {_SENTENCEPIECE_FILE} is there, which isn't read" if (path / _SENTENCEPIECE_FILE).is_file() else ""
            raise TokenizerError(f"{path} holds no {TOKENIZER_FILE}, and not both {VOCABULARY_FILE} and {MERGES_FILE}{pickled}")
        path = found
    if path.suffix.lower() == ".gguf":
        try:
            return open_gguf_tokenizer(read_header(path))
        except ModelError as error:
            raise TokenizerError(str(error)) from None
    if path.name in (VOCABULARY_FILE, MERGES_FILE):
        return open_gpt2_tokenizer(path.with_name(VOCABULARY_FILE), path.with_name(MERGES_FILE))
    return _open_json(path)


def _open_json(path: Path) -> FastTokenizer:
    import tokenizers  # slow to import, and not needed before a text is

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} can't be read: {error}") from None
    try:
        return FastTokenizer(tokenizers.Tokenizer.from_str(text))
    except Exception as error:  # the library raises nothing more special
        raise TokenizerError(f"{path} is no tokenizer that the tokenizers library reads: {str(error).splitlines()[0]}") from None
