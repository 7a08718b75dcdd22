"""Truncation: unlikely tokens are ruled out. Each rule is that of Hugging Face's logits warper of the same name, in float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from miniort.errors import GenerationError
from miniort.generation.sampling import LogitsProcessor, TokenHistory
from miniort.types import FloatArray, IntArray
from miniort_samplers.probabilities import as_float32, log_softmax, rule_out, softmax


def top_k(k: int) -> LogitsProcessor:
    """Keep the k likeliest tokens, and all that are as likely as the k-th (Fan et al. 2018, Hierarchical Neural Story Generation).

    GenerationError unless k is at least 1.
    """
    if k < 1:
        raise GenerationError(f"top_k must keep at least 1 token, found k = {k}")

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits)
        if k >= scores.shape[1]:
            return scores.copy()
        kth = np.partition(scores, -k, axis=-1)[:, -k, None]  # [batch, 1]
        return rule_out(scores, scores < kth)

    return process


def top_p(p: float) -> LogitsProcessor:
    """Keep the smallest set of likeliest tokens whose probabilities reach p, the one that crosses p included; at least one token.

    Nucleus sampling (Holtzman et al. 2020). Of equally likely tokens those with a lower id are kept first.
    GenerationError outside 0 … 1.
    """
    _require_share("top_p", p, 0 <= p <= 1, "from 0 to 1")
    excess = np.float32(1 - p)

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits)
        order = np.argsort(-scores, axis=-1, kind="stable")[:, ::-1]  # least likely first
        reached = _cumulative(np.take_along_axis(scores, order, axis=-1))
        removed = reached <= excess
        removed[:, -1] = False
        return rule_out(scores, _unsort(removed, order))

    return process


def min_p(p: float) -> LogitsProcessor:
    """Keep tokens whose probability is at least p times that of the likeliest (Nguyen et al. 2024). GenerationError outside 0 … 1."""
    _require_share("min_p", p, 0 <= p <= 1, "from 0 to 1")

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits)
        probabilities = softmax(scores)
        removed = probabilities < np.float32(p) * probabilities.max(axis=-1, keepdims=True)
        return rule_out(scores, removed)

    return process


def typical_p(p: float) -> LogitsProcessor:
    """Keep the tokens whose information -log q(v) is nearest to the entropy H(q), until their probabilities reach p.

    Locally typical sampling (Meister et al. 2022). Tokens as near as the last one that is kept are kept too.
    GenerationError unless 0 < p < 1.
    """
    _require_share("typical_p", p, 0 < p < 1, "above 0 and below 1")

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits)
        logarithms = log_softmax(scores)  # log q(v), [batch, vocabulary]
        with np.errstate(invalid="ignore"):  # 0 · -inf, which counts as 0
            entropy = -np.nansum(logarithms * np.exp(logarithms), axis=-1, keepdims=True)
        distance = np.abs(-logarithms - entropy)
        order = np.argsort(distance, axis=-1, kind="stable")  # most typical first
        ranked = np.take_along_axis(distance, order, axis=-1)
        reached = _cumulative(np.take_along_axis(scores, order, axis=-1))
        last = np.minimum((reached < np.float32(p)).sum(axis=-1, keepdims=True), scores.shape[1] - 1)
        removed = ranked > np.take_along_axis(ranked, last, axis=-1)
        removed[:, 0] = False
        return rule_out(scores, _unsort(removed, order))

    return process


def epsilon(cutoff: float) -> LogitsProcessor:
    """Keep tokens whose probability is at least the cutoff, and the likeliest (Hewitt et al. 2022).

    GenerationError unless 0 < cutoff < 1.
    """
    _require_share("epsilon", cutoff, 0 < cutoff < 1, "above 0 and below 1")

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits)
        removed = softmax(scores) < np.float32(cutoff)
        return rule_out(scores, removed & (scores < scores.max(axis=-1, keepdims=True)))

    return process


def eta(cutoff: float) -> LogitsProcessor:
    """Keep tokens whose probability is at least η = min(cutoff, √cutoff · exp(-H(q))), and the likeliest (Hewitt et al. 2022).

    GenerationError unless 0 < cutoff < 1.
    """
    _require_share("eta", cutoff, 0 < cutoff < 1, "above 0 and below 1")
    limit = np.float32(cutoff)

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits)
        probabilities = softmax(scores)
        logarithms = np.maximum(log_softmax(scores), np.finfo(np.float32).min)
        entropy = -(logarithms * probabilities).sum(axis=-1, keepdims=True)
        bound = np.minimum(limit, np.sqrt(limit) * np.exp(-entropy))
        return rule_out(scores, (probabilities < bound) & (scores < scores.max(axis=-1, keepdims=True)))

    return process


def _require_share(name: str, value: float, allowed: bool, interval: str) -> None:
    if not allowed:  # false for NaN as well
        raise GenerationError(f"{name} must be a number {interval}, found {value}")


def _cumulative(sorted_scores: FloatArray) -> FloatArray:
    """Running sums of the probabilities, [batch, vocabulary]; summed in float64, told in float32."""
    reached: FloatArray = softmax(sorted_scores).cumsum(axis=-1, dtype=np.float64).astype(np.float32)
    return reached


def _unsort(removed: npt.NDArray[np.bool_], order: IntArray) -> npt.NDArray[np.bool_]:
    """removed[b, i] is about token order[b, i]; the result[b, v] is about token v."""
    result = np.empty_like(removed)
    np.put_along_axis(result, order, removed, axis=-1)
    return result
