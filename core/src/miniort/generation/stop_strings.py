"""Texts that end a continuation. What might be the beginning of one is held back, so that nothing is shown that must be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from miniort.errors import GenerationError


class StopStrings:
    """Lets text through up to the first stop string, whatever pieces it comes in.

    `found`: the stop string that ended the text, None so far. It's the one that is complete first; of several that end at one place, the
    longest. GenerationError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise GenerationError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Take the next piece, and return the text that is certain now. Nothing follows once a stop string was found."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[: end - len(self.found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, for no piece will follow."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, but isn't."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
