"""A tokenizer of Hugging Face's library `tokenizers`, whatever file it was made from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from miniort.errors import TokenizerError

if TYPE_CHECKING:
    import tokenizers


PRINTABLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that byte-level BPE writes as the character of that number; the others are written as U+0100 and on, in their order."""

BYTE_OF_CHARACTER = {chr(byte): byte for byte in PRINTABLE_BYTES} | {
    chr(0x100 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE_BYTES)
}


class FastTokenizer:
    """A `Tokenizer` around one of the library. Such tokenizers are called fast there, for they aren't written in Python."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # A file may ask for prompts to be cut or filled up to some length. Training wants that; a prompt must stay what it is.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @cached_property
    def vocabulary_size(self) -> int:
        """One more than the largest id, added tokens included; ids may have gaps."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer's own template adds. TokenizerError for a lone surrogate.

        add_special_tokens: False for a text that has them already, such as a conversation that a chat template wrote.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text must be valid Unicode, found a lone surrogate at character {error.start}") from None
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens. Bytes that are no valid UTF-8 come out as U+FFFD, unknown ids as nothing."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def to_json(self) -> str:
        """All of it as the content of a `tokenizer.json`."""
        return str(self._tokenizer.to_str())

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8, where it isn't the first. Empty for special tokens and for ids that there aren't.

        TokenizerError for a tokenizer whose tokens are spelled neither as bytes (GPT-2) nor with ▁ for a space (SentencePiece).
        """
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._special_tokens:
            return b""
        if token in self._plain_added_tokens:
            return piece.encode()
        return self._spelling(piece)

    @cached_property
    def _special_tokens(self) -> frozenset[int]:
        return frozenset(token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special)

    @cached_property
    def _plain_added_tokens(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder()) - self._special_tokens

    @cached_property
    def _spelling(self) -> Callable[[str], bytes]:
        """How the bytes of a token are written in the vocabulary, by the decoder that reads it."""
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        parts = {each["type"] for each in decoder.get("decoders", [decoder]) if each}
        if "ByteLevel" in parts:
            return _bytes_of_byte_level
        if parts & {"Metaspace", "ByteFallback"}:
            return _bytes_of_sentencepiece
        raise TokenizerError(f"the bytes of a token can't be told of a tokenizer whose decoder is {', '.join(sorted(parts)) or 'none'}")


def _bytes_of_byte_level(piece: str) -> bytes:
    return bytes(BYTE_OF_CHARACTER[character] for character in piece)


def _bytes_of_sentencepiece(piece: str) -> bytes:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
