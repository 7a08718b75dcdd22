"""`miniort memory`: what one run of a model takes of memory, told without running it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from miniort.runtime.memory_plan import MemoryPlan

BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 72
"""Columns of the curve."""

SHOWN = 8
"""How many of the values that are alive at the peak are listed."""


def parse_sizes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    """`("batch=2",)` -> `{"batch": 2}`."""
    sizes: dict[str, int] = {}
    for value in values:
        name, _, number = value.partition("=")
        if not name or not number.isdecimal():
            raise click.BadParameter(f"{value!r} is not of the form NAME=NUMBER, such as batch=1", ctx, param)
        if name in sizes:
            raise click.BadParameter(f"the size {name} is given twice", ctx, param)
        sizes[name] = int(number)
    return sizes


@click.command()
@click.argument("model")
@click.option(
    "--size",
    "sizes",
    callback=parse_sizes,
    multiple=True,
    metavar="NAME=N",
    help="A named size of the model's inputs; may be repeated. Those that aren't given are 1.",
)
@click.option(
    "--optimise",
    type=click.Choice(["none", "basic", "extended", "all"]),
    default="all",
    show_default=True,
    help="How far the graph is changed before it runs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every value and the curve.")
def memory(model: str, sizes: Mapping[str, int], optimise: str, as_json: bool) -> None:
    """Show what a run of MODEL takes of memory: an ONNX file, or a folder or name of a decoder, whose cache is not counted."""
    from miniort.errors import InputError
    from miniort.runtime.memory_plan import size_names
    from miniort.runtime.session import InferenceSession, SessionOptions

    options = SessionOptions(graph_optimization_level=optimise)
    if Path(model).is_file():
        session = InferenceSession(model, options)
        sessions, close = {Path(model).name: session}, session.close
    else:
        from miniort.generation import open_decoder

        decoder = open_decoder(model, options=options)
        sessions, close = dict(decoder.sessions), decoder.close
    with ExitStack() as stack:
        stack.callback(close)
        names = {name for session in sessions.values() for name in size_names(session.model)}
        for name in sizes:
            if name not in names:
                raise InputError(f"the model has no size {name!r}; its sizes: {', '.join(sorted(names)) or 'none'}")
        plans = {}
        for title, session in sessions.items():
            given = {name: sizes.get(name, 1) for name in size_names(session.model)}
            plans[title] = session.memory_plan(given)
        if as_json:
            click.echo(json.dumps({title: _as_json(plan) for title, plan in plans.items()}))
            return
        for title, plan in plans.items():
            _print(title, plan)


def _as_json(plan: MemoryPlan) -> dict[str, object]:
    return {
        "sizes": dict(plan.sizes),
        "weights": plan.weights,
        "peak": plan.peak,
        "peak_step": plan.peak_step,
        "pool": plan.pool,
        "without_reuse": plan.total,
        "curve": plan.curve,
        "steps": plan.steps,
        "values": [asdict(each) for each in plan.lifetimes],
        "unknown": plan.unknown,
    }


def _print(title: str, plan: MemoryPlan) -> None:
    from miniort_cli.tables import print_table

    sizes = ", ".join(f"{name}={size}" for name, size in plan.sizes.items())
    click.echo(f"{title}{f' with {sizes}' if sizes else ''}: {len(plan.steps)} steps")
    reused = sum(1 for each in plan.lifetimes if each.reuses is not None)
    in_place = sum(1 for each in plan.lifetimes if each.in_place)
    views = sum(1 for each in plan.lifetimes if each.view_of is not None) - in_place
    click.echo(f"weights       {megabytes(plan.weights)}")
    click.echo(f"peak          {megabytes(plan.peak)} in step {plan.peak_step} ({plan.steps[plan.peak_step] if plan.steps else 'none'})")
    click.echo(f"from the pool {megabytes(plan.pool)}, where {megabytes(plan.total)} would be needed without reuse")
    shared = f"{views} views, {in_place} written over a dying input, {reused} in the memory of one that died"
    click.echo(f"values        {len(plan.lifetimes)}: {shared}")
    if plan.unknown:
        more = f" and {len(plan.unknown) - 3} more" if len(plan.unknown) > 3 else ""
        click.echo(f"not counted   {', '.join(plan.unknown[:3])}{more}: nothing tells their size before a run")
    click.echo(f"\n{curve(plan)}\n")
    rows = [
        (megabytes(each.nbytes or 0), each.op, f"{each.first}-{each.last}", each.reuses or "", each.name)
        for each in plan.alive(plan.peak_step)[:SHOWN]
    ]
    print_table(("size", "op", "steps", "takes over", "alive at the peak"), rows, right=("size",))
    click.echo()


def curve(plan: MemoryPlan) -> str:
    """The bytes that are alive, step by step, as bars; each column shows the highest of its steps."""
    if not plan.peak:
        return ""
    columns = min(WIDTH, len(plan.curve))
    bounds = [len(plan.curve) * column // columns for column in range(columns + 1)]
    highest = [max(plan.curve[start:end]) for start, end in pairwise(bounds)]
    return "".join(BARS[-(-each * (len(BARS) - 1) // plan.peak)] for each in highest)


def megabytes(count: int) -> str:
    """Bytes for people, in megabytes of 10⁶."""
    return f"{count / 1e6:.2f} MB" if count < 10_000_000 else f"{count / 1e6:,.0f} MB"
