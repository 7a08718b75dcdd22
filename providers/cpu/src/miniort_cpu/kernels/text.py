"""Ops on text: StringConcat, StringSplit, StringNormalizer, RegexFullMatch."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import STRING, Array
from miniort_cpu.ufuncs import binary

kernels = KernelTable("cpu")

kernels.register("StringConcat", versions=(20, None))(binary(np.add, STRING))


@kernels.register("StringSplit", versions=(20, None))
def string_split(node: NodeContext) -> Run:
    """Each text cut into pieces, at most `maxsplit` times, at a delimiter, or without one at runs of white space.

    x: [...] -> pieces: [..., most pieces of any], filled up with empty text; number of pieces: [...] int64
    """
    delimiter, most = node.attribute("delimiter", "") or None, node.attribute("maxsplit", -1)

    def run(x: Array) -> tuple[Array, Array]:
        split = [text.split(delimiter, most) for text in x.ravel().tolist()]
        counts = np.array([len(pieces) for pieces in split], np.int64)
        width = int(counts.max(initial=0))
        padded = [pieces + [""] * (width - len(pieces)) for pieces in split]
        return np.array(padded, STRING).reshape(*x.shape, width), counts.reshape(x.shape)

    return run


CASES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


@kernels.register("StringNormalizer", versions=(10, None))
def string_normalizer(node: NodeContext) -> Run:
    """The texts that are no stop words, in the case asked for; one empty text where none is left. Case is Unicode's, whatever `locale`.

    x: [C] or [1, C] -> [number left], or [1, number left]
    """
    action = node.attribute("case_change_action", "NONE")
    if action not in CASES:
        raise KernelError(f"node {node.name!r} (StringNormalizer): case_change_action is one of {', '.join(CASES)}; found {action!r}")
    change = CASES[action]
    fold = str if node.attribute("is_case_sensitive", 0) else str.lower
    stop_words = frozenset(fold(word) for word in node.attribute("stopwords", ()))

    def run(x: Array) -> Array:
        if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
            raise ValueError(f"StringNormalizer takes shapes [C] and [1, C], found {list(x.shape)}")
        kept = [change(text) for text in x.ravel().tolist() if fold(text) not in stop_words] or [""]
        return np.array(kept, STRING).reshape((-1,) if x.ndim == 1 else (1, -1))

    return run


@kernels.register("RegexFullMatch", versions=(20, None))
def regex_full_match(node: NodeContext) -> Run:
    """Whether all of each text matches a pattern in RE2's syntax. x: [...] -> same shape, bool."""
    pattern = node.attribute("pattern", "")
    try:
        full_match = re.compile(python_pattern(pattern), re.ASCII).fullmatch
    except re.error as error:
        raise KernelError(f"node {node.name!r} (RegexFullMatch): the pattern {pattern!r} can't be understood: {error}") from error

    def run(x: Array) -> Array:
        matches = [full_match(text) is not None for text in x.ravel().tolist()]
        return np.array(matches, np.bool_).reshape(x.shape)

    return run


POSIX_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "ascii": r"\x00-\x7f",
    "blank": r"\t ",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t\n\v\f\r ",
    "upper": "A-Z",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}

_RE2_ONLY = re.compile(r"\\Q(?P<quoted>.*?)(?:\\E|$)|(?P<escape>\\.)|\[:(?P<name>[a-z]+):\]|(?P<plain>.)", re.DOTALL)


def python_pattern(pattern: str) -> str:
    r"""A pattern of RE2 in the syntax of Python's re, where they differ: `\z`, `\Q...\E`, classes like `[:alpha:]`."""
    parts = []
    for token in _RE2_ONLY.finditer(pattern):
        if token["quoted"] is not None:
            parts.append(re.escape(token["quoted"]))
        elif token["name"] is not None:
            parts.append(POSIX_CLASSES.get(token["name"], token[0]))
        else:
            parts.append(r"\Z" if token["escape"] == r"\z" else token[0])
    return "".join(parts)
