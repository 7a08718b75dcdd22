"""Beam search: the likeliest whole continuations, approximately. Tokens and scores are those of Hugging Face `generate`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from miniort.errors import GenerationError
from miniort.generation.sampling import Continuation, TokenHistory
from miniort.types import FloatArray, IntArray

_NEVER = np.float32(-1e9)
"""A score that loses against every real one."""

_LOST = np.float32(-5e8)
"""What real scores are above of."""


def beam(num_beams: int = 4, length_penalty: float = 1.0, early_stopping: bool | Literal["never"] = False) -> BeamSearch:
    """A search that keeps the `num_beams` likeliest unfinished texts, and the `num_beams` best finished ones.

    A finished text of n tokens scores Σ log p / n^length_penalty, so above 0 long texts gain, below 0 short ones.
    early_stopping: True stops at `num_beams` finished texts; False when the likeliest unfinished one, at its present length, scores less
    than all of them; "never" only when it couldn't score more at any length that it may still reach.
    GenerationError for a number of beams below 1, or anything else in early_stopping.
    """
    if num_beams < 1:
        raise GenerationError(f"beam needs at least 1 beam, found {num_beams}")
    if early_stopping not in (True, False, "never"):
        raise GenerationError(f"early_stopping must be True, False or 'never', found {early_stopping!r}")
    if not math.isfinite(length_penalty):
        raise GenerationError(f"length_penalty must be a finite number, found {length_penalty}")
    return BeamSearch(num_beams, length_penalty, early_stopping)


@dataclass(frozen=True)
class BeamSearch:
    """Beam search of that many beams; see `beam`."""

    width: int
    length_penalty: float
    early_stopping: bool | Literal["never"]

    def start(self, prompts: int) -> BeamRun:
        """A new search for that many prompts."""
        return BeamRun(self, prompts)


class BeamRun:
    """One beam search under way. P prompts of W beams each; the rows of a step are [P·W]."""

    def __init__(self, settings: BeamSearch, prompts: int) -> None:
        shape = (prompts, settings.width)
        self._settings = settings
        # All beams of a prompt are alike at first: only the first one may be continued.
        self._running = np.full(shape, _NEVER)
        self._running[:, 0] = 0
        self._scores = np.full(shape, _NEVER)  # of finished texts
        self._finished = np.zeros(shape, np.bool_)
        self._texts: list[list[IntArray]] = [[np.empty(0, np.int64)] * settings.width for _ in range(prompts)]
        self._improvable = np.ones((prompts, 1), np.bool_)

    @property
    def is_done(self) -> bool:
        """Whether no further step could change the result."""
        all_finished = bool(self._finished.all()) and self._settings.early_stopping is True
        return all_finished or not self._improvable.any() or not (self._running > _LOST).any()

    def step(self, history: TokenHistory, scores: FloatArray) -> tuple[IntArray, IntArray]:
        """How each row goes on: (rows, ids), [P·W] each.

        scores: [P·W, vocabulary], log-probabilities. Of each prompt's W · vocabulary continuations the best C are candidates, where C is
        enough to leave W that haven't ended. GenerationError if a prompt has none that the processors allow.
        """
        prompts, width = self._running.shape
        vocabulary = scores.shape[1]
        total = (scores.reshape(prompts, width, vocabulary) + self._running[:, :, None]).reshape(prompts, width * vocabulary)
        candidates = min(max(2, 1 + len(history.end_tokens)) * width, width * vocabulary)
        best = _largest(total, candidates)  # [P, C]
        sums = np.take_along_axis(total, best, axis=1)
        if not (sums[:, 0] > -np.inf).all():  # false for NaN as well
            prompt = int(np.flatnonzero(~(sums[:, 0] > -np.inf))[0])
            raise GenerationError(f"beam needs a token to choose from: prompt {prompt} has only scores of -inf or NaN in all its beams")
        beams, ids = best // vocabulary, best % vocabulary
        ended = np.isin(ids, list(history.end_tokens))
        if history.remaining == 1:
            ended = np.ones_like(ended)

        generated = history.tokens.shape[1] - history.prompt_length + 1
        self._finish(history, beams, ids, sums, ended)

        unfinished = sums + np.where(ended, _NEVER, np.float32(0))
        going_on = _largest(unfinished, width)  # [P, W]
        self._running = np.take_along_axis(unfinished, going_on, axis=1)
        # Where processors allow fewer than W, what is left over follows the best one: what they ruled out mustn't be in a row.
        going_on = np.where(self._running > -np.inf, going_on, going_on[:, :1])
        self._look_ahead(generated, None if history.remaining is None else history.remaining - 1)
        rows = np.arange(prompts)[:, None] * width + np.take_along_axis(beams, going_on, axis=1)
        return rows.reshape(-1), np.take_along_axis(ids, going_on, axis=1).reshape(-1)

    def _finish(self, history: TokenHistory, beams: IntArray, ids: IntArray, sums: FloatArray, ended: npt.NDArray[np.bool_]) -> None:
        """Keep the W best of the texts that were finished before and of the candidates [P, C] that end now.

        A candidate behind the first W doesn't count: it's there only so that W unfinished ones are left. Nor does one that goes on behind
        its end, since there was nothing else.
        """
        prompts, width = self._running.shape
        ends_now = ended & (np.arange(ids.shape[1]) < width) & (sums > _LOST)
        closed = self._finished.all(axis=1, keepdims=True) & (self._settings.early_stopping is True) | ~self._improvable
        generated = history.tokens.shape[1] - history.prompt_length + 1
        scores = sums / np.float32(generated**self._settings.length_penalty)
        scores = scores + np.where(closed, _NEVER, np.float32(0)) + np.where(ends_now, np.float32(0), _NEVER)
        merged = np.concatenate([self._scores, scores], axis=1)  # [P, W + C]
        kept = _largest(merged, width)
        for prompt in range(prompts):
            old = self._texts[prompt]
            self._texts[prompt] = [
                old[index]
                if index < width
                else np.append(history.generated(prompt * width + int(beams[prompt, index - width])), ids[prompt, index - width])
                for index in kept[prompt]
            ]
        self._scores = np.take_along_axis(merged, kept, axis=1)
        self._finished = np.take_along_axis(np.concatenate([self._finished, ends_now], axis=1), kept, axis=1)

    def _look_ahead(self, generated: int, remaining: int | None) -> None:
        """Whether the likeliest unfinished text of a prompt may yet score more than its worst finished one."""
        length: float = generated
        if self._settings.early_stopping == "never" and self._settings.length_penalty > 0:
            length = math.inf if remaining is None else generated + remaining
        hypothetical = self._running[:, :1] / np.float32(length**self._settings.length_penalty)
        worst = np.where(self._finished, self._scores.min(axis=1, keepdims=True), _NEVER)
        self._improvable = self._improvable & (hypothetical > worst).any(axis=1, keepdims=True)

    def continuations(self) -> list[list[Continuation]]:
        """The finished texts of each prompt, the best first; at most W."""
        return [
            [Continuation(text, float(score)) for text, score, finished in zip(*rows, strict=True) if finished]
            for rows in zip(self._texts, self._scores, self._finished, strict=True)
        ]


def _largest(values: Any, count: int) -> IntArray:
    """Indices of the largest of each row, the largest first, of equal ones the first first: [rows, n] -> [rows, count]."""
    ranked: IntArray = np.argsort(-values, axis=-1, kind="stable")
    return ranked[:, :count]
