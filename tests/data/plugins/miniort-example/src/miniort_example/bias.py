"""The logits processor `bias`."""

from __future__ import annotations

from collections.abc import Sequence

from miniort.generation.sampling import LogitsProcessor
from miniort.types import FloatArray, IntArray


def bias(ids: Sequence[int], amount: float) -> LogitsProcessor:
    """A processor that adds `amount` to the logits of these tokens."""

    def process(tokens: IntArray, logits: FloatArray) -> FloatArray:
        """tokens: [batch, time], logits: [batch, vocabulary] -> logits: [batch, vocabulary]."""
        biased = logits.copy()  # what a processor is given may not be written into
        biased[:, list(ids)] += amount
        return biased

    return process
