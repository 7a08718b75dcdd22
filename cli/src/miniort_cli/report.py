"""How a continuation is reported: candidates and statistics as tables on standard error, or all of it as one JSON object."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from typing import Any

import click

from miniort_cli.continuation import Continuation, Step
from miniort_cli.tables import print_table


def print_candidates(continuation: Continuation, step: Step) -> None:
    """The likeliest tokens, before the one that was chosen is shown."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        click.echo(err=True)  # both are one screen: don't begin the table in the middle of the text's line
    rows = [
        (
            str(each.id),
            "(end)" if each.id in continuation.generator.end_tokens else repr(each.text),
            f"{each.logit:.4f}",
            f"{each.probability:.4f}",
        )
        for each in step.candidates
    ]
    title = f"likeliest as new token {len(continuation.tokens)}"
    print_table(("token", "text", "logit", "probability"), rows, title=title, right=("token", "logit", "probability"), err=True)


def print_statistics(continuation: Continuation) -> None:
    """Times and sizes, and how each graph was joined to the cache."""
    figures = continuation.statistics()
    rows = [
        ("prompt tokens", str(figures.prompt_tokens)),
        ("new tokens", str(figures.new_tokens)),
        ("load time", _seconds(continuation.load_time)),
        ("time to first token", _seconds(figures.time_to_first_token)),
        ("time per token, median", _seconds(figures.token_latency)),
        ("tokens per second", "-" if figures.tokens_per_second is None else f"{figures.tokens_per_second:.1f}"),
        ("cache, measured", _bytes(figures.cache_bytes)),
        ("cache, by formula", _bytes(figures.cache_bytes_by_formula)),
        ("peak memory", _bytes(figures.peak_memory)),
    ]
    rows += [(f"cache in {name}", f"{_way(join.appends)}: {join.reason}") for name, join in continuation.decoder.joins.items()]
    print_table(("figure", "value"), rows, title="statistics", err=True)


def _way(appends: bool) -> str:
    return "the graph appends" if appends else "the graph doesn't append"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"


def _bytes(count: int | None) -> str:
    return "-" if count is None else f"{count:,} bytes ({count / 2**20:.2f} MiB)"


def to_json(continuation: Continuation) -> dict[str, Any]:
    """Everything as values that JSON has. Times are in seconds, sizes in bytes; a number that isn't finite is null."""
    setup = continuation.setup
    sessions = list(continuation.decoder.sessions.values())
    result: dict[str, Any] = {
        "model": continuation.decoder.source.name,
        "prompt": continuation.prompt,
        "text": continuation.text,
        "prompt_tokens": continuation.prompt_tokens,
        "tokens": continuation.tokens,
        "finish_reason": continuation.finish_reason,
        "sampler": setup.sampler,
        "cache": setup.cache,
        "providers": sessions[0].get_providers(),
        "joins": {name: asdict(join) for name, join in continuation.decoder.joins.items()},
        "statistics": {"load_time": continuation.load_time, **asdict(continuation.statistics())},
    }
    if any(continuation.candidates):
        result["top_k"] = [[{**asdict(each), "logit": _finite(each.logit)} for each in step] for step in continuation.candidates]
    return result


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
