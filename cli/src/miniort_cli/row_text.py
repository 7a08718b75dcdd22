"""One row of a batch as text: its tokens as they come, up to a stop string, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from miniort.generation import StreamingDetokenizer, Tokenizer
from miniort.generation.scores import StepScores
from miniort.generation.stop_strings import StopStrings

PROMPT_TAIL = 16
"""Tokens of the prompt that the detokenizer sees first: what follows may need them to be decoded (a character's bytes, a space)."""


@dataclass(frozen=True)
class Step:
    """What one token brought: the text that is certain since, often empty; and its scores, None if no token came but held-back text."""

    text: str
    scores: StepScores | None = None


@dataclass
class RowText:
    """A prompt and what follows it. `end_tokens` and `stops` end it; `limit` is the most tokens that it may have, None for no limit.

    `score`: what a search gave it, None where none did. `finish_reason`, empty before the end: `end` is an end token, `stop` a stop
    string, `length` the wanted number of tokens, `context` the model's full context.
    """

    tokenizer: Tokenizer
    prompt: str
    prompt_tokens: Sequence[int]
    end_tokens: frozenset[int]
    stops: Sequence[str] = ()
    limit: int | None = None
    score: float | None = None
    tokens: list[int] = field(default_factory=list)
    scores: list[StepScores] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""

    def __post_init__(self) -> None:
        self._stops = StopStrings(self.stops)
        self._detokenizer = StreamingDetokenizer(self.tokenizer.decode)
        tail = self.prompt_tokens[-PROMPT_TAIL:]
        # How much of what the detokenizer says next is still the prompt's.
        self._repeated = len(self.tokenizer.decode(tail)) - len(self._detokenizer.push(tail))

    def take(self, token: int, scores: StepScores | None = None) -> Step:
        """The next token. An end token has no text; after the end nothing is taken."""
        if self.finish_reason:
            return Step("")
        self.tokens.append(token)
        if scores is not None:
            self.scores.append(scores)
        if token in self.end_tokens:
            self.finish_reason = "end"
            return Step("", scores)
        text = self._certain(self._detokenizer.push(token))
        if self._stops.found is not None:
            self.finish_reason = "stop"
        return Step(text, scores)

    def finish(self) -> Step:
        """The text that was held back, for no token follows."""
        rest = self._certain(self._detokenizer.flush())
        if self._stops.found is not None:
            self.finish_reason = "stop"
        else:
            held = self._stops.flush()
            self.text += held
            rest += held
        if not self.finish_reason:
            self.finish_reason = "length" if self.limit is not None and len(self.tokens) >= self.limit else "context"
        return Step(rest)

    def _certain(self, text: str) -> str:
        """What of a new piece of text is no more the prompt's, and before any stop string."""
        text, self._repeated = text[self._repeated :], max(0, self._repeated - len(text))
        text = self._stops.push(text)
        self.text += text
        return text
