"""The `miniort` command: its built-in commands, put together."""

from __future__ import annotations

import io
import sys

import click

from miniort import __version__
from miniort_cli.bench import bench
from miniort_cli.chat import chat
from miniort_cli.compare import compare
from miniort_cli.convert import convert
from miniort_cli.generate import generate
from miniort_cli.group import MiniortGroup
from miniort_cli.inspect import inspect
from miniort_cli.memory import memory
from miniort_cli.models import models
from miniort_cli.optimise import optimise
from miniort_cli.perplexity import perplexity
from miniort_cli.plugins import plugins
from miniort_cli.providers import providers
from miniort_cli.pull import pull
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


for _command in (
    bench,
    chat,
    compare,
    convert,
    generate,
    inspect,
    memory,
    models,
    optimise,
    perplexity,
    plugins,
    providers,
    pull,
    verify,
    version,
):
    cli.add_command(_command)


def main() -> None:
    """The entry point of the installed command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may write what the terminal's encoding lacks; that must not end the stream.
        sys.stdout.reconfigure(errors="backslashreplace")
    cli(prog_name="miniort")
