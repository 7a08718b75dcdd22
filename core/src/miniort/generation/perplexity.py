"""How well a decoder foretells a text: the probability that it gives each token, behind those before it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from miniort.errors import GenerationError
from miniort.generation.decoder import Decoder
from miniort.types import FloatArray, IntArray

CHUNK = 128
"""Tokens that are run at a time: their logits are the largest array there is."""


@dataclass(frozen=True)
class TextLikelihood:
    """What a decoder gives a text.

    nats: -Σ log P(token | those before it), over the tokens that have any before them; tokens: how many these are. seconds: for all runs.
    """

    nats: float
    tokens: int
    seconds: float

    @property
    def nats_per_token(self) -> float:
        """The cross-entropy."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats / tokens); infinite if the model holds a token for impossible."""
        try:
            return math.exp(self.nats_per_token)
        except OverflowError:
            return math.inf


def text_likelihood(
    decoder: Decoder,
    tokens: Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Callable[[TextLikelihood], None] | None = None,
) -> TextLikelihood:
    """Likelihood of a text, window by window where it's longer than the model can see.

    window: tokens that are seen at once, None for the model's context. stride: how far a window lies behind the one before; the tokens that
    both have are context in the second, and counted in the first alone. None for half a window.
    progress: called after each window with the likelihood of the text until there.
    GenerationError for a text of less than two tokens, and a window or stride that can't be.
    """
    size = _window(decoder, len(tokens), window)
    step = max(1, size // 2) if stride is None else stride
    if not 1 <= step < size:
        raise GenerationError(f"the stride must be at least 1 and less than the window of {size} tokens, found {step}")
    started = time.perf_counter()
    nats, end = 0.0, 1
    for start in range(0, len(tokens), step):
        last = min(start + size, len(tokens))
        counted = last - end  # of this window, the last so many haven't been counted yet
        scores = next_token_log_probabilities(decoder, tokens[start:last])
        nats -= float(scores[len(scores) - counted :].sum(dtype=np.float64))
        end = last
        so_far = TextLikelihood(nats, end - 1, time.perf_counter() - started)
        if progress is not None:
            progress(so_far)
        if end == len(tokens):
            break
    return so_far


def next_token_log_probabilities(decoder: Decoder, tokens: Sequence[int]) -> FloatArray:
    """log P(token i + 1 | tokens 0 … i) for each i: [len(tokens) - 1] float64. They're run in chunks, over a cache.

    A graph that gives logits of the last position alone, or takes one token at a time, is run token by token.
    """
    ids = np.asarray([tokens], np.int64)
    cache = decoder.new_cache()
    scores: list[FloatArray] = []
    longest = CHUNK if decoder.takes_several_tokens else 1
    chunk, at = 1, 0  # one token first: a graph for the prompt often gives the last position's logits alone
    while at < ids.shape[1] - 1:
        new = ids[:, at : min(at + chunk, ids.shape[1] - 1)]
        logits = decoder.forward(new, np.ones((1, at + new.shape[1]), np.int64), cache, every_logit=True)[0]  # [n, vocabulary]
        if len(logits) < new.shape[1]:
            longest = chunk = 1  # what wasn't committed is forgotten
            continue
        cache.commit(new.shape[1])
        scores.append(_log_probabilities(logits, ids[0, at + 1 : at + 1 + new.shape[1]]))
        chunk = longest
        at += new.shape[1]
    return np.concatenate(scores) if scores else np.empty(0, np.float64)


def _log_probabilities(logits: FloatArray, chosen: IntArray) -> FloatArray:
    """log softmax(logits) at one place of each row. logits: [n, vocabulary]; chosen: [n] ids -> [n] float64"""
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    normalizer = np.log(np.exp(exact).sum(axis=1))
    result: FloatArray = exact[np.arange(len(chosen)), chosen] - normalizer
    return result


def _window(decoder: Decoder, length: int, window: int | None) -> int:
    if length < 2:
        raise GenerationError(f"a text needs at least two tokens for its likelihood, found {length}")
    limit = decoder.context_length
    if window is not None and window < 2:
        raise GenerationError(f"the window must be at least 2 tokens, found {window}")
    if window is not None and limit is not None and window > limit:
        raise GenerationError(f"a window of {window} tokens is more than the model's context of {limit}")
    return min(each for each in (window, limit, max(length, 2)) if each is not None)
