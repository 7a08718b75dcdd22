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

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with whatever the model wants in front of it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids. Bytes that are no valid UTF-8 (yet) come out as U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8, where it isn't the first; it may be a part of a character. Empty for special tokens."""


@dataclass(frozen=True)
class DecoderSource:
    """A decoder that was found, and what is known of it.

    graphs: one ONNX file that takes an empty past, or two: the one for the prompt (no past), then the one for each step (with past).
    tokenizer: opens the tokenizer, None where there is none beside the graphs.
    context_length: the most tokens that the model can see, None where nothing says so.
    end_tokens: ids that end a text.
    processors: logits processors with their options that the model's makers want where the user asks for no sampler and no processors.
    """

    name: str
    graphs: tuple[Path, ...]
    tokenizer: Callable[[], Tokenizer] | None = None
    context_length: int | None = None
    end_tokens: frozenset[int] = frozenset()
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
