"""Greedy decoding: the likeliest token of each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniort.generation.sampling import Sampler
from miniort.types import FloatArray, IntArray
from miniort_samplers.choosable import require_choosable


def greedy() -> Sampler:
    """A sampler that takes argmax_v logits[b, v] in float32; of equal logits the one with the lowest id. It draws nothing from `rngs`.

    GenerationError if a row holds a NaN, or if each of its logits is -inf, so that no token may follow.
    """

    def sample(logits: FloatArray, rngs: Sequence[np.random.Generator]) -> IntArray:
        """logits: [batch, vocabulary] -> ids: [batch]."""
        scores = np.asarray(logits, dtype=np.float32)
        ids: IntArray = scores.argmax(axis=-1)  # the place of a NaN, if there is one
        if not (np.take_along_axis(scores, ids[:, None], axis=-1) > -np.inf).all():
            require_choosable("greedy", scores)
        return ids

    return sample
