"""Stop strings: nothing of one is ever shown, nothing that was shown is taken back, and pieces make no difference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miniort.errors import GenerationError
from miniort.generation import StopStrings


def run(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    stream = StopStrings(stops)
    text = "".join([stream.push(piece) for piece in pieces])
    return text + stream.flush(), stream.found


def first_stop(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """The same by looking at ever longer beginnings of the whole text."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["\n\n"], ["one\n", "\ntwo"], "one"),
        (["END"], ["an E", "N", "D of it"], "an "),
        (["END"], ["an E", "N", "ORMOUS"], "an ENORMOUS"),
        (["aab"], ["a", "a", "a", "b"], "a"),  # what is held back may shift by less than all of it
        (["abc", "b"], ["ab"], "a"),
        (["bc", "c"], ["ab", "c"], "a"),
        (["😀"], ["x", "😀"], "x"),
        ([], ["a", "b"], "ab"),
    ],
)
def test_text_up_to_the_first_stop(stops: list[str], pieces: list[str], shown: str) -> None:
    assert run(stops, pieces)[0] == shown


texts = st.text("ab\n", min_size=1, max_size=4)


@given(stops=st.lists(texts, max_size=3), pieces=st.lists(st.text("ab\n", max_size=4), max_size=8))
@example(stops=["ab", "abb"], pieces=["a", "bb"])
@settings(deadline=None)
def test_pieces_make_no_difference(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == first_stop(stops, "".join(pieces))


@given(stops=st.lists(texts, min_size=1, max_size=3), pieces=st.lists(st.text("ab\n", max_size=3), max_size=8))
@settings(deadline=None)
def test_as_much_as_is_certain_is_shown_at_once(stops: list[str], pieces: list[str]) -> None:
    stream = StopStrings(stops)
    shown, given_so_far = "", ""
    for piece in pieces:
        shown += stream.push(piece)
        given_so_far += piece
        if stream.found is not None:
            return
        held = given_so_far[len(shown) :]
        assert given_so_far.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_after_a_stop_nothing_follows() -> None:
    stream = StopStrings(["."])
    assert [stream.push("a.b"), stream.push("c"), stream.flush()] == ["a", "", ""]
    assert stream.found == "."


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(GenerationError, match="empty"):
        StopStrings(["a", ""])
