"""What a sampler does with rows that no token can be chosen from."""

from __future__ import annotations

import numpy as np

from miniort.errors import GenerationError
from miniort.types import FloatArray


def require_choosable(sampler: str, scores: FloatArray) -> None:
    """GenerationError that names the first row with a NaN, or with nothing but -inf. scores: [batch, vocabulary] float32."""
    best = scores.max(axis=-1)  # NaN if there is one
    bad = ~(best > -np.inf)  # true for NaN as well
    if bad.any():
        raise GenerationError(_describe_row(sampler, scores, int(np.flatnonzero(bad)[0])))


def _describe_row(sampler: str, scores: FloatArray, row: int) -> str:
    nans = np.flatnonzero(np.isnan(scores[row]))
    if nans.size:
        return (
            f"{sampler} needs logits that are numbers: row {row} has {nans.size} NaN of {scores.shape[1]}, the first at token {nans[0]}; "
            "the model computed them"
        )
    return f"{sampler} needs a token to choose from: row {row} has only logits of -inf; a logits processor has ruled out every token"
