"""What single tokens add to a text, in bytes: joined, they're the text that the tokenizer decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from miniort.errors import TokenizerError
from miniort_models.fast_tokenizer import FastTokenizer
from miniort_models.tokenizer import open_tokenizer


@pytest.fixture(scope="module")
def byte_level(data: Path) -> FastTokenizer:
    return open_tokenizer(data / "tokenizer" / "tokenizer.json")


@pytest.mark.parametrize("text", ["In the beginning", "  two  spaces\n\ttab", "naïve 日本語 😀 \x00\x7f", "it's 1.5e-3!"])
def test_bytes_of_the_tokens_make_up_the_text(byte_level: FastTokenizer, text: str) -> None:
    assert b"".join(map(byte_level.token_bytes, byte_level.encode(text))).decode() == text


def test_all_bytes_are_there_and_special_tokens_have_none(byte_level: FastTokenizer) -> None:
    spelled = [byte_level.token_bytes(token) for token in range(byte_level.vocabulary_size)]
    assert {bytes([byte]) for byte in range(256)} <= set(spelled)
    assert spelled[:3] == [b"", b"", b""]
    assert byte_level.token_bytes(10**6) == b""


def test_sentencepiece_spells_spaces_and_bytes() -> None:
    vocabulary = {"<unk>": 0, "▁Hello": 1, "▁": 2, "<0xC3>": 3, "<0xA9>": 4, "é": 5, "s": 6}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_tokens(["<plain>"])
    inner.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = FastTokenizer(inner)
    ids = [1, 3, 4, 5, 2, 6, 7]
    assert b"".join(map(tokenizer.token_bytes, ids)) == " Helloéé s<plain>".encode()
    assert tokenizer.decode(ids) == " Helloéé s<plain>"
    assert tokenizer.token_bytes(8) == b""


def test_a_tokenizer_of_another_kind_says_so() -> None:
    inner = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    inner.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="whose decoder is WordPiece"):
        FastTokenizer(inner).token_bytes(0)
