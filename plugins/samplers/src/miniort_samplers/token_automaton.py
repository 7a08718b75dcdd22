"""A regular expression as a finite automaton over the tokens of a vocabulary, with the way to its end known from each state."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from miniort.errors import GenerationError, PluginError
from miniort.generation.sources import Tokenizer
from miniort.types import IntArray

UNREACHABLE = int(np.iinfo(np.int64).max)
"""The distance of a state from which no text can be completed."""


END_MARK = "\U0010ffff"
"""The last code point there is, which is no character."""


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """States are 0 … n-1.

    tokens[s], next_states[s]: the tokens that may follow in state s, in order, and the states that they lead to, [tokens of s] each.
    distances: [n], how many tokens the shortest way from a state to a complete text takes; 0 where the text is complete.
    """

    start: int
    tokens: tuple[IntArray, ...]
    next_states: tuple[IntArray, ...]
    distances: IntArray

    def follow(self, state: int, token: int) -> int | None:
        """The state behind a token; None where it may not follow."""
        place = int(np.searchsorted(self.tokens[state], token))
        if place == len(self.tokens[state]) or self.tokens[state][place] != token:
            return None
        return int(self.next_states[state][place])

    def distance(self, state: int) -> int:
        """The fewest tokens that make the text complete."""
        return int(self.distances[state])

    def tokens_within(self, state: int, limit: int | None) -> IntArray:
        """Tokens that may follow, and behind which at most `limit` further ones make the text complete; None for no limit."""
        enough = UNREACHABLE - 1 if limit is None else limit
        return self.tokens[state][self.distances[self.next_states[state]] <= enough]


def build_automaton(pattern: str, tokenizer: Tokenizer) -> TokenAutomaton:
    """The automaton of a regular expression, in the syntax of Rust's regex crate, that a whole text has to match.

    PluginError without outlines-core; GenerationError if the pattern isn't understood, or the vocabulary can't spell its texts.
    """
    try:
        from outlines_core import Index, Vocabulary
    except ImportError:
        raise PluginError('grammar needs outlines-core: pip install "miniort-samplers[grammar]"') from None
    # The library wants an end token; the model's aren't part of the text, so it gets an id that is none. And in a state where a text may
    # end it forgets tokens that go on without ending one (0.2.14: `(ab|c)*` has no a behind c). So texts get an end that no token
    # but a made-up one spells: only behind it a text ends for the library, and only before it for us.
    end_token, end_mark = tokenizer.vocabulary_size, tokenizer.vocabulary_size + 1
    spelled: dict[bytes, list[int]] = {END_MARK.encode(): [end_mark]}
    for token in range(tokenizer.vocabulary_size):
        spelling = tokenizer.token_bytes(token)
        if spelling:
            spelled.setdefault(spelling, []).append(token)
    try:
        index = Index(f"(?:{pattern}){END_MARK}", Vocabulary(end_token, spelled))
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise GenerationError(f"no automaton can be made of the pattern {_shorten(pattern)}: {reason}") from None
    transitions = index.get_transitions()
    ends = index.get_final_states()
    numbers = {state: number for number, state in enumerate(sorted({index.get_initial_state(), *transitions, *ends}))}
    tokens, next_states = [], []
    for state in numbers:
        edges = sorted((token, numbers[following]) for token, following in transitions.get(state, {}).items() if token < end_token)
        array = np.array(edges, np.int64).reshape(-1, 2)
        tokens.append(np.ascontiguousarray(array[:, 0]))
        next_states.append(np.ascontiguousarray(array[:, 1]))
    complete = [number for state, number in numbers.items() if transitions.get(state, {}).get(end_mark) in ends]
    distances = _distances(next_states, complete)
    start = numbers[index.get_initial_state()]
    if distances[start] == UNREACHABLE:
        raise GenerationError(f"the vocabulary can't spell any text of the pattern {_shorten(pattern)}")
    return TokenAutomaton(start, tuple(tokens), tuple(next_states), distances)


def _distances(next_states: list[IntArray], complete: list[int]) -> IntArray:
    """Breadth-first from the states of complete texts backwards: [states]."""
    before: list[list[int]] = [[] for _ in next_states]
    for state, following in enumerate(next_states):
        for each in np.unique(following):
            before[each].append(state)
    distances = np.full(len(next_states), UNREACHABLE)
    distances[complete] = 0
    reached = complete
    while reached:
        nearest = []
        for state in reached:
            for earlier in before[state]:
                if distances[earlier] == UNREACHABLE:
                    distances[earlier] = distances[state] + 1
                    nearest.append(earlier)
        reached = nearest
    return distances


def escape(text: str) -> str:
    """A pattern that matches this text and nothing else."""
    return "".join(character if re.fullmatch("[A-Za-z0-9_]", character) else f"\\x{{{ord(character):X}}}" for character in text)


def _shorten(pattern: str) -> str:
    return repr(pattern) if len(pattern) <= 60 else f"{pattern[:60]!r}…"
