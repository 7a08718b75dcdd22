"""A conversation with a decoder: what was said, written down by the model's chat template, over one cache that's kept from turn to turn."""

from __future__ import annotations

import collections.abc
import time
from collections.abc import Callable
from dataclasses import dataclass

from miniort.errors import CacheError, GenerationError
from miniort.generation import Decoder, Generator, generate
from miniort_cli.row_text import RowText

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """What one answer took. tokens: of the conversation as it was asked; reused: those of them that weren't computed again.

    finish_reason: as of `RowText`; `interrupted` where the user stopped it. seconds: from the question to the last token.
    """

    tokens: int
    reused: int
    new_tokens: int
    finish_reason: str
    first_token_seconds: float | None
    seconds: float


class Conversation:
    """Messages, and the generator that answers them.

    new_generator: makes one with an empty cache. system: what the model is told first, None for what its template says by itself.
    """

    def __init__(self, decoder: Decoder, new_generator: Callable[[], Generator], system: str | None = None) -> None:
        self.decoder = decoder
        self.tokenizer = decoder.open_tokenizer()
        self.template = decoder.open_chat_template()
        self._new_generator = new_generator
        self.generator = new_generator()
        self.system = system
        self.turns: list[Turn] = []
        self._said: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """All that was said, the system's message first."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self._said]

    def reset(self) -> None:
        """Forget what was said, but not the system's message. The cache goes on from what the next conversation has in common."""
        self._said = []

    def forget_last(self) -> None:
        """Take the last question and its answer back."""
        while self._said and self._said.pop()["role"] != "user":
            pass

    def ask(self, text: str, max_new_tokens: int | None) -> collections.abc.Generator[str, None, None]:
        """The answer, in the pieces in which its text becomes certain. What was answered stays said, even if it's stopped on the way.

        Only what the model hasn't seen yet is run. GenerationError if the conversation is longer than the model's context, ModelError
        if the template refuses it. The question is taken back then, and if it's stopped before anything was answered.
        """
        asked = time.perf_counter()
        self._said.append({"role": "user", "content": text})
        try:
            tokens = self._encode()
            reused = self._go_on_from(tokens)
        except BaseException:
            self._said.pop()
            raise
        answer = RowText(self.tokenizer, "", tokens, self.generator.end_tokens, limit=max_new_tokens)
        first: float | None = None
        interrupted = True
        try:
            for generated in generate(self.generator, max_new_tokens):
                piece = answer.take(int(generated.ids[0])).text
                first = first or time.perf_counter() - asked
                if piece:
                    yield piece
            interrupted = False
            rest = answer.finish().text
            if rest:
                yield rest
        finally:
            if interrupted and not answer.text:
                self._said.pop()
            else:
                self._said.append({"role": "assistant", "content": answer.text})
            reason = "interrupted" if interrupted else answer.finish_reason
            self.turns.append(Turn(len(tokens), reused, len(answer.tokens), reason, first, time.perf_counter() - asked))

    def _encode(self) -> list[int]:
        ids = self.tokenizer.encode(self.template.render(self.messages), add_special_tokens=False)
        limit = self.decoder.context_length
        if limit is not None and len(ids) > limit:
            raise GenerationError(
                f"the conversation has {len(ids)} tokens with this message, more than the model's {limit}; /reset begins a new one"
            )
        return ids

    def _go_on_from(self, tokens: list[int]) -> int:
        """Give the generator the conversation. Returns how many tokens of it the cache holds already."""
        try:
            return self.generator.continue_from(tokens)
        except CacheError:  # a layout that lets go of old tokens can't always go back; then all is run again, which `Turn.reused` shows
            self.generator = self._new_generator()
            return self.generator.continue_from(tokens)
