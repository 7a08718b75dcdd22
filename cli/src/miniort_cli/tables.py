"""Tables: drawn by rich on a terminal, as plain aligned columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import click


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", right: Collection[str] = (), err: bool = False
) -> None:
    """Print rows of cells under their columns; those named in `right` are aligned to the right. `err`: to standard error."""
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        _print_rich(columns, rows, title, right, err)
        return
    if title:
        click.echo(title, err=err)
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width) for column, cell, width in zip(columns, row, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip(), err=err)


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, right: Collection[str], err: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text, because a cell is no markup
    Console(stderr=err).print(table)
