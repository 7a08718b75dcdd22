"""Constrained decoding: what is generated is a text of a JSON schema, of a regular expression, or out of a list.

The constraint becomes a finite automaton over the model's own tokens, so the fewest tokens that complete a text are known in each state.
A token is allowed if the text can still be completed within the tokens that remain: so it's complete in the end, also at the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miniort.errors import GenerationError
from miniort.generation.sampling import LogitsProcessor, TokenHistory
from miniort.generation.sources import Tokenizer
from miniort.types import FloatArray, IntArray
from miniort_samplers.json_schema import regex_of_schema
from miniort_samplers.probabilities import as_float32
from miniort_samplers.token_automaton import TokenAutomaton, build_automaton, escape


def grammar(
    tokenizer: Tokenizer,
    json_schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
) -> LogitsProcessor:
    """Allow only tokens that lead to a text of the schema, of the regular expression (all of the text has to match), or of the choices.

    tokenizer: the model's. Exactly one of the others must be given. End tokens are allowed when the text is complete, and not before.
    The text is what was generated since the last prompt. It's read anew in each step, so it may be rewound or forked.
    Needs outlines-core: `pip install "miniort-samplers[grammar]"`.

    PluginError if that's missing. GenerationError for a constraint that can't be understood, or that no text of the vocabulary meets; in a
    step if there's no end token, if what was generated isn't the beginning of such a text, or if no text is short enough for the limit.
    """
    given = [name for name, value in (("json_schema", json_schema), ("regex", regex), ("choices", choices)) if value is not None]
    if len(given) != 1:
        raise GenerationError(f"grammar needs one of json_schema, regex and choices, found {' and '.join(given) or 'none'}")
    if json_schema is not None:
        pattern = regex_of_schema(json_schema)
    elif choices is not None:
        if isinstance(choices, str) or not choices or not all(choices):
            raise GenerationError(f"choices must be a list of texts that aren't empty, found {choices!r}")
        pattern = "|".join(map(escape, choices))
    else:
        assert regex is not None
        pattern = regex
    automaton = build_automaton(pattern, tokenizer)

    def process(history: TokenHistory, logits: FloatArray) -> FloatArray:
        """logits: [batch, vocabulary] -> the same shape, float32."""
        scores = as_float32(logits)
        if not history.end_tokens:
            raise GenerationError("grammar needs an end token, by which a complete text is ended; give the generator end_tokens")
        result = np.full_like(scores, -np.inf)
        for row in range(len(scores)):
            allowed = _allowed(automaton, history, history.generated(row))
            if allowed.size and allowed[-1] >= scores.shape[1]:
                raise GenerationError(
                    f"the tokenizer's token {allowed[-1]} is past the model's {scores.shape[1]} logits; take the model's own"
                )
            result[row, allowed] = scores[row, allowed]
        return result

    return process


def _allowed(automaton: TokenAutomaton, history: TokenHistory, generated: IntArray) -> IntArray:
    """Ids that may follow what was generated in one row, [n], in order."""
    end_tokens = np.array(sorted(history.end_tokens), np.int64)
    state = automaton.start
    for token in generated.tolist():
        if token in history.end_tokens:
            return end_tokens  # the row has ended; what is chosen now isn't used
        following = automaton.follow(state, token)
        if following is None:
            raise GenerationError(f"what was generated isn't of the grammar: token {token} may not stand where it does")
        state = following
    distance = automaton.distance(state)
    if history.remaining is not None and distance > history.remaining:
        raise GenerationError(
            f"the shortest text that the grammar allows here takes {distance} tokens, but only {history.remaining} may follow; "
            "allow more new tokens, or shorten the prompt"
        )
    tokens = automaton.tokens_within(state, None if history.remaining is None else history.remaining - 1)
    if distance > 0:
        return tokens
    return np.union1d(tokens, end_tokens)
