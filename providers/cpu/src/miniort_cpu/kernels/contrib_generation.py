"""Steps of text generation that com.microsoft has as ops: NGramRepeatBlock."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.buffers import copied
from miniort_cpu.kernels.contrib_activation import CONTRIB

kernels = KernelTable("cpu")


@kernels.register("NGramRepeatBlock", domain=CONTRIB)
def block_repeated_ngrams(node: NodeContext) -> Run:
    """Scores of -inf for each token that would end an n-gram that its row has already. ids: [batch, time]; scores: [batch, vocabulary]."""
    size = node.attribute("ngram_size")
    allocate = node.provider.allocate

    def run(ids: Array, scores: Array) -> Array:
        out = copied(allocate, scores)
        if ids.shape[1] < size:
            return out
        ngrams = np.lib.stride_tricks.sliding_window_view(ids, size, axis=1)  # [batch, time - size + 1, size]
        start = ids[:, None, ids.shape[1] - size + 1 :]
        row, place = np.nonzero((ngrams[:, :, :-1] == start).all(-1))
        out[row, ngrams[row, place, -1]] = -np.inf
        return out

    return run
