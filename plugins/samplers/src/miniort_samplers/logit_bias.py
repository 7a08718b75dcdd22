"""Single tokens made likelier or less likely."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from miniort.errors import GenerationError
from miniort.generation.sampling import LogitsProcessor, TokenHistory
from miniort.types import FloatArray
from miniort_samplers.probabilities import as_float32


def logit_bias(biases: Mapping[int, float]) -> LogitsProcessor:
    """logit + bias, by token id; -inf rules a token out.

    GenerationError for a bias of NaN or +inf; in a step for a token that the model hasn't.
    """
    for token, bias in biases.items():
        if np.isnan(bias) or np.isposinf(bias):
            raise GenerationError(f"logit_bias must be a finite number or -inf, found {bias} for token {token}")
    tokens = np.array(list(biases), np.int64)
    amounts = np.array(list(biases.values()), np.float32)

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits).copy()
        unknown = tokens[(tokens < 0) | (tokens >= scores.shape[1])]
        if unknown.size:
            raise GenerationError(f"logit_bias has token {unknown[0]}, the model has 0 … {scores.shape[1] - 1}")
        scores[:, tokens] += amounts
        return scores

    return process
