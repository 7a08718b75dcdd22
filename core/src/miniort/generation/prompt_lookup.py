"""Speculative decoding without a second model: what once followed the latest tokens is guessed to follow them again (prompt lookup).

Saxena, "Prompt Lookup Decoding", 2023. A guess is verified in one run of several tokens, which costs little more than one of one token.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from miniort.errors import GenerationError
from miniort.generation.generator import GeneratedToken, Generator, tokens_left
from miniort.types import IntArray

LONGEST_MATCH = 3
"""How many of the latest tokens are looked for at most."""


def draft_from_context(tokens: IntArray, count: int) -> IntArray:
    """Up to `count` ids that followed the last occurrence of the latest tokens [time]: of three of them, else two, else one."""
    for size in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        matches = np.flatnonzero((windows == tokens[-size:]).all(axis=1))
        if matches.size:
            follow = int(matches[-1]) + size
            return tokens[follow : follow + count]
    return tokens[:0]


def generate_with_lookup(
    generator: Generator, draft_length: int, max_new_tokens: int | None = None, max_length: int | None = None
) -> Iterator[GeneratedToken]:
    """What `generate` gives, with drafts of up to `draft_length` tokens out of the context: the same tokens, by greedy and by sampling.

    One row only. Stopping the iteration takes back what was chosen and not yet given; random numbers drawn for it are spent.
    GenerationError as for `Generator.step_with_draft`.
    """
    if draft_length < 1:
        raise GenerationError(f"the draft of a prompt lookup needs 1 token or more, found {draft_length}")
    if len(generator.tokens) > 1 or generator.cache is None:
        raise GenerationError("prompt lookup continues one row with a cache; for a batch, or without a cache, use plain generation")
    left = tokens_left(generator, max_new_tokens, max_length)
    limit = generator.decoder.context_length
    while not generator.is_done and left != 0:
        length = generator.tokens.shape[1]
        if generator.cache.length != length - 1:  # the prompt: its run gives the logits of its last token alone
            chosen = [generator.next_token(left)]
        else:
            room = [draft_length, *([] if left is None else [left - 1]), *([] if limit is None else [limit - length])]
            draft = draft_from_context(generator.tokens[0], max(0, min(room)))
            chosen = generator.step_with_draft(draft.tolist(), left)
        given = 0
        try:
            for token in chosen:
                given += 1
                yield token
        finally:
            if given < len(chosen):
                generator.rewind(length + given)
        left = None if left is None else left - len(chosen)
