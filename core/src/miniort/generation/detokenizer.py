"""Text out of a stream of tokens: each piece as soon as it's certain, never half a character, and nothing is taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miniort.types import IntArray

_REPLACEMENT = "\ufffd"

_CHARACTER = 4
"""The most bytes of a character in UTF-8. A token has a byte at least, so an unfinished character is at most the last three tokens."""

_WINDOW = 16
"""Tokens that are decoded again where no character has ended for long: enough for UTF-8 to be in step again before the last of them."""


class StreamingDetokenizer:
    """Turns tokens into text as they come. All pieces together are `decode` of all tokens.

    A token may be part of a character, so text that ends in U+FFFD waits: either the rest of the character comes, or later tokens show
    that the bytes were invalid. A decoder may also drop the space in front of its first token (SentencePiece's "▁Hello"), so new tokens
    are never decoded alone, but behind those of the last piece. Work per token doesn't grow with the text.

    To go on from a prompt, push its last few tokens first and leave out what that returns.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._start_afresh()

    def push(self, ids: int | np.integer[Any] | Sequence[int] | IntArray) -> str:
        """Take one token or several, and return the text that is certain now and wasn't before; often "" and then more at once."""
        if isinstance(ids, (int, np.integer)):
            return self._push_token(int(ids))
        return "".join([self._push_token(int(token)) for token in ids])

    def flush(self) -> str:
        """The text that was held back, as it is, for no token will follow. The next one starts a new text."""
        rest = self._text[self._sent :]
        self._start_afresh()
        return rest

    def _start_afresh(self) -> None:
        self._window: list[int] = []  # the tokens of the last piece, then those since; decoded together
        self._text = ""  # decode(window)
        self._sent = 0  # characters of it that were returned
        self._new = 0  # tokens of the window that came since the last piece that ended with a character

    def _push_token(self, token: int) -> str:
        window = [*self._window, token]
        text = self._decode(window)
        if text and text == self._text and not self._decode([token]):
            return ""  # a special token, which has no text and changes none; kept, such tokens would pile up
        self._window, self._text = window, text
        self._new += 1

        whole = text.rstrip(_REPLACEMENT)
        certain = len(whole)
        if self._new >= _CHARACTER:  # an unfinished character would have begun later: what is before that is invalid
            certain = max(certain, len(text) - (_CHARACTER - 1))
        piece = text[self._sent : certain]
        self._sent = max(self._sent, certain)

        if piece and whole == text:
            self._keep_last(self._new, unsent="")
            self._new = 0
        elif len(window) >= 2 * _WINDOW and whole != text:
            self._keep_last(_WINDOW, unsent=text[self._sent :])
        return piece

    def _keep_last(self, count: int, unsent: str) -> None:
        """Shorten the window to its last tokens, if the text that wasn't returned yet is still the end of theirs."""
        window = self._window[-count:]
        text = self._decode(window)
        if text.endswith(unsent):
            self._window, self._text, self._sent = window, text, len(text) - len(unsent)
