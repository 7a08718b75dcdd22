"""`miniort verify`: tables, JSON and a page; exit status 1 for a cache that's wrong, 2 for an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import Result

Miniort = Callable[..., Result]

DATA = Path(__file__).parents[1] / "data"
GPT2 = str(DATA / "fixtures" / "gpt2_optimum")
QUICK = ("verify", GPT2, "--quick", "--max-context", "24")

WRONG_LAYOUT = """
import numpy as np
from miniort.generation import CacheLayoutInfo
from miniort.plugins import hookimpl
from miniort_cache_layouts.concat import concat_bhtd

class Backwards:
    def __init__(self, spec):
        self.right = concat_bhtd(spec)

    def __getattr__(self, name):
        return getattr(self.right, name)

    def append(self, layer, key, value):
        new = key.shape[2]
        both = self.right.append(layer, key, value)
        return tuple(np.concatenate([a[:, :, a.shape[2] - new:], a[:, :, :a.shape[2] - new]], axis=2) for a in both)

@hookimpl
def miniort_cache_layouts():
    return [CacheLayoutInfo("backwards", Backwards)]
"""


class Page(HTMLParser):
    """The tags of a page that need closing, and whatever it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.loads: list[str] = []
        self.problems: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "xlink:href")]
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> where another was open")


def test_right_layouts_pass(miniort: Miniort, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = miniort(*QUICK, "--cache", "concat_bhtd", "--cache", "window:window=6,sinks=1", "--cache", "int8", "--html", str(page))
    assert result.exit_code == 0, result.stdout
    assert result.stdout.splitlines()[-1] == "passed: concat_bhtd, window:window=6,sinks=1, int8"
    for title in ("every check", "time to first token", "time per token", "new tokens per second", "memory, one request"):
        assert any(line.startswith(title) for line in result.stdout.splitlines()), title
    text = page.read_text()
    parsed = Page(text)
    assert parsed.problems == []
    assert parsed.open == []
    assert parsed.loads == [], "the page must need nothing but itself"
    assert "url(" not in text
    assert "@import" not in text
    assert "<script" not in text
    assert parsed.seen["figure"] == 8
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_json_has_all_four_sets_of_figures(miniort: Miniort) -> None:
    result = miniort(*QUICK, "--cache", "static", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["passed"] is True
    assert (found["model"], found["providers"], found["max_context"], found["context_length"]) == ("gpt2_optimum", ["cpu"], 24, 128)
    [layout] = found["layouts"]
    checks = {check["name"] for check in layout["checks"]}
    assert checks == {
        "cached = uncached",
        "chunked = single",
        "layout = concat_bhtd",
        "rewound = uncached",
        "forked = uncached",
        "batched = alone",
    }
    prompts = [check["detail"] for check in layout["checks"] if check["name"] == "cached = uncached"]
    assert prompts == ["prompt of 1, 6 steps", "prompt of 7, 6 steps", "prompt of 19, 6 steps"]
    assert [each["key_shape"] for each in layout["layers"]] == [[1, 4, 24, 16]] * 3
    measured = found["measurement"]
    assert measured.keys() == {"uncached", "latency", "throughput", "memory"}
    assert [each["tokens"] for each in measured["memory"]] == [16, 24]


def test_wrong_layout_is_status_1_and_is_not_measured(miniort: Miniort, install_plugin: Callable[[str, str], Path], tmp_path: Path) -> None:
    install_plugin("backwards", WRONG_LAYOUT)
    page = tmp_path / "page.html"
    result = miniort(*QUICK, "--cache", "backwards", "--cache", "concat_bhtd", "--html", str(page), "--json")
    assert result.exit_code == 1, result.stderr
    found = json.loads(result.stdout)
    assert [(each["layout"], each["passed"]) for each in found["layouts"]] == [("backwards", False), ("concat_bhtd", True)]
    assert [each["layout"] for each in found["measurement"]["latency"]] == ["concat_bhtd"]
    assert "FAILED" in page.read_text()
    assert Page(page.read_text()).problems == []


def test_wrong_layout_alone(miniort: Miniort, install_plugin: Callable[[str, str], Path], tmp_path: Path) -> None:
    install_plugin("backwards", WRONG_LAYOUT)
    page = tmp_path / "page.html"
    result = miniort(*QUICK, "--cache", "backwards", "--html", str(page))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "FAILED: backwards"
    assert Page(page.read_text()).open == []


def test_a_tolerance_that_is_too_strict_fails(miniort: Miniort) -> None:
    result = miniort(*QUICK, "--cache", "concat_bhtd", "--tolerance", "1e-12")
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nope"], "nope: no such file or folder"),
        ([GPT2, "--cache", "nope"], "no cache layout is named 'nope'"),
        ([GPT2, "--cache", "window:size=3"], "cache layout 'window' has no option 'size'; its options: window"),
        ([GPT2, "--cache", "window:window"], "is not of the form NAME:key=value"),
        ([GPT2, "--cache", "window:window=2,window=3"], "gives window twice"),
        ([GPT2, "--cache", ":window=2"], "has no name"),
        ([GPT2, "--max-context", "1"], "--max-context"),
        ([GPT2, "--max-context", "1000"], "more than the model's context of 128"),
        ([GPT2, "--tolerance", "-1"], "--tolerance"),
        ([GPT2, "--html", "/nowhere/page.html", "--cache", "concat_bhtd"], "there is no folder"),
        ([str(DATA / "fixtures" / "gpt2_optimum_legacy"), "--cache", "window"], "takes no positions"),
        ([], "Missing argument 'MODEL'"),
    ],
)
def test_errors_are_status_2(miniort: Miniort, arguments: list[str], part: str) -> None:
    result = miniort("verify", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert part in line
