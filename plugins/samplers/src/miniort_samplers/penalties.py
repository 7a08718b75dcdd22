"""Penalties for tokens that are in the text already. Padding is no text, and costs nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from miniort.errors import GenerationError
from miniort.generation.sampling import LogitsProcessor, TokenHistory
from miniort.types import FloatArray, IntArray
from miniort_samplers.probabilities import as_float32


def repetition_penalty(penalty: float) -> LogitsProcessor:
    """logit · penalty where it's negative, logit / penalty where not, once for each token of the prompt and of what was generated.

    Keskar et al. 2019 (CTRL), as Hugging Face does it. Above 1 repetition becomes less likely. GenerationError unless it's above 0.
    """
    if not (penalty > 0 and np.isfinite(penalty)):
        raise GenerationError(f"repetition_penalty must be a finite number above 0, found {penalty}; 1 changes nothing")
    factor = np.float32(penalty)

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits)
        seen = _counts(history, scores.shape[1], since=0) > 0
        result: FloatArray = np.where(seen, np.where(scores < 0, scores * factor, scores / factor), scores)
        return result

    return process


def frequency_penalty(penalty: float) -> LogitsProcessor:
    """logit - penalty · (how often the token was generated): OpenAI's definition, by which the prompt doesn't count.

    GenerationError unless it's a finite number.
    """
    _require_finite("frequency_penalty", penalty)

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits)
        counts = _counts(history, scores.shape[1], since=history.prompt_length).astype(np.float32)
        result: FloatArray = scores - np.float32(penalty) * counts
        return result

    return process


def presence_penalty(penalty: float) -> LogitsProcessor:
    """logit - penalty where the token was generated: OpenAI's definition, by which the prompt doesn't count.

    GenerationError unless it's a finite number.
    """
    _require_finite("presence_penalty", penalty)

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits)
        present = _counts(history, scores.shape[1], since=history.prompt_length) > 0
        result: FloatArray = scores - np.where(present, np.float32(penalty), np.float32(0))
        return result

    return process


def _require_finite(name: str, penalty: float) -> None:
    if not np.isfinite(penalty):
        raise GenerationError(f"{name} must be a finite number, found {penalty}; 0 changes nothing")


def _counts(history: TokenHistory, vocabulary: int, since: int) -> IntArray:
    """How often each token is in tokens[:, since:], padding left out: [batch, vocabulary]. So are tokens without a logit."""
    tokens = history.tokens[:, since:]
    batch, _ = tokens.shape
    counted: npt.NDArray[np.bool_] = (history.mask[:, since:] != 0) & (tokens >= 0) & (tokens < vocabulary)
    flat = (np.arange(batch)[:, None] * vocabulary + tokens)[counted]
    return np.bincount(flat, minlength=batch * vocabulary).reshape(batch, vocabulary)
