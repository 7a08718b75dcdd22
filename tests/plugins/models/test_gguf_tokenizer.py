"""The tokenizer inside a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from miniort.errors import TokenizerError
from miniort_models.fast_tokenizer import FastTokenizer
from miniort_models.gguf_tokenizer import end_tokens, merges_of_scores
from miniort_models.tokenizer import open_tokenizer
from miniort_models.weights.gguf_header import read_header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXT = "The 12345 dogs don't like HelloWorld,\r\n\n  and I'LL say: it's 2024! naïve 日本語 😀\n"


def write(path: Path, architecture: str = "llama", **entries: Any) -> Path:
    """A GGUF file without tensors, whose tokenizer's metadata are `entries`."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in entries.items():
        full = f"tokenizer.ggml.{key}" if key != "chat_template" else "tokenizer.chat_template"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif value:
            writer.add_array(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def learned() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE."""
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator([TEXT * 4], vocab_size=340, min_frequency=2, show_progress=False)
    ids = learner.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [f"{left} {right}" for left, right in json.loads(learner.to_str())["model"]["merges"]]
    return tokens, merges


def byte_level(path: Path, learned: tuple[list[str], list[str]], pre: str, special: Sequence[str] = (), **entries: Any) -> FastTokenizer:
    tokens, merges = learned
    kinds = [CONTROL] * len(special) + [NORMAL] * len(tokens)
    return open_tokenizer(
        write(path / "model.gguf", model="gpt2", pre=pre, tokens=[*special, *tokens], token_type=kinds, merges=merges, **entries)
    )


SPLITS = {
    "gpt-2": ["The", " 12345", " dogs", " don", "'t", " HelloWorld", ",", "\r\n\n ", " and", " I", "'", "LL", "!", " naïve"],
    "smollm": ["The", " ", "1", "2", "3", "4", "5", " dogs", "'t", " HelloWorld", "\r\n\n ", "'", "LL", "2", "0", "2", "4", "!"],
    "llama-bpe": ["The", " ", "123", "45", " dogs", "'t", " HelloWorld", ",\r\n\n", " ", " and", " I", "'LL", "202", "4", "!"],
    "qwen2": ["The", " ", "1", "2", "3", "4", "5", "'t", " HelloWorld", ",\r\n\n", " ", " and", "'LL", "2", "0", "2", "4"],
    "tekken": ["The", "1", "2", "3", "4", "5", " don", "'t", " Hello", "World", ",\r\n\n", " I", "'LL", " naïve"],
    "gpt-4o": ["The", "123", "45", " don't", " Hello", "World", ",\r\n\n", " I'LL", " it's", "202", "4"],
}
"""Words that each rule makes of TEXT, in their order; those that all rules make are left out."""


@pytest.mark.parametrize("pre", SPLITS)
def test_how_a_text_is_split(tmp_path: Path, learned: tuple[list[str], list[str]], pre: str) -> None:
    tokenizer = byte_level(tmp_path, learned, pre)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    splitter = tokenizer._tokenizer.pre_tokenizer
    words = [TEXT[start:end] for _, (start, end) in splitter.pre_tokenize_str(TEXT)]
    assert "".join(words) == TEXT
    rest = iter(words)
    assert all(any(word == wanted for word in rest) for wanted in SPLITS[pre]), words


def test_words_are_looked_up_before_merges_are_tried(tmp_path: Path) -> None:
    """A token that no merges lead to is found by models like Llama 3, and not by others."""
    learned = (["a", "b", "c", "ab", "abc"], ["a b"])
    assert byte_level(tmp_path, learned, "llama-bpe").encode("abc") == [4]
    assert byte_level(tmp_path, learned, "qwen2").encode("abc") == [3, 2]


def test_characters_are_composed_for_qwen2(tmp_path: Path, learned: tuple[list[str], list[str]]) -> None:
    tokenizer = byte_level(tmp_path, learned, "qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    other = byte_level(tmp_path, learned, "gpt-2")
    assert other.encode("e\u0301") != other.encode("\u00e9")


def test_special_tokens_and_the_begin_token(tmp_path: Path, learned: tuple[list[str], list[str]]) -> None:
    special = ["<|begin|>", "<|im_end|>", "<|other|>"]
    entries = {"bos_token_id": 0, "eos_token_id": 2, "chat_template": "{{ bos_token }}"}
    tokenizer = byte_level(tmp_path, learned, "llama-bpe", special, **entries)
    plain = byte_level(tmp_path, learned, "llama-bpe", special, **entries, add_bos_token=False)
    ids = plain.encode("The<|im_end|>The")
    assert ids == [*plain.encode("The"), 1, *plain.encode("The")]
    assert tokenizer.encode("The<|im_end|>The") == [0, *ids]
    assert tokenizer.encode("The<|im_end|>The", add_special_tokens=False) == ids
    assert tokenizer.decode([0, *ids]) == "TheThe"
    assert tokenizer.token_bytes(1) == b""
    assert end_tokens(read_header(tmp_path / "model.gguf")) == {1, 2}


def test_it_is_the_same_as_a_tokenizer_json(tmp_path: Path, learned: tuple[list[str], list[str]]) -> None:
    tokenizer = byte_level(tmp_path, learned, "smollm", ["<|endoftext|>"], bos_token_id=0, add_bos_token=True)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    again = open_tokenizer(tmp_path / "tokenizer.json")
    for text in (TEXT, "<|endoftext|>", ""):
        assert again.encode(text) == tokenizer.encode(text)
    assert again.vocabulary_size == tokenizer.vocabulary_size


# ----------------------------------------------------------------------------------------------- SentencePiece

PIECES = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "▁abc", "ca", "cab", "aa", "aaaa", "▁b"]
SCORES = [-10.0, -11.0, -12.0, -13.0, -3.0, -1.0, -6.0, -2.0, -8.0, -9.0, -2.5, -4.0, -5.0, -7.0, -3.5]


def joined(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as it's told: as long as any two neighbours are a piece, join those with the highest score, leftmost first."""
    pieces = list(text)
    while True:
        wholes = [left + right for left, right in pairwise(pieces)]
        pairs = [(-scores[whole], place) for place, whole in enumerate(wholes) if whole in scores]
        if not pairs:
            return pieces
        _, place = min(pairs)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


def sentencepiece(path: Path, **entries: Any) -> FastTokenizer:
    special = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *byte_pieces, *PIECES, "<tool>"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED]
    scores = [*[0.0] * 259, *SCORES, 0.0]
    given = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "bos_token_id": 1, "eos_token_id": 2}
    return open_tokenizer(write(path / "model.gguf", **(given | entries)))


@settings(deadline=None, max_examples=150)
@given(text=st.text("abc ", max_size=30))
def test_pieces_are_joined_by_their_scores(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = sentencepiece(tmp_path_factory.getbasetemp())
    scores = dict(zip(PIECES, SCORES, strict=True))
    wanted = [PIECES.index(piece) + 259 for piece in joined("▁" + text.replace(" ", "▁"), scores)] if text else []
    assert tokenizer.encode(text) == [1, *wanted]
    assert tokenizer.decode(wanted) == text


def test_what_is_no_piece_is_bytes(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    ids = tokenizer.encode("a é")
    assert ids[-2:] == [3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(ids) == "a é"
    assert [tokenizer.token_bytes(token) for token in ids[-2:]] == [b"\xc3", b"\xa9"]
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "a<tool> b"


def test_no_space_in_front_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert tokenizer.encode("abc") == [259 + PIECES.index("abc")]
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_merges_are_those_of_the_best_whole_first() -> None:
    tokens = ["a", "b", "ab", "aba"]
    merges = merges_of_scores(tokens, [0, 0, -2.0, -1.0], {text: token for token, text in enumerate(tokens)})
    assert merges == [("ab", "a"), ("a", "b")]


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({}, "has no tokenizer in it"),
        ({"model": "bert", "tokens": ["a"]}, "of the kind 'bert'; known are gpt2 and llama"),
        ({"model": "gpt2", "tokens": ["a"], "merges": ["a a"]}, "doesn't say how its tokenizer splits a text"),
        ({"model": "gpt2", "pre": "klingon", "tokens": ["a"], "merges": ["a a"]}, "splits a text as 'klingon' does; known are"),
        ({"model": "gpt2", "pre": "gpt-2", "tokens": ["a"]}, r"tokenizer\.ggml\.merges must be pairs of pieces"),
        ({"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": ["a b"]}, "the merges don't fit the vocabulary"),
        ({"model": "llama", "tokens": ["a", "b"], "scores": [0.5]}, "must have one number for each of the 2 tokens"),
        ({"model": "llama", "tokens": ["a"], "scores": [0.5], "bos_token_id": 7}, "the begin token 7 isn't in the vocabulary of 1"),
    ],
)
def test_what_is_wrong_with_a_tokenizer(tmp_path: Path, entries: dict[str, Any], said: str) -> None:
    with pytest.raises(TokenizerError, match=said) as caught:
        open_tokenizer(write(tmp_path / "model.gguf", **entries))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_gguf_is_a_tokenizer_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"nonsense")
    with pytest.raises(TokenizerError, match="is no GGUF file"):
        open_tokenizer(tmp_path / "model.gguf")
