"""Sampling from the distribution that the logits describe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniort.errors import GenerationError
from miniort.generation.sampling import Sampler
from miniort.types import FloatArray, IntArray
from miniort_samplers.choosable import require_choosable


def categorical() -> Sampler:
    """A sampler that draws token v with the probability softmax(logits[b])[v]; temperature, top-k and their kin are processors before it.

    One number u is drawn per row, from that row's own stream; the token is the first whose cumulative probability exceeds u. Sums are
    taken in float64, so that rare tokens of a large vocabulary keep their chance.
    GenerationError if a row holds a NaN or +inf, or if each of its logits is -inf.
    """

    def sample(logits: FloatArray, rngs: Sequence[np.random.Generator]) -> IntArray:
        """logits: [batch, vocabulary], rngs: [batch] -> ids: [batch]."""
        scores = np.asarray(logits, dtype=np.float32)
        require_choosable("categorical", scores)
        largest = scores.max(axis=-1, keepdims=True)
        if np.isposinf(largest).any():
            row = int(np.flatnonzero(np.isposinf(largest[:, 0]))[0])
            raise GenerationError(f"categorical needs finite logits or -inf: row {row} has +inf; bias a token by a finite amount")
        reached = np.exp((scores - largest).astype(np.float64)).cumsum(axis=-1)  # [batch, vocabulary]
        draws = np.array([rng.random() for rng in rngs]) * reached[:, -1]
        ids: IntArray = (reached <= draws[:, None]).sum(axis=-1)
        return ids

    return sample
