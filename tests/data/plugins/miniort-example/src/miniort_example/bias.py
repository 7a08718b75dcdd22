"""The logits processor `bias`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniort.generation.sampling import LogitsProcessor, TokenHistory
from miniort.types import FloatArray


def bias(ids: Sequence[int], amount: float) -> LogitsProcessor:
    """A processor that adds `amount` to the logits of these tokens."""

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        biased = np.array(logits, np.float32)  # a copy: what a processor is given may not be written into
        biased[:, list(ids)] += amount
        return biased

    return process
