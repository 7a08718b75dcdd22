"""Tokenizers in the form of Hugging Face's `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from miniort.errors import TokenizerError

if TYPE_CHECKING:
    import tokenizers


class JsonTokenizer:
    """A tokenizer that was read from a `tokenizer.json`; see `open_tokenizer`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # The file may ask for prompts to be cut or filled up to some length. Training wants that; a prompt must stay what it is.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @cached_property
    def vocabulary_size(self) -> int:
        """One more than the largest id, added tokens included; ids may have gaps."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer's own template adds. TokenizerError for a lone surrogate."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text must be valid Unicode, found a lone surrogate at character {error.start}") from None
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens. Bytes that are no valid UTF-8 come out as U+FFFD, unknown ids as nothing."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def open_tokenizer(path: Path) -> JsonTokenizer:
    """Read a `tokenizer.json`. TokenizerError if it's missing or damaged."""
    import tokenizers  # slow to import, and not needed before a text is

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} can't be read: {error}") from None
    try:
        return JsonTokenizer(tokenizers.Tokenizer.from_str(text))
    except Exception as error:  # the library raises nothing more special
        raise TokenizerError(f"{path} is no tokenizer that the tokenizers library reads: {str(error).splitlines()[0]}") from None
