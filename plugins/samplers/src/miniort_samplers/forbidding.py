"""Processors that rule tokens out for what stands before them. Padding is no text: nothing is matched across it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniort.errors import GenerationError
from miniort.generation.sampling import LogitsProcessor, TokenHistory
from miniort.types import FloatArray
from miniort_samplers.probabilities import as_float32


def no_repeat_ngram(size: int) -> LogitsProcessor:
    """Rule out each token that would end a run of `size` tokens that the text, prompt included, has already. GenerationError below 1."""
    if size < 1:
        raise GenerationError(f"no_repeat_ngram needs a size of at least 1, found {size}")

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits).copy()
        for row in range(len(scores)):
            tokens = history.row(row)
            if len(tokens) < size:
                continue
            ngrams = np.lib.stride_tricks.sliding_window_view(tokens, size)  # [time - size + 1, size]
            beginning = tokens[len(tokens) - size + 1 :]
            repeated = ngrams[(ngrams[:, :-1] == beginning).all(axis=-1), -1]
            scores[row, repeated[repeated < scores.shape[1]]] = -np.inf
        return scores

    return process


def bad_words(words: Sequence[Sequence[int]]) -> LogitsProcessor:
    """Rule out the last token of each word, in token ids, where the others stand before it. A word that is one end token is let through.

    GenerationError if there are no words, or one is empty; in a step if a word has a token that the model hasn't.
    """
    if not words or not all(len(word) for word in words):
        raise GenerationError(f"bad_words needs words of at least one token id each, found {[list(word) for word in words]}")
    banned = [tuple(int(token) for token in word) for word in words]
    lowest, highest = min(map(min, banned)), max(map(max, banned))

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits).copy()
        if lowest < 0 or highest >= scores.shape[1]:
            raise GenerationError(f"bad_words has tokens {lowest} … {highest}, the model has 0 … {scores.shape[1] - 1}")
        rows = [history.row(row).tolist() for row in range(len(scores))]
        for *beginning, last in banned:
            if not beginning and last in history.end_tokens:
                continue
            for row, tokens in enumerate(rows):
                if tokens[len(tokens) - len(beginning) :] == beginning:
                    scores[row, last] = -np.inf
        return scores

    return process


def min_new_tokens(count: int) -> LogitsProcessor:
    """Rule out the end tokens until `count` tokens were generated. GenerationError if it's negative."""
    if count < 0:
        raise GenerationError(f"min_new_tokens must not be negative, found {count}")

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits).copy()
        if history.tokens.shape[1] - history.prompt_length < count:
            scores[:, [token for token in history.end_tokens if token < scores.shape[1]]] = -np.inf
        return scores

    return process
