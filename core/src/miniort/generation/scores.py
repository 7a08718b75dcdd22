"""Log-probabilities of the tokens that were chosen, and of those that were likeliest, by the model's own logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from miniort.errors import GenerationError
from miniort.generation.generator import GeneratedToken
from miniort.types import FloatArray


@dataclass(frozen=True)
class TokenScore:
    """A token, its logit, and log P(token) = logit - log Σ exp(logits)."""

    id: int
    logit: float
    log_probability: float


@dataclass(frozen=True)
class StepScores:
    """One step of one row: the token that was chosen, and the likeliest ones, best first, of equal ones the lowest id first."""

    chosen: TokenScore
    top: tuple[TokenScore, ...]


def score(generated: GeneratedToken, top: int = 0) -> list[StepScores]:
    """Scores of each row, before any logits processor, in float64. GenerationError if `top` is negative."""
    if top < 0:
        raise GenerationError(f"top must not be negative, found {top}")
    return [_score_row(logits, int(chosen), top) for logits, chosen in zip(generated.logits, generated.ids, strict=True)]


def _score_row(logits: FloatArray, chosen: int, top: int) -> StepScores:
    """logits: [vocabulary]."""
    exact = logits.astype(np.float64)
    log_probabilities = exact - exact.max()
    log_probabilities -= np.log(np.exp(log_probabilities).sum())

    def of(token: int) -> TokenScore:
        return TokenScore(token, float(exact[token]), float(log_probabilities[token]))

    best = np.argsort(-exact, kind="stable")[:top] if top else ()
    return StepScores(of(chosen), tuple(of(int(token)) for token in best))
