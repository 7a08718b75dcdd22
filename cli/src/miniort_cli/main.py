"""The `miniort` command: its built-in commands, put together."""

from __future__ import annotations

import io
import sys

import click

from miniort import __version__
from miniort_cli.generate import generate
from miniort_cli.group import MiniortGroup
from miniort_cli.plugins import plugins
from miniort_cli.providers import providers
from miniort_cli.verify import verify
from miniort_cli.version import version


@click.group(
    cls=MiniortGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Plugins may add commands; `miniort plugins` lists them.",
)
@click.version_option(__version__, prog_name="miniort", message="%(prog)s %(version)s")
def cli() -> None:
    """A mini ONNX Runtime in Python, made of plugins."""


for _command in (generate, providers, plugins, verify, version):
    cli.add_command(_command)


def main() -> None:
    """The entry point of the installed command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may write what the terminal's encoding lacks; that must not end the stream.
        sys.stdout.reconfigure(errors="backslashreplace")
    cli(prog_name="miniort")
