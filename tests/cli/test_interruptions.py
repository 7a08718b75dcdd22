"""A stream that is interrupted, or that nobody reads any more, ends cleanly."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Miniort = Callable[..., Result]

COMMAND = [sys.executable, "-c", "from miniort_cli.main import main; main()"]
LONG = ["generate", "In the beginning", "--max-new-tokens", "200", "--no-cache"]  # without a cache it takes seconds

INTERRUPTING_SAMPLER = """
from miniort.generation.sampling import SamplerInfo
from miniort.plugins import hookimpl

@hookimpl
def miniort_samplers():
    def create():
        calls = []
        def sample(logits, rngs):
            calls.append(1)
            if len(calls) > 3:
                raise KeyboardInterrupt
            return logits.argmax(axis=-1)
        return sample
    return [SamplerInfo("interrupting", create)]
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for another process")
def test_ctrl_c_ends_a_stream() -> None:
    with subprocess.Popen([*COMMAND, *LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        beginning = process.stdout.read(30)  # it comes while the rest is being made
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    text = (beginning + rest).decode()
    assert process.returncode == 130
    assert text.startswith("In the beginning")
    assert text.endswith("\n")
    assert errors == b""


def test_the_text_so_far_stands(miniort: Miniort, install_plugin: Callable[[str, str], Path]) -> None:
    install_plugin("interrupting", INTERRUPTING_SAMPLER)
    wanted = miniort("generate", "In the beginning", "--max-new-tokens", "3")
    result = miniort("generate", "In the beginning", "--sampler", "interrupting", "--stats")
    assert result.exit_code == 130
    assert result.stdout == wanted.stdout
    assert any(line.split() == ["new", "tokens", "3"] for line in result.stderr.splitlines())


def test_no_object_is_printed_for_half_a_text(miniort: Miniort, install_plugin: Callable[[str, str], Path]) -> None:
    install_plugin("interrupting", INTERRUPTING_SAMPLER)
    result = miniort("generate", "In the beginning", "--sampler", "interrupting", "--json")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "\n")


@pytest.mark.skipif(sys.platform == "win32", reason="a closed pipe is another error on Windows")
def test_a_reader_that_goes_away_ends_a_stream() -> None:
    with subprocess.Popen([*COMMAND, *LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(20)
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    assert errors == b""
    assert process.returncode == 1
