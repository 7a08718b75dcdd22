"""The sampling pipeline: logits processors in their order, then one sampler; or a search, which keeps several continuations at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from miniort.errors import GenerationError, PluginError
from miniort.types import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class TokenHistory:
    """What stands before the token that is about to be chosen.

    tokens, mask: [batch, time]; the mask is 0 where a row is padded on the left, and what the tokens are there means nothing.
    prompt_length: the first that many of `time` were given, padding included; what follows was generated.
    end_tokens: ids that end a row. A row that has ended goes on with its end token.
    remaining: tokens that may still be generated, the one to be chosen included; None where nothing sets a limit.
    """

    tokens: IntArray
    mask: IntArray
    prompt_length: int
    end_tokens: frozenset[int] = frozenset()
    remaining: int | None = None

    def row(self, index: int) -> IntArray:
        """One row without its padding, [time of that row]."""
        row: IntArray = self.tokens[index][self.mask[index] != 0]
        return row

    def generated(self, index: int) -> IntArray:
        """What was generated in one row: [time - prompt_length]."""
        tokens: IntArray = self.tokens[index, self.prompt_length :]
        return tokens


LogitsProcessor: TypeAlias = Callable[[TokenHistory, FloatArray], FloatArray]
"""`(history, logits [batch, vocabulary]) -> logits`. Never writes into what it's given, and remembers nothing."""

Sampler: TypeAlias = Callable[[FloatArray, Sequence[np.random.Generator]], IntArray]
"""`(logits [batch, vocabulary], rngs, one per row) -> ids [batch]`. All randomness comes from `rngs`, a row's from its own."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """A whole continuation of one prompt that a search found: tokens [new], the end token included, and its score; higher is better."""

    tokens: IntArray
    score: float


class SearchRun(Protocol):
    """One search under way. The rows of prompt p are p·width … p·width + width - 1; at first they're all alike."""

    @property
    def is_done(self) -> bool:
        """Whether no further step could change the result."""

    def step(self, history: TokenHistory, scores: FloatArray) -> tuple[IntArray, IntArray]:
        """How each row goes on: (rows, ids), [prompts·width] each. Row i becomes what row `rows[i]` was, followed by `ids[i]`.

        scores: [prompts·width, vocabulary], log-probabilities behind the logits processors. `history.remaining` is 1 in the last step.
        """

    def continuations(self) -> list[list[Continuation]]:
        """What was found for each prompt, the best first."""


@runtime_checkable
class Search(Protocol):
    """Chooses whole continuations, where a sampler chooses one token."""

    @property
    def width(self) -> int:
        """How many rows it keeps for each prompt."""

    def start(self, prompts: int) -> SearchRun:
        """A new search for that many prompts."""


@dataclass(frozen=True)
class LogitsProcessorInfo:
    """A logits processor that a plugin offers. `create(**options)` makes one; those with higher `priority` run first.

    An option named `tokenizer` that the user doesn't give is the model's own.
    """

    name: str
    create: Callable[..., LogitsProcessor]
    priority: int = 0
    summary: str = ""


@dataclass(frozen=True)
class SamplerInfo:
    """A sampler or a search that a plugin offers. `create(**options)` makes one."""

    name: str
    create: Callable[..., Sampler | Search]
    summary: str = ""


def create_with_options(noun: str, name: str, create: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`create(*arguments, **options)`. PluginError that lists the options there are if one is unknown, or names those that are missing."""
    parameters = list(inspect.signature(create).parameters.values())
    named = [each for each in parameters[len(arguments) :] if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in named]
        for option in options:
            if option not in known:
                raise PluginError(f"{noun} {name!r} has no option {option!r}; its options: {', '.join(known) or 'none'}")
    missing = [parameter.name for parameter in named if parameter.default is parameter.empty and parameter.name not in options]
    if missing:
        raise PluginError(f"{noun} {name!r} needs the option {', '.join(map(repr, missing))}; given: {', '.join(options) or 'none'}")
    return create(*arguments, **options)


def process(processors: Sequence[LogitsProcessor], history: TokenHistory, logits: FloatArray) -> FloatArray:
    """Logits [batch, vocabulary] behind all processors, in the order given."""
    for processor in processors:
        logits = processor(history, logits)
    return logits


def choose(
    processors: Sequence[LogitsProcessor],
    sampler: Sampler,
    history: TokenHistory,
    logits: FloatArray,
    rngs: Sequence[np.random.Generator],
) -> IntArray:
    """The next token of each row: logits [batch, vocabulary], one generator of random numbers per row -> ids [batch]."""
    ids = np.asarray(sampler(process(processors, history, logits), rngs))
    if ids.shape != logits.shape[:1] or ids.dtype.kind != "i":
        raise GenerationError(
            f"the sampler must return integer ids of shape [{logits.shape[0]}], found {ids.dtype} of shape {list(ids.shape)}"
        )
    return ids.astype(np.int64, copy=False)


def log_softmax(logits: FloatArray) -> FloatArray:
    """Log-probabilities, x - max - log Σ exp(x - max) over the vocabulary: [batch, vocabulary] -> the same shape, float32."""
    shifted = np.asarray(logits, np.float32)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
