"""Commands that plugins add: found when they're asked for, and none can take another's place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

Miniort = Callable[..., Result]
InstallPlugin = Callable[[str, str], Path]

SOURCE = """
import click
from miniort.errors import InputError
from miniort.plugins import hookimpl

@hookimpl
def miniort_commands(cli):
    @cli.command()
    @click.argument("word")
    def {name}(word):
        '''Say a word.'''
        if word == "wrong":
            raise InputError("that's the wrong word")
        click.echo("{said} " + word)
"""


def test_a_plugin_adds_a_command(miniort: Miniort, install_plugin: InstallPlugin) -> None:
    install_plugin("talker", SOURCE.format(name="say", said="it says"))
    assert miniort("say", "hello").stdout == "it says hello\n"
    assert "Say a word." in miniort("say", "--help").stdout
    assert "\n  say " not in miniort("--help").stdout


def test_its_errors_are_one_line_too(miniort: Miniort, install_plugin: InstallPlugin) -> None:
    install_plugin("talker", SOURCE.format(name="say", said="it says"))
    result = miniort("say", "wrong")
    assert (result.exit_code, result.stderr) == (2, "miniort: error: that's the wrong word\n")
    assert miniort("say").stderr == "miniort: error: Missing argument 'WORD' (see 'miniort say --help')\n"


def test_a_built_in_command_stays_what_it_is(miniort: Miniort, install_plugin: InstallPlugin) -> None:
    install_plugin("usurper", SOURCE.format(name="version", said="mine"))
    assert miniort("version").stdout.startswith("miniort ")
    (record,) = [each for each in json.loads(miniort("plugins", "--json").stdout)["plugins"] if each["name"] == "usurper"]
    assert record["failures"] == {"miniort_commands": "commands of these names are built in: version"}


def test_two_commands_of_one_name_are_an_error(miniort: Miniort, install_plugin: InstallPlugin) -> None:
    install_plugin("first", SOURCE.format(name="say", said="first"))
    install_plugin("second", SOURCE.format(name="say", said="second"))
    result = miniort("say", "hello")
    assert result.exit_code == 2
    assert "plugins 'first' and 'second' all add a command 'say'" in result.stderr


def test_a_plugin_that_fails_does_not_hide_the_others(miniort: Miniort, install_plugin: InstallPlugin) -> None:
    install_plugin("fails", "from miniort.plugins import hookimpl\n@hookimpl\ndef miniort_commands(cli):\n    raise OSError('no disk')\n")
    install_plugin("talker", SOURCE.format(name="say", said="it says"))
    assert miniort("say", "hello").stdout == "it says hello\n"
    assert "fails.miniort_commands (OSError: no disk)" in miniort("nope").stderr
