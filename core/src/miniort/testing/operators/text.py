"""Builders of ops on strings, and on n-grams of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds
from miniort.types import STRING, Array

WORDS = np.array(["", " ", "a b", " a  b ", "one,two", ",one,,two,", "Ab", "ä", "x@y.com", "tab\there", "\n", "ABC", "a,b c", "ß"], object)


def words(d: Draws, shape: tuple[int, ...]) -> Array:
    """Words with separators, of several scripts and cases, and empty ones."""
    return np.asarray(WORDS[d.rng().integers(0, len(WORDS), shape)], object)


@builds("StringConcat")
def string_concat(d: Draws, operator: Operator) -> NodeCase:
    """One with the other, broadcast."""
    shape = d.shape()
    pair = [words(d, shape), words(d, d.broadcasting(shape))]
    return NodeCase(pair if d.boolean() else pair[::-1], constants=d.constants(0))


@builds("StringSplit")
def string_split(d: Draws, operator: Operator) -> NodeCase:
    """At white space or a delimiter, at most so many times."""
    attributes = d.some(delimiter=d.choice(["", " ", ",", ",,", "b"]), maxsplit=d.integer(1, 3))
    return NodeCase([words(d, d.shape(max_rank=2))], attributes, 2, constants=d.constants(0))


@builds("RegexFullMatch")
def regex_full_match(d: Draws, operator: Operator) -> NodeCase:
    """Patterns of RE2's syntax."""
    pattern = d.choice(["", "a", "[a-z ]+", ".*", r"(\w+)@(\w+)\.com", "[^,]*", "(?i)ab|abc", r"\s*"])
    return NodeCase([words(d, d.shape())], {"pattern": pattern})


@builds("StringNormalizer")
def string_normalizer(d: Draws, operator: Operator) -> NodeCase:
    """Stop words taken out of [C] or [1, C], and the rest in one case."""
    count = d.integer(1, 5)
    attributes = d.some(case_change_action=d.choice(["NONE", "LOWER", "UPPER"]), is_case_sensitive=d.integer(0, 1))
    if d.boolean():
        attributes["stopwords"] = d.permutation(["ab", "Ab", "abc", "a b", "one,two"])[: d.integer(1, 3)]
    letters = np.array(["a b", "one,two", "Ab", "ABC", "aB", "x"], object)
    x = np.asarray(letters[d.rng().integers(0, 6, d.choice([(count,), (1, count)]))], object)
    return NodeCase([x], attributes, expected=lambda inputs: [normalized(x, **attributes)])


def normalized(x: Array, case_change_action: str = "NONE", is_case_sensitive: int = 0, stopwords: list[str] | None = None) -> Array:
    """What is left without stop words, in one case; an empty string where nothing is left. x: [C] or [1, C]."""
    stops = [word if is_case_sensitive else word.lower() for word in stopwords or ()]
    left = [word for word in x.ravel().tolist() if (word if is_case_sensitive else word.lower()) not in stops]
    changes: dict[str, Callable[[str], str]] = {"LOWER": str.lower, "UPPER": str.upper, "NONE": str}
    change = changes[case_change_action]
    return np.array([change(word) for word in left] or [""], object).reshape(*x.shape[:-1], -1)


@builds("TfIdfVectorizer")
def tf_idf_vectorizer(d: Draws, operator: Operator) -> NodeCase:
    """One- to three-grams with skips of [C] or [N, C] tokens: how often each is there, whether, or either one weighted."""
    dtype = d.dtype(operator)
    tokens = ["a", "b", "c", "d"] if dtype == STRING else [1, 2, 3, 4]
    rng, longest = d.rng(), d.integer(1, 3)
    pool: list[Any] = []
    starts, count = [], 0
    for length in range(1, longest + 1):
        starts.append(len(pool))
        codes = np.sort(rng.permutation(len(tokens) ** length)[: d.integer(1, 3)])
        count += len(codes)
        pool += [tokens[code // len(tokens) ** place % len(tokens)] for code in codes for place in range(length)]
    attributes: dict[str, Any] = {
        "mode": d.choice(["TF", "IDF", "TFIDF"]),
        "ngram_counts": starts,
        "ngram_indexes": d.permutation(range(count)),
        "min_gram_length": d.integer(1, longest),
        "max_gram_length": longest,
        "max_skip_count": d.integer(0, 2),
        "pool_strings" if dtype == STRING else "pool_int64s": pool,
    } | d.some(weights=[d.number(0.5, 2) for _ in range(count)])
    shape = d.choice([(d.integer(1, 6),), (d.integer(1, 3), d.integer(1, 6))])
    return NodeCase([np.array(tokens, dtype)[rng.integers(0, len(tokens), shape)]], attributes)
