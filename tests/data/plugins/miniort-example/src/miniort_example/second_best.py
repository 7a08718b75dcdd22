"""The sampler `second_best`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniort.generation.sampling import Sampler
from miniort.types import FloatArray, IntArray


def second_best() -> Sampler:
    """A sampler that takes the second largest logit of each row, or the largest where no second token is allowed."""

    def sample(logits: FloatArray, rngs: Sequence[np.random.Generator]) -> IntArray:
        """logits: [batch, vocabulary] -> ids: [batch]."""
        best_two = np.argsort(-logits, axis=-1, kind="stable")[:, :2]
        first, second = best_two[:, 0], best_two[:, -1]
        allowed = np.take_along_axis(logits, second[:, None], axis=-1)[:, 0] > -np.inf
        return np.where(allowed, second, first)

    return sample
