"""The sampling pipeline: logits processors in their order, then one sampler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from miniort.errors import GenerationError, PluginError
from miniort.types import FloatArray, IntArray

LogitsProcessor: TypeAlias = Callable[[IntArray, FloatArray], FloatArray]
"""`(tokens [batch, time], logits [batch, vocabulary]) -> logits`. Never writes into what it's given."""

Sampler: TypeAlias = Callable[[FloatArray, np.random.Generator], IntArray]
"""`(logits [batch, vocabulary], rng) -> ids [batch]`. All randomness comes from `rng`."""


@dataclass(frozen=True)
class LogitsProcessorInfo:
    """A logits processor that a plugin offers. `create(**options)` makes one; those with higher `priority` run first."""

    name: str
    create: Callable[..., LogitsProcessor]
    priority: int = 0
    summary: str = ""


@dataclass(frozen=True)
class SamplerInfo:
    """A sampler that a plugin offers. `create(**options)` makes one."""

    name: str
    create: Callable[..., Sampler]
    summary: str = ""


def create_with_options(noun: str, name: str, create: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """`create(*arguments, **options)`. PluginError that lists the options there are if one is unknown."""
    parameters = list(inspect.signature(create).parameters.values())
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters[len(arguments) :]]
        for option in options:
            if option not in known:
                raise PluginError(f"{noun} {name!r} has no option {option!r}; its options: {', '.join(known) or 'none'}")
    return create(*arguments, **options)


def choose(
    processors: Sequence[LogitsProcessor], sampler: Sampler, tokens: IntArray, logits: FloatArray, rng: np.random.Generator
) -> IntArray:
    """The next token of each row: tokens [batch, time], logits [batch, vocabulary] -> ids [batch]."""
    for process in processors:
        logits = process(tokens, logits)
    ids = np.asarray(sampler(logits, rng))
    if ids.shape != logits.shape[:1] or ids.dtype.kind != "i":
        raise GenerationError(
            f"the sampler must return integer ids of shape [{logits.shape[0]}], found {ids.dtype} of shape {list(ids.shape)}"
        )
    return ids.astype(np.int64, copy=False)
