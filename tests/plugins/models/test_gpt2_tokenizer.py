"""GPT-2's tokenizer out of `vocab.json` and `merges.txt`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from miniort.errors import TokenizerError
from miniort_models.tokenizer import find_tokenizer, open_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:30, and I'd say they've seen 1,024 of 'em!",
    "def f(x: int) -> int:\n    return x ** 2  # a comment\n\n\nfor i in range(10):\n\tprint(f'{i=}')\n",
    "naïve café, Ünïcödé, Ελληνικά, русский язык, العربية, हिन्दी",
    "日本語の文章と、中文的句子。한국어 문장도 있습니다。",
    "😀😃 👩‍👩‍👧‍👦 🇫🇷 e\u0301 \u200b\ufeff zero\u00a0width",
    " leading, trailing  and   inner    spaces \t\t tabs \r\n\r\n lines \n \n end ",
    "",
    "\n",
    "   ",
    "a  b",
    "\n\n x",
    "it 's",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small vocabulary, learned from the corpus."""
    path = tmp_path_factory.mktemp("gpt2")
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(CORPUS * 3, vocab_size=600, min_frequency=2, special_tokens=["<|endoftext|>"], show_progress=False)
    learner.save_model(str(path))
    return path


def test_it_splits_and_joins_as_the_library_does(folder: Path) -> None:
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    reference = HuggingFaceTokenizer(models.BPE(vocabulary, [tuple(line.split(" ")) for line in lines]))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    tokenizer = open_tokenizer(folder)
    for text in CORPUS:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert any(len(tokenizer.encode(text)) < len(text) / 2 for text in CORPUS), "the merges are of use"


def test_the_end_of_a_text_is_one_token_without_a_text(folder: Path) -> None:
    tokenizer = open_tokenizer(folder)
    assert tokenizer.encode("<|endoftext|>") == [0]
    assert tokenizer.decode([0]) == ""


@pytest.mark.parametrize("name", ["", "vocab.json", "merges.txt"])
def test_the_folder_or_either_file_may_be_named(folder: Path, name: str) -> None:
    assert open_tokenizer(folder / name).vocabulary_size == len(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    assert find_tokenizer([folder.parent, folder]) == folder / "vocab.json"


def test_added_tokens_get_the_next_ids(folder: Path, tmp_path: Path) -> None:
    for each in ("vocab.json", "merges.txt"):
        (tmp_path / each).write_bytes((folder / each).read_bytes())
    size = open_tokenizer(folder).vocabulary_size
    added = {str(size + 1): {"content": "<b>"}, str(size): {"content": "<a>", "special": True}, "0": {"content": "<|endoftext|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode("<a><b>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<b>"
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<c>": size + 7}))
    with pytest.raises(TokenizerError, match=f"'<c>' must have the id {size + 7}, behind the others it has {size + 2}"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("merges.txt", None, "can't be read"),
        ("merges.txt", "#version: 0.2\nĠ t\nĠt\n", r"merges\.txt: line 3 must be two pieces"),
        ("merges.txt", "#version: 0.2\nqqq zzz\n", "the merges don't fit the vocabulary"),
        ("merges.txt", b"\xff", "can't be read"),
        ("vocab.json", "{", "can't be read as JSON"),
        ("vocab.json", "[]", "must be a JSON object"),
        ("vocab.json", '{"a": "b"}', "must map each token to its id"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path, file: str, content: str | bytes | None, said: str) -> None:
    for each in ("vocab.json", "merges.txt"):
        (tmp_path / each).write_bytes((folder / each).read_bytes())
    path = tmp_path / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=said) as caught:
        open_tokenizer(tmp_path / "vocab.json")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json, and not both vocab\.json and merges\.txt"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TokenizerError, match=r"tokenizer\.model is there, which isn't read"):
        open_tokenizer(tmp_path)
