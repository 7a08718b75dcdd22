"""Text that streams out of tokens: as early as it's certain, never half a character, and none taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from miniort.generation.detokenizer import StreamingDetokenizer

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[2] / "data" / "tokenizer" / "tokenizer.json"))

Decode = Callable[[Sequence[int]], str]


def decode_bpe(ids: Sequence[int]) -> str:
    """A real byte-level BPE."""
    return str(TOKENIZER.decode(list(ids)))


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte-level vocabulary in which every byte is a token."""
    return bytes(ids).decode("utf-8", errors="replace")


def sentencepiece(pieces: Sequence[bytes]) -> Decode:
    """A decoder that writes spaces for "▁" and drops the one in front of the text."""

    def decode(ids: Sequence[int]) -> str:
        return b"".join(pieces[index] for index in ids).decode("utf-8", errors="replace").replace("▁", " ").removeprefix(" ")

    return decode


def byte_fallback(ids: Sequence[int]) -> str:
    """As Llama's tokenizer decodes a run of byte tokens: if some of it is invalid, each byte of all of it is U+FFFD."""
    try:
        return bytes(ids).decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


def llama_like() -> Tokenizer:
    """A real tokenizer of Llama's kind: few pieces, a space in front, and bytes for every other character."""
    pieces = ["<unk>", "▁", "a", "b", "▁a", "ab", "▁▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    return tokenizer


LLAMA_LIKE = llama_like()


def stream(decode: Decode, ids: Sequence[int]) -> list[str]:
    """What each token gives, and what the flush at the end gives."""
    detokenizer = StreamingDetokenizer(decode)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def test_a_character_comes_when_its_last_byte_does() -> None:
    pieces = [b"\xf0\x9f", b"\x98", b"\x80"]
    assert stream(sentencepiece(pieces), [0, 1, 2]) == ["", "", "😀", ""]
    assert stream(decode_bytes, [0xF0, 0x9F, 0x98, 0x80]) == ["", "", "", "😀", ""]


def test_the_space_between_words_stays() -> None:
    assert stream(sentencepiece(["▁Hello".encode(), "▁world".encode()]), [0, 1, 1]) == ["Hello", " world", " world", ""]


def test_what_is_left_is_flushed() -> None:
    assert stream(decode_bytes, b"ab\xf0\x9f") == ["a", "b", "", "", "\ufffd"]


def test_text_in_front_of_half_a_character_does_not_wait() -> None:
    assert stream(sentencepiece([b"abc\xe2", b"\x82\xac!"]), [0, 1]) == ["abc", "€!", ""]


def test_invalid_bytes_come_when_that_is_clear() -> None:
    assert stream(decode_bytes, b"a\xffb") == ["a", "", "\ufffdb", ""]


def test_invalid_bytes_do_not_block_for_ever() -> None:
    pieces = stream(decode_bytes, b"\xff" * 100)
    assert pieces[3:-1] == ["\ufffd"] * 97
    assert pieces[-1] == "\ufffd" * 3


def test_a_real_replacement_character_comes_too() -> None:
    assert "".join(stream(decode_bytes, "a\ufffdb\ufffd".encode())) == "a\ufffdb\ufffd"


def test_byte_tokens_of_llama() -> None:
    """Characters that follow one another as bytes: each comes when it's complete, though the run is invalid in between."""
    assert stream(byte_fallback, "你好😀".encode()) == ["", "", "你", "", "", "好", "", "", "", "😀", ""]


def test_several_tokens_at_once_are_those_one_by_one() -> None:
    ids = TOKENIZER.encode("naïve 😀 Привет\n").ids
    detokenizer = StreamingDetokenizer(decode_bpe)
    assert detokenizer.push(ids) + detokenizer.flush() == "naïve 😀 Привет\n"
    assert "".join(stream(decode_bpe, ids)) == "naïve 😀 Привет\n"


def test_ids_may_be_numpy_integers_and_arrays() -> None:
    detokenizer = StreamingDetokenizer(decode_bytes)
    assert detokenizer.push(np.int64(65)) == "A"
    assert detokenizer.push(np.array([66, 67])) == "BC"


def test_after_a_flush_a_new_text_begins() -> None:
    detokenizer = StreamingDetokenizer(sentencepiece(["▁Hello".encode()]))
    assert detokenizer.push(0) == "Hello"
    assert detokenizer.push(0) == " Hello"
    assert detokenizer.flush() == ""
    assert detokenizer.push(0) == "Hello"


def test_going_on_from_a_prompt_keeps_the_first_space() -> None:
    detokenizer = StreamingDetokenizer(sentencepiece(["▁In".encode(), "▁the".encode()]))
    detokenizer.push([0])
    assert detokenizer.push(1) == " the"


def test_tokens_without_text_between_words() -> None:
    """The end of a text and the start of the next are tokens too; the space after them is no first one."""
    decode = sentencepiece(["▁Hello".encode(), b"", "▁world".encode()])
    assert stream(decode, [1, 0, 1, 1, 2]) == ["", "Hello", "", "", " world", ""]


def check_stream(decode: Decode, ids: Sequence[int]) -> None:
    pieces = stream(decode, ids)
    assert "".join(pieces) == decode(ids)
    # Three tokens may wait, and no more.
    for index in range(len(ids)):
        assert len("".join(pieces[: index + 1])) >= len(decode(ids[: index + 1]).rstrip("\ufffd"))


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=60))
def test_any_tokens_of_a_byte_level_bpe(ids: list[int]) -> None:
    check_stream(decode_bpe, ids)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_of_a_byte_level_bpe(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert "".join(stream(decode_bpe, ids)) == decode_bpe(ids) == text


@settings(deadline=None)
@given(st.text(st.sampled_from("ab é€😀你") | st.characters(codec="utf-8"), max_size=40))
def test_any_text_of_a_tokenizer_with_byte_fallback(text: str) -> None:
    ids = LLAMA_LIKE.encode(text).ids
    assert "".join(stream(LLAMA_LIKE.decode, ids)) == LLAMA_LIKE.decode(ids) == text.replace("▁", " ")


@settings(deadline=None)
@given(st.binary(max_size=80) | st.lists(st.sampled_from([0x41, 0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0x9F, 0xFF]), max_size=80).map(bytes))
def test_any_bytes(data: bytes) -> None:
    check_stream(decode_bytes, data)


@st.composite
def split_texts(draw: st.DrawFn) -> tuple[Decode, list[int]]:
    """A text with spaces as "▁", cut into pieces anywhere, also inside a character; some are empty."""
    data = draw(st.text(st.sampled_from("ab ▁é€😀\ufffd") | st.characters(codec="utf-8"), max_size=40)).replace(" ", "▁").encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=60)))
    pieces = [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return sentencepiece(pieces), list(range(len(pieces)))


@settings(deadline=None, max_examples=300)
@given(split_texts())
def test_any_split_of_a_text_into_pieces(example: tuple[Decode, list[int]]) -> None:
    check_stream(*example)


@pytest.mark.parametrize("data", [b"The quick brown fox. ", "😀".encode(), b"\xff", b"\xf0\x9f\x98", b"\x80\xf0"])
def test_work_per_token_does_not_grow(data: bytes) -> None:
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode_bytes(ids)

    ids = data * 2000
    assert "".join(stream(decode, ids)) == decode_bytes(ids)
    assert decoded < 40 * len(ids)


def test_tokens_without_text_do_not_pile_up() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes([token for token in ids if token < 256])

    assert "".join(stream(decode, [65, *[999] * 500, 0xFF, *[999] * 500, 66])) == "A\ufffdB"
    assert longest < 40
