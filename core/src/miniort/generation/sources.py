"""Where a decoder comes from: what a model-format plugin finds out about a file, a folder or a name, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to token ids, and back."""

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with whatever the model wants in front of it.

        add_special_tokens: False for a text that has that already, such as what a chat template wrote.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids. Bytes that are no valid UTF-8 (yet) come out as U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8, where it isn't the first; it may be a part of a character. Empty for special tokens."""


class ChatTemplate(Protocol):
    """How a model wants a conversation written down."""

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """A conversation as text, special tokens and all.

        messages: each with its `role` (`system`, `user` or `assistant`) and its `content`, the first one first.
        add_generation_prompt: end with what stands in front of the assistant's next message.
        ChatTemplateError for a conversation that the template refuses, such as one that begins with the assistant.
        """


@dataclass(frozen=True)
class DecoderSource:
    """A decoder that was found, and what is known of it.

    graphs: one ONNX file that takes an empty past, or two: the one for the prompt (no past), then the one for each step (with past).
    tokenizer: opens the tokenizer, None where there is none beside the graphs.
    context_length: the most tokens that the model can see, None where nothing says so.
    end_tokens: ids that end a text, or a turn of a conversation.
    begin_token: the id that a text begins with, None where nothing says so; an empty prompt starts from it.
    chat_template: opens the chat template, None where there is none.
    processors: logits processors with their options that the model's makers want where the user asks for no sampler and no processors.
    """

    name: str
    graphs: tuple[Path, ...]
    tokenizer: Callable[[], Tokenizer] | None = None
    context_length: int | None = None
    end_tokens: frozenset[int] = frozenset()
    begin_token: int | None = None
    chat_template: Callable[[], ChatTemplate] | None = None
    processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelFormat:
    """A kind of model. `recognise(source)` says cheaply whether it's one of this kind; `open(source)` finds its parts.

    Formats with a higher `priority` are asked first. `open` raises ModelError that says what is missing.
    """

    name: str
    recognise: Callable[[str], bool]
    open: Callable[[str], DecoderSource]
    priority: int = 0
    summary: str = ""


@dataclass(frozen=True)
class Architecture:
    """A kind of decoder whose graphs can be written from its weights.

    name: what `config.json` calls it under `model_type`.
    build: `build(graph, config)` writes one of the decoder's two graphs. It's called once for each, and writes the same both times: what
    differs between them is `graph`'s own business, which is miniort-models' `DecoderGraph`. config: a parsed `config.json`. ModelError for
    a variant that it doesn't compute.
    """

    name: str
    build: Callable[[Any, Mapping[str, Any]], None]
    summary: str = ""
