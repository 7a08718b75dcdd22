"""Tokenizers that come as `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, pre_tokenizers, processors

from miniort.errors import TokenizerError
from miniort.generation.sources import DecoderSource, ModelFormat, Tokenizer
from miniort.plugins import create_plugin_manager, find_named

SHARED = Path(__file__).parents[2] / "data" / "tokenizer" / "tokenizer.json"


def open_beside_a_graph(path: Path) -> Tokenizer:
    """The tokenizer as a generator finds it: `tokenizer.json` in the folder of a graph."""
    (path.parent / "model.onnx").touch()
    model_format = find_named(create_plugin_manager(allow=["models"]), "miniort_model_formats", ModelFormat, "onnx_folder", "format")
    source: DecoderSource = model_format.open(str(path.parent))
    assert source.tokenizer is not None
    return source.tokenizer()


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Tokenizer]:
    """Opens the shared tokenizer with some entries of its file changed."""

    def make(**entries: Any) -> Tokenizer:
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(SHARED.read_text(encoding="utf-8")), **entries}))
        return open_beside_a_graph(path)

    return make


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("shared") / "tokenizer.json"
    path.write_bytes(SHARED.read_bytes())
    return open_beside_a_graph(path)


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_text_comes_back_as_it_was(shared: Tokenizer, text: str) -> None:
    ids = shared.encode(text)
    assert shared.decode(ids) == text
    assert all(0 <= token < shared.vocabulary_size for token in ids)


def test_text_is_not_cleaned_up(shared: Tokenizer) -> None:
    for text in ("it 's , so .", " do n't", "a  b\n\n x "):
        assert shared.decode(shared.encode(text)) == text


def test_half_a_character_is_a_replacement_character(shared: Tokenizer) -> None:
    ids = shared.encode("😀")
    assert len(ids) > 1
    assert shared.decode(ids[:-1]).strip("\ufffd") == ""
    assert shared.decode(ids[:-1]) != ""


def test_special_tokens_have_no_text(shared: Tokenizer) -> None:
    assert shared.decode([1, *shared.encode("word"), 2, 0]) == "word"


def test_the_template_puts_its_tokens_in_front(changed: Callable[..., Tokenizer], shared: Tokenizer) -> None:
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = changed(post_processor=json.loads(template.__getstate__()))
    assert tokenizer.encode("word") == [1, *shared.encode("word")]
    assert tokenizer.decode(tokenizer.encode("word")) == "word"


def test_prompts_are_neither_cut_nor_filled_up(changed: Callable[..., Tokenizer], shared: Tokenizer) -> None:
    tokenizer = changed(
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 500},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    )
    text = "a prompt of more than three tokens"
    assert tokenizer.encode(text) == shared.encode(text)


def test_vocabulary_size_counts_added_tokens_and_gaps(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert open_beside_a_graph(tmp_path / "tokenizer.json").vocabulary_size == 8


def test_text_that_is_no_unicode(shared: Tokenizer) -> None:
    """Such as bytes on a command line that Python could not decode."""
    with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
        shared.encode("ab\udc80")


@pytest.mark.parametrize("content", [b"", b'{"version": "1.0", "mod', b"[]", b"\xff\xfe", b'{"version": "1.0"}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer.json (is no tokenizer|can't be read)") as caught:
        open_beside_a_graph(path)
    assert "\n" not in str(caught.value)
