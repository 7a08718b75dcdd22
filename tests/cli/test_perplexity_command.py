"""`miniort perplexity`: figures of a text, and of two models side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from miniort.generation import next_token_log_probabilities, open_decoder

Miniort = Callable[..., Result]

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness – naïve – was there."


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_figures_are_those_of_a_direct_computation(miniort: Miniort, text: Path) -> None:
    found = json.loads(miniort("perplexity", "demo", str(text), "--json").stdout)
    decoder = open_decoder("demo")
    tokenizer = decoder.open_tokenizer()
    ids = tokenizer.encode(TEXT)
    nats = -next_token_log_probabilities(decoder, ids).sum()
    decoder.close()
    first = len(tokenizer.decode(ids[:1]).encode())
    assert found["model"] == "demo"
    assert found["tokens"] == len(ids) - 1
    assert found["bytes"] == len(TEXT.encode()) - first
    assert found["nats_per_token"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"], rel=1e-5)
    assert found["tokens_per_second"] > 0
    text.write_text(" ".join(reversed(TEXT.split(" "))), encoding="utf-8")
    backwards = json.loads(miniort("perplexity", "demo", str(text), "--json").stdout)
    assert backwards["perplexity"] > 2 * found["perplexity"]


def test_two_models_side_by_side(miniort: Miniort, text: Path, demo_copy: Callable[..., Path]) -> None:
    other = str(demo_copy())
    found = json.loads(miniort("perplexity", "demo", str(text), "--against", other, "--max-tokens", "20", "--json").stdout)
    assert found["tokens"] == found["against"]["tokens"] == 19
    assert found["ratio"] == pytest.approx(1)
    table = miniort("perplexity", "demo", str(text), "--against", other, "--max-tokens", "20").stdout
    assert table.splitlines()[0].split() == ["figure", "demo", "demo-copy"]
    assert f"perplexity of {other}: 1.0000 times that of demo" in table
    assert "bits per byte" in table


def test_windows_change_what_is_seen(miniort: Miniort, text: Path) -> None:
    arguments = ("perplexity", "demo", str(text), "--json")
    whole = json.loads(miniort(*arguments).stdout)
    short = json.loads(miniort(*arguments, "--window", "4", "--stride", "3").stdout)
    assert short["tokens"] == whole["tokens"]
    assert short["perplexity"] > whole["perplexity"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("none.txt",), "none.txt can't be read: No such file or directory"),
        (("TEXT", "--stride", "4", "--window", "4"), "the stride must be at least 1 and less than the window"),
        (("TEXT", "--window", "999"), "a window of 999 tokens is more than the model's context of 256"),
        (("BYTES",), "must be UTF-8; byte 1 is not"),
        (("EMPTY",), "at least two tokens"),
        (("TEXT", "--against", "nothing"), "nothing: no such file or folder"),
    ],
)
def test_one_line_says_what_is_wrong(miniort: Miniort, text: Path, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "bytes").write_bytes(b"a\xff")
    (tmp_path / "empty").touch()
    places = {"TEXT": str(text), "BYTES": str(tmp_path / "bytes"), "EMPTY": str(tmp_path / "empty")}
    result = miniort("perplexity", "demo", *(places.get(each, each) for each in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
