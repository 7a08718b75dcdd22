"""The group of all commands: plugins are asked for those that aren't built in, and what goes wrong is said on one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from miniort.errors import MiniortError

INTERRUPTED = 128 + 2
"""Exit status after Ctrl-C: what shells report for a process that SIGINT ended."""


class MiniortGroup(click.Group):
    """Built-in commands are known without plugins, so that help is there at once, whatever is installed."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The built-in command of that name, else the plugins' one. UsageError if there is none."""
        command = super().get_command(ctx, cmd_name)
        if command is not None or ctx.resilient_parsing:
            return command
        from miniort_cli.plugin_commands import find_plugin_command

        return find_plugin_command(cmd_name, self.commands)

    def make_context(self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any) -> click.Context:
        """Click's, with errors on one line."""
        with _one_line_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Click's, with errors on one line, and a clean end on Ctrl-C."""
        try:
            with _one_line_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(INTERRUPTED)


class OneLineError(click.ClickException):
    """An error that's shown as one line on standard error; exit status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Say it."""
        click.echo(f"miniort: error: {' '.join(self.message.splitlines())}", file=file, err=True)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """MiniortError and wrong usage become one line. Any other exception is a bug and keeps its traceback."""
    try:
        yield
    except MiniortError as error:
        raise OneLineError(str(error)) from error
    except NoArgsIsHelpError:  # no error but the whole help page
        raise
    except click.UsageError as error:
        help_is_at = f" (see '{error.ctx.command_path} --help')" if error.ctx else ""
        raise OneLineError(error.format_message().removesuffix(".") + help_is_at) from None
