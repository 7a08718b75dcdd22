"""Softmax of logits in float32, and a mask put on them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from miniort.types import FloatArray


def as_float32(logits: FloatArray) -> FloatArray:
    """Logits in the type that all processors calculate and answer in."""
    return np.asarray(logits, dtype=np.float32)


def log_softmax(scores: FloatArray) -> FloatArray:
    """x - max - log Σ exp(x - max) over the vocabulary: [batch, vocabulary] float32 -> the same. NaN for a row of nothing but -inf."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = scores - scores.max(axis=-1, keepdims=True)
        result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def softmax(scores: FloatArray) -> FloatArray:
    """exp(x - max) / Σ exp(x - max) over the vocabulary: [batch, vocabulary] float32 -> the same. NaN for a row of nothing but -inf."""
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result: FloatArray = powers / powers.sum(axis=-1, keepdims=True)
    return result


def rule_out(scores: FloatArray, removed: npt.NDArray[np.bool_]) -> FloatArray:
    """A copy of scores with -inf where `removed`."""
    result: FloatArray = np.where(removed, np.float32(-np.inf), scores)
    return result
