"""Options that several commands take, and their values, parsed: providers, bindings, and a plugin's name with options of its own."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import click

Providers: TypeAlias = "str | list[str | tuple[str, dict[str, Any]]]"
"""`auto`, or providers by name, those with options of their own as `(name, options)`."""


def parse_providers(ctx: click.Context, param: click.Parameter, value: str) -> Providers:
    """`auto` stays; `"cuda:device_id=1,use_tf32=1,cpu"` -> `[("cuda", {"device_id": 1, "use_tf32": 1}), "cpu"]`."""
    if value == "auto":
        return value
    named: list[tuple[str, dict[str, Any]]] = []
    for part in value.split(","):
        name, colon, option = part.strip().partition(":")
        if "=" in name and named and named[-1][1]:
            name, colon, option = "", ":", part.strip()  # one more option of the provider before
        elif not name:
            raise click.BadParameter(f"{value!r} has a name that is empty; give auto, or names such as cuda,cpu", ctx, param)
        else:
            named.append((name, {}))
        if colon:
            key, _, text = option.partition("=")
            if not (key and text):
                raise click.BadParameter(f"{part.strip()!r} is not of the form NAME:KEY=VALUE, such as cuda:device_id=1", ctx, param)
            named[-1][1][key] = _as_json(text)
    return [(name, options) if options else name for name, options in named]


def check_folder(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """A file that will be written, whose folder is there: known before a long run, and not at its end."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.absolute().parent}", ctx, param)
    return path


def parse_bindings(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """`("tokens=ids",)` -> `{"tokens": "ids"}`."""
    bindings: dict[str, str] = {}
    for value in values:
        role, _, name = value.partition("=")
        if not (role and name):
            raise click.BadParameter(f"{value!r} is not of the form ROLE=NAME, such as tokens=input_ids", ctx, param)
        if role in bindings:
            raise click.BadParameter(f"the role {role} is given twice", ctx, param)
        bindings[role] = name
    return bindings


providers_option = click.option(
    "--providers",
    metavar="auto|NAMES",
    callback=parse_providers,
    default="auto",
    show_default=True,
    help="Names with commas between, in the order in which they are asked; options follow a name, as in cuda:device_id=1,cpu.",
)
"""`--providers`, of every command that runs a model."""

bind_option = click.option(
    "--bind",
    callback=parse_bindings,
    multiple=True,
    metavar="ROLE=NAME",
    help="Name an input or output whose role can't be told from the graph.",
)
"""`--bind`, of every command that opens a decoder."""


@dataclass(frozen=True)
class Named:
    """Something that a plugin offers, by name, and the options that it's made with."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


NAMED = "NAME[:KEY=VALUE,…]"
"""How `parse_named` wants it."""


def parse_named(ctx: click.Context, param: click.Parameter, value: str | None) -> Named | None:
    """`"window:window=64"` -> `Named("window", {"window": 64})`. A value is what it is as JSON (a number, true, a list), else text."""
    if value is None:
        return None
    name, colon, rest = value.partition(":")
    if not name:
        raise click.BadParameter(f"{value!r} has no name in front of its options", ctx, param)
    options: dict[str, Any] = {}
    # A comma ends a value only where another key follows, so a value may be a list.
    for part in re.split(r",(?=\s*\w+=)", rest) if colon else ():
        key, _, text = part.strip().partition("=")
        if not (key and text):
            raise click.BadParameter(f"{value!r} is not of the form NAME:key=value,key=value; what is wrong is {part!r}", ctx, param)
        if key in options:
            raise click.BadParameter(f"{value!r} gives {key} twice", ctx, param)
        options[key] = _as_json(text)
    return Named(name, options)


def parse_all_named(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Named, ...]:
    """Each of the values as `parse_named` reads it."""
    return tuple(named for named in (parse_named(ctx, param, value) for value in values) if named is not None)


def _as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
