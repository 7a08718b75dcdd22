"""`miniort generate`: a decoder goes on from a prompt, and its text is shown as it comes."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import click

from miniort_cli.group import INTERRUPTED

if TYPE_CHECKING:
    from miniort_cli.continuation import Continuation

DEFAULT_CACHE = "concat_bhtd"


def _parse_providers(ctx: click.Context, param: click.Parameter, value: str) -> str | list[str]:
    """`auto` stays; `"cuda,cpu"` -> `["cuda", "cpu"]`."""
    if value == "auto":
        return value
    names = [name.strip() for name in value.split(",")]
    if not all(names):
        raise click.BadParameter(f"{value!r} has a name that is empty; give auto, or names such as cuda,cpu", ctx, param)
    return names


def _parse_bindings(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
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


@click.command()
@click.argument("prompt")
@click.option("--model", metavar="NAME|PATH", default="demo", show_default=True, help="A name, an ONNX file, or a folder with a decoder.")
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json; without it, the one beside the model.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=0), metavar="N", default=100, show_default=True, help="Stop after that many tokens."
)
@click.option("--sampler", metavar="NAME", default="greedy", show_default=True, help="What chooses the next token.")
@click.option("--cache", metavar="NAME", help=f"How keys and values are kept.  [default: {DEFAULT_CACHE}]")
@click.option("--no-cache", is_flag=True, help="Recompute the whole history in every step: slow, to compare with.")
@click.option(
    "--providers",
    metavar="auto|NAMES",
    callback=_parse_providers,
    default="auto",
    show_default=True,
    help="Names with commas between, in the order in which they are asked.",
)
@click.option("--prefill-chunk", type=click.IntRange(min=1), metavar="N", help="Run a long prompt N tokens at a time.")
@click.option(
    "--bind",
    callback=_parse_bindings,
    multiple=True,
    metavar="ROLE=NAME",
    help="Name an input or output whose role can't be told from the graph.",
)
@click.option("--top-k-print", type=click.IntRange(min=1), metavar="K", help="Show the K likeliest tokens before each one that is chosen.")
@click.option("--stats", is_flag=True, help="Show time and memory at the end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end, and nothing else.")
@click.pass_context
def generate(
    ctx: click.Context,
    prompt: str,
    model: str,
    tokenizer: str | None,
    max_new_tokens: int,
    sampler: str,
    cache: str | None,
    no_cache: bool,
    providers: str | list[str],
    prefill_chunk: int | None,
    bind: dict[str, str],
    top_k_print: int | None,
    stats: bool,
    as_json: bool,
) -> None:
    """Write on from a prompt.

    PROMPT is the beginning of the text; `-` reads it from standard input. An empty one starts from the model's end token. The text goes to
    standard output as it comes, tables go to standard error.
    """
    if no_cache and cache is not None:
        raise click.UsageError("--no-cache and --cache contradict each other; leave one out")
    if prompt == "-":
        prompt = _read_standard_input()
    started = time.perf_counter()  # from here, because what is imported now takes a good part of the time

    from miniort_cli.continuation import Continuation, Setup
    from miniort_cli.report import print_statistics, to_json

    setup = Setup(
        model=model,
        tokenizer=tokenizer,
        sampler=sampler,
        cache=None if no_cache else cache or DEFAULT_CACHE,
        providers=providers,
        prefill_chunk=prefill_chunk,
        bindings=bind,
    )
    with closing(Continuation(setup, prompt, max_new_tokens, candidates=top_k_print or 0, started=started)) as continuation:
        if as_json:
            for _ in continuation.steps():
                pass
            click.echo(json.dumps(to_json(continuation), allow_nan=False))
            interrupted = False
        else:
            interrupted = _stream(continuation)
        if stats:
            print_statistics(continuation)
    if interrupted:
        ctx.exit(INTERRUPTED)


def _read_standard_input() -> str:
    """All of it, less one newline at its end, which is `echo`'s and not the prompt's."""
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt on standard input must be UTF-8; byte {error.start} is not") from None
    return text.removesuffix("\n").removesuffix("\r")


def _stream(continuation: Continuation) -> bool:
    """Write the prompt, then the text as it comes, then a newline, whatever ends it. Returns whether that was Ctrl-C."""
    from miniort_cli.report import print_candidates

    try:
        click.echo(continuation.prompt, nl=False)
        for step in continuation.steps():
            if step.candidates:
                print_candidates(continuation, step)
            click.echo(step.text, nl=False)
    except KeyboardInterrupt:
        return True
    finally:
        click.echo()
    return False
