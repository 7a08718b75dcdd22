"""Temperature: how much likelier the likely tokens are."""

from __future__ import annotations

import math

import numpy as np

from miniort.errors import GenerationError
from miniort.generation.sampling import LogitsProcessor, TokenHistory
from miniort.types import FloatArray
from miniort_samplers.probabilities import as_float32


def temperature(temperature: float) -> LogitsProcessor:
    """logits / temperature: below 1 the likely tokens become likelier, above 1 the unlikely ones do.

    GenerationError unless it's a number above 0; 0 would be the likeliest token always, which is the sampler `greedy`.
    """
    if temperature == 0:
        raise GenerationError("temperature must be above 0, found 0; the likeliest token, always, is what the sampler greedy chooses")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise GenerationError(f"temperature must be a finite number above 0, found {temperature}")
    divisor = np.float32(temperature)
    if divisor == 0:
        raise GenerationError(f"temperature must not be 0 in float32, found {temperature}; use the sampler greedy")

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits)
        best = scores.max(axis=-1, keepdims=True)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = scores / divisor
            # So low a temperature that the best logit leaves float32: relative to it every logit is 0 or below, and the best one stays 0.
            too_large = np.isfinite(best) & ~np.isfinite(best / divisor)
            result: FloatArray = np.where(too_large, (scores - best) / divisor, scaled)
        return result

    return process
