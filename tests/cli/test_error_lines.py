"""What goes wrong is one clear line on standard error, and exit status 2."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Miniort = Callable[..., Result]

DATA = Path(__file__).parents[1] / "data"
GPT2 = DATA / "fixtures" / "gpt2_optimum"
TOKENIZER = str(DATA / "tokenizer" / "tokenizer.json")


def error_line(result: Result) -> str:
    """The one line; standard output is empty."""
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("miniort: error: ")
    return line.removeprefix("miniort: error: ")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["x", "--sampler", "greedyy"], ["no sampler is named 'greedyy'", "did you mean 'greedy'?"]),
        (["x", "--cache", "nope"], ["no cache layout is named 'nope'", "concat_bhtd"]),
        (["x", "--providers", "nope"], ["no provider is named 'nope'", "cpu"]),
        (["x", "--providers", "cpu,cpu"], ["'cpu' is asked for twice"]),
        (["x", "--model", "nope"], ["nope: no such file or folder, and no model has this name", "demo"]),
        (["x", "--model", "./nope"], ["no such file or folder: ./nope"]),
        (["x", "--model", "nope.onnx"], ["no such file or folder: nope.onnx"]),
        (["x", "--model", TOKENIZER], ["no model format recognises it"]),
        (["x", "--model", str(GPT2)], ["gpt2_optimum: no tokenizer.json beside the model; name one with --tokenizer"]),
        (["x", "--tokenizer", "nope.json"], ["nope.json can't be read"]),
        (["word " * 600], ["tokens are more than the model's context of 256; shorten the prompt"]),
        (["x", "--bind", "foo=bar"], ["a binding has no role 'foo'", "tokens"]),
        (["x", "--bind", "tokens=bar"], ["tokens shall be 'bar', but there is no such name", "input_ids"]),
        # Wrong usage
        ([], ["Missing argument 'PROMPT'", "miniort generate --help"]),
        (["x", "--modell", "y"], ["No such option", "--modell", "'--model'", "miniort generate --help"]),
        (["x", "--no-cache", "--cache", "concat_bhtd"], ["--no-cache and --cache contradict each other"]),
        (["x", "--providers", "cpu,"], ["'cpu,' has a name that is empty"]),
        (["x", "--providers", "cpu:threads"], ["'cpu:threads' is not of the form NAME:KEY=VALUE"]),
        (["x", "--providers", "cpu:a=1,b=2"], ["provider 'cpu' has no option 'a'"]),
        (["x", "--providers", "cpu:a=1,b=2,cpu"], ["'cpu' is asked for twice"]),
        (["x", "--bind", "foo"], ["'foo' is not of the form ROLE=NAME"]),
        (["x", "--bind", "tokens=a", "--bind", "tokens=b"], ["the role tokens is given twice"]),
        (["x", "--max-new-tokens", "-1"], ["--max-new-tokens", "-1"]),
        (["x", "--prefill-chunk", "0"], ["--prefill-chunk", "0"]),
        (["x", "--top-k-print", "0"], ["--top-k-print", "0"]),
    ],
)
def test_generate(miniort: Miniort, arguments: list[str], parts: list[str]) -> None:
    line = error_line(miniort("generate", *arguments))
    for part in parts:
        assert part in line


def test_errors_with_json_leave_standard_output_empty(miniort: Miniort) -> None:
    assert "no sampler" in error_line(miniort("generate", "x", "--json", "--sampler", "nope"))


def test_a_provider_that_is_not_there_says_why(miniort: Miniort, install_plugin: Callable[[str, str], Path]) -> None:
    install_plugin(
        "absent",
        "from miniort.plugins import hookimpl\n"
        "from miniort.providers import Availability, ProviderInfo\n"
        "@hookimpl\n"
        "def miniort_providers():\n"
        "    return [ProviderInfo('absent', 500, check=lambda: Availability(False, 'the\\nmachine has none'), open=None)]\n",
    )
    assert "provider 'absent' can't be used here: the machine has none" in error_line(miniort("generate", "x", "--providers", "absent,cpu"))


def test_a_folder_without_a_decoder(miniort: Miniort, tmp_path: Path) -> None:
    assert f"{tmp_path} holds no decoder" in error_line(miniort("generate", "x", "--model", str(tmp_path)))


def test_a_graph_that_was_cut_short(miniort: Miniort, tmp_path: Path) -> None:
    model = shutil.copy(GPT2 / "model.onnx", tmp_path)
    with open(model, "r+b") as file:
        file.truncate(30_000)
    line = error_line(miniort("generate", "x", "--model", str(tmp_path), "--tokenizer", TOKENIZER))
    assert "model.onnx" in line
    assert "cut short" in line


def test_weights_that_were_cut_short(miniort: Miniort, demo_copy: Callable[..., Path]) -> None:
    folder = demo_copy()
    with open(folder / "weights.bin", "r+b") as file:
        file.truncate(100_000)
    line = error_line(miniort("generate", "x", "--model", str(folder)))
    assert "weights.bin" in line
    assert "cut short" in line


@pytest.mark.parametrize(("end_tokens", "part"), [(None, "no end token"), ([0, 7], "several end tokens (0, 7)")])
def test_an_empty_prompt_needs_a_token_to_start_from(
    miniort: Miniort, demo_copy: Callable[..., Path], end_tokens: list[int] | None, part: str
) -> None:
    line = error_line(miniort("generate", "", "--model", str(demo_copy(bos_token_id=None, eos_token_id=end_tokens))))
    assert "the prompt is empty" in line
    assert part in line


def test_standard_input_that_is_no_text(miniort: Miniort) -> None:
    assert "must be UTF-8; byte 3" in error_line(miniort("generate", "-", stdin=b"In \xff"))


def test_an_argument_that_is_no_text(miniort: Miniort) -> None:
    """Bytes of the command line that are no UTF-8 come as lone surrogates."""
    assert "lone surrogate" in error_line(miniort("generate", "a\udcff"))


def test_an_error_in_the_middle_of_a_text_ends_its_line(miniort: Miniort, install_plugin: Callable[[str, str], Path]) -> None:
    install_plugin(
        "stops",
        "from miniort.errors import GenerationError\n"
        "from miniort.generation.sampling import SamplerInfo\n"
        "from miniort.plugins import hookimpl\n"
        "@hookimpl\n"
        "def miniort_samplers():\n"
        "    def create():\n"
        "        calls = []\n"
        "        def sample(logits, rngs):\n"
        "            calls.append(1)\n"
        "            if len(calls) > 3:\n"
        "                raise GenerationError('three are enough')\n"
        "            return logits.argmax(axis=-1)\n"
        "        return sample\n"
        "    return [SamplerInfo('stops', create)]\n",
    )
    whole = miniort("generate", "In the beginning", "--max-new-tokens", "3")
    result = miniort("generate", "In the beginning", "--sampler", "stops")
    assert result.exit_code == 2
    assert result.stdout == whole.stdout
    assert result.stderr == "miniort: error: three are enough\n"


def test_an_unknown_command(miniort: Miniort) -> None:
    line = error_line(miniort("generat", "x"))
    assert "no command is named 'generat'" in line
    assert "did you mean 'generate'?" in line


def test_an_unknown_option_of_the_command_itself(miniort: Miniort) -> None:
    assert "--nope" in error_line(miniort("--nope"))


def test_no_command_at_all_shows_the_help(miniort: Miniort) -> None:
    result = miniort()
    assert result.exit_code == 2
    assert "Commands:" in result.stderr


def test_a_bug_keeps_its_traceback(miniort: Miniort, install_plugin: Callable[[str, str], Path]) -> None:
    install_plugin(
        "buggy",
        "import click\n"
        "from miniort.plugins import hookimpl\n"
        "@hookimpl\n"
        "def miniort_commands(cli):\n"
        "    cli.add_command(click.Command('buggy', callback=lambda: 1 / 0))\n",
    )
    with pytest.raises(ZeroDivisionError):
        miniort("buggy")
