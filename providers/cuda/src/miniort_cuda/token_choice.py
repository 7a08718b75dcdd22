"""Samplers and logits processors on the device: the arithmetic of those of the same name in miniort-samplers, over an array namespace.

Only ids come to the host. A row in which no token can be chosen (a NaN, or nothing but -inf) has the id `NONE`: the host then looks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from miniort.providers import DeviceProcessor, DeviceSampler
from miniort.types import Array

NONE = -1


def greedy(xp: Any) -> DeviceSampler:
    """argmax_v logits[b, v]; of equal logits the one with the lowest id."""

    def sample(logits: Any, rngs: Sequence[np.random.Generator]) -> Array | None:
        """logits: [batch, vocabulary] -> ids: [batch]."""
        can_choose = logits.max(axis=-1) > -np.inf  # false for NaN, which a maximum hands on
        return _download(xp, xp.where(can_choose, xp.argmax(logits, axis=-1), NONE))

    return sample


def categorical(xp: Any) -> DeviceSampler:
    """Token v with the probability softmax(logits[b])[v]: the first whose cumulative probability, in float64, exceeds the row's number u.

    u comes from the row's own stream on the host, one per step, as for the host's sampler. So a seed gives the host's tokens, but where
    the device's rounding moves a bound across u. A single row's u is an argument of the kernel; those of several rows are uploaded.
    """

    def sample(logits: Any, rngs: Sequence[np.random.Generator]) -> Array | None:
        """logits: [batch, vocabulary] -> ids: [batch]."""
        largest = logits.max(axis=-1, keepdims=True)
        reached = xp.cumsum(xp.exp((logits - largest).astype(np.float64)), axis=-1)  # [batch, vocabulary]
        draws = [rng.random() for rng in rngs]
        u = draws[0] if len(draws) == 1 else xp.array(np.array(draws)[:, None])
        ids = (reached <= reached[:, -1:] * u).sum(axis=-1)
        return _download(xp, xp.where(xp.abs(largest[:, 0]) < np.inf, ids, NONE))

    return sample


def temperature(xp: Any, temperature: float) -> DeviceProcessor:
    """logits / temperature; relative to the best logit where that would leave float32."""
    divisor = np.float32(temperature)

    def process(logits: Any) -> Any:
        """logits: [batch, vocabulary] float32 -> the same shape."""
        best = logits.max(axis=-1, keepdims=True)
        too_large = (xp.abs(best) < np.inf) & (xp.abs(best / divisor) >= np.inf)
        return xp.where(too_large, (logits - best) / divisor, logits / divisor)

    return process


def top_k(xp: Any, k: int) -> DeviceProcessor:
    """The k likeliest tokens, and all that are as likely as the k-th."""

    def process(logits: Any) -> Any:
        """logits: [batch, vocabulary] float32 -> the same shape."""
        if k >= logits.shape[1]:
            return logits
        kth = xp.sort(logits, axis=-1)[:, -k, None]  # [batch, 1]
        return _rule_out(xp, logits, logits < kth)

    return process


def top_p(xp: Any, p: float) -> DeviceProcessor:
    """The smallest set of likeliest tokens whose probabilities reach p, the one that crosses p included; at least one token."""
    excess = np.float32(1 - p)

    def process(logits: Any) -> Any:
        """logits: [batch, vocabulary] float32 -> the same shape."""
        order = xp.argsort(-logits, axis=-1)[:, ::-1]  # stable; least likely first
        probabilities = _softmax(xp, xp.take_along_axis(logits, order, axis=-1))
        removed = xp.cumsum(probabilities.astype(np.float64), axis=-1).astype(np.float32) <= excess
        removed[:, -1] = False
        return _rule_out(xp, logits, xp.take_along_axis(removed, xp.argsort(order, axis=-1), axis=-1))

    return process


def min_p(xp: Any, p: float) -> DeviceProcessor:
    """Tokens whose probability is at least p times that of the likeliest."""

    def process(logits: Any) -> Any:
        """logits: [batch, vocabulary] float32 -> the same shape."""
        probabilities = _softmax(xp, logits)
        return _rule_out(xp, logits, probabilities < np.float32(p) * probabilities.max(axis=-1, keepdims=True))

    return process


SAMPLERS: Mapping[str, Callable[..., DeviceSampler]] = {"greedy": greedy, "categorical": categorical}
"""By the name of the host's sampler; `create(xp, **options)`."""

PROCESSORS: Mapping[str, Callable[..., DeviceProcessor]] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
"""By the name of the host's logits processor; `create(xp, **options)`."""


def _softmax(xp: Any, logits: Any) -> Any:
    """exp(x - max) / Σ exp(x - max) over the vocabulary: [batch, vocabulary] -> the same."""
    powers = xp.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _rule_out(xp: Any, logits: Any, removed: Any) -> Any:
    return xp.where(removed, np.float32(-np.inf), logits)


def _download(xp: Any, ids: Any) -> Array | None:
    """Ids [batch] on the host, None if a row has none."""
    chosen: Array = xp.asnumpy(ids)
    return None if (chosen == NONE).any() else chosen
