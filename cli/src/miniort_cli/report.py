"""How a run is reported: scores and statistics as tables on standard error, or all of it as one JSON object."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from miniort.generation import Decoder, TokenScore
from miniort.providers import HOST
from miniort.runtime.assignment import OpenProvider
from miniort.runtime.session import InferenceSession
from miniort_cli.row_text import RowText
from miniort_cli.run import Run
from miniort_cli.tables import print_table


def print_candidates(run: Run, row: RowText, candidates: Sequence[TokenScore]) -> None:
    """The likeliest tokens, before the one that was chosen is shown."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        click.echo(err=True)  # both are one screen: don't begin the table in the middle of the text's line
    rows = [(str(each.id), _text_of(run, each.id), f"{each.logit:.4f}", f"{math.exp(each.log_probability):.4f}") for each in candidates]
    title = f"likeliest as new token {len(row.tokens)}"
    print_table(("token", "text", "logit", "probability"), rows, title=title, right=("token", "logit", "probability"), err=True)


def print_log_probabilities(run: Run, top: int) -> None:
    """The log-probability of each token, and the likeliest in its place; a table for each text."""
    for number, row in enumerate(run.rows, 1):
        rows = [
            (
                str(step.chosen.id),
                _text_of(run, step.chosen.id),
                f"{step.chosen.log_probability:.4f}",
                "  ".join(f"{_text_of(run, each.id)} {each.log_probability:.4f}" for each in step.top[:top]),
            )
            for step in row.scores
        ]
        title = "log-probabilities" if len(run.rows) == 1 else f"log-probabilities of text {number}"
        columns = ("token", "text", "log-probability", "likeliest")
        print_table(columns, rows, title=title, right=("token", "log-probability"), err=True)


def _text_of(run: Run, token: int) -> str:
    return "(end)" if token in run.generator.end_tokens else repr(run.tokenizer.decode([token]))


def print_statistics(run: Run) -> None:
    """Times and sizes, and how each graph was joined to the cache."""
    figures = run.statistics()
    rows = [
        ("prompt tokens", str(figures.prompt_tokens)),
        ("new tokens", str(figures.new_tokens)),
        ("load time", _seconds(run.load_time)),
        ("time to first token", _seconds(figures.time_to_first_token)),
        ("time per token, median", _seconds(figures.token_latency)),
        ("tokens per second", "-" if figures.tokens_per_second is None else f"{figures.tokens_per_second:.1f}"),
        ("cache, measured", _bytes(figures.cache_bytes)),
        ("cache, by formula", _bytes(figures.cache_bytes_by_formula)),
        ("peak memory", _bytes(figures.peak_memory)),
    ]
    if run.setup.load_cache is not None:
        rows.insert(1, ("prompt tokens not computed again", str(run.reused)))
    rows += [(f"cache in {name}", f"{_way(join.appends)}: {join.reason}") for name, join in run.decoder.joins.items()]
    rows += [*device_rows(run.decoder.sessions), *replay_rows(run.decoder)]
    print_table(("figure", "value"), rows, title="statistics", err=True)


def device_rows(sessions: Mapping[str, InferenceSession]) -> list[tuple[str, str]]:
    """Copies between host and devices in each step, and the devices' memory; nothing where all is on the host."""
    rows = []
    for name, session in sessions.items():
        devices = devices_of(session)
        if devices:
            up, down = count_copies(session)
            rows.append((f"copies in {name}", f"{up} to devices, {down} to the host"))
        for device, each in devices.items():
            memory = each.provider.memory()
            rows.append(
                (f"memory of {device}, {name}", f"{memory.active:,} bytes active, {memory.reserved:,} reserved, {memory.peak:,} at most")
            )
    return rows


def replay_rows(decoder: Decoder) -> list[tuple[str, str]]:
    """How many steps a device replayed, or why none was recorded; nothing where no provider was asked to."""
    counts = decoder.replay_counts
    if counts is None:
        return []
    if not counts.recorded:
        return [("steps replayed", "none" if counts.obstacle is None else f"none, not recorded: {counts.obstacle}")]
    return [("steps replayed", f"{counts.replayed}, of {counts.recorded} that {'was' if counts.recorded == 1 else 'were'} recorded")]


def devices_of(session: InferenceSession) -> dict[str, OpenProvider]:
    """The provider of each device but the host."""
    return {each.provider.device: each for each in session.providers if each.provider.device != HOST}


def device_memory(sessions: Mapping[str, InferenceSession]) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes active, reserved and at most, by session and device; nothing for the host."""
    return {
        name: {device: asdict(each.provider.memory()) for device, each in devices_of(session).items()} for name, session in sessions.items()
    }


def count_copies(session: InferenceSession) -> tuple[int, int]:
    """How many copies a run makes to devices, and how many to the host."""
    targets = [copy.target for copy in session.plan.copies]
    return sum(target != HOST for target in targets), targets.count(HOST)


def _way(appends: bool) -> str:
    return "the graph appends" if appends else "the graph doesn't append"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"


def _bytes(count: int | None) -> str:
    return "-" if count is None else f"{count:,} bytes ({count / 2**20:.2f} MiB)"


def to_json(run: Run, top_k: int | None, logprobs: int | None) -> dict[str, Any]:
    """Everything as values that JSON has. Times are in seconds, sizes in bytes; a number that isn't finite is null.

    One text's fields stand in the object itself, several are a list `continuations`.
    """
    setup = run.setup
    texts = [_row(run, row, top_k, logprobs) for row in run.rows]
    single = len(setup.prompts) * setup.continuations == 1
    return {
        "model": run.decoder.source.name,
        **(texts[0] if single and texts else {"continuations": texts}),
        "sampler": run.sampler.name,
        "sampler_options": run.sampler.options,
        "processors": {processor.name: processor.options for processor in run.processors},
        "seed": run.generator.seed,
        "cache": None if setup.cache is None else setup.cache.name,
        "cache_options": {} if setup.cache is None else setup.cache.options,
        "providers": next(iter(run.decoder.sessions.values())).get_providers(),
        "joins": {name: asdict(join) for name, join in run.decoder.joins.items()},
        "statistics": {
            "load_time": run.load_time,
            "reused_tokens": run.reused,
            "copies": {
                name: dict(zip(("to_devices", "to_host"), count_copies(each), strict=True)) for name, each in run.decoder.sessions.items()
            },
            "device_memory": device_memory(run.decoder.sessions),
            "replayed_steps": None if run.decoder.replay_counts is None else asdict(run.decoder.replay_counts),
            **asdict(run.statistics()),
        },
    }


def _row(run: Run, row: RowText, top_k: int | None, logprobs: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "prompt": row.prompt,
        "text": row.text,
        "prompt_tokens": list(row.prompt_tokens),
        "tokens": row.tokens,
        "finish_reason": row.finish_reason,
    }
    if row.score is not None:
        result["score"] = row.score
    if top_k is not None:
        result["top_k"] = [[_scored(run, each, "probability") for each in step.top[:top_k]] for step in row.scores]
    if logprobs is not None:
        result["logprobs"] = [
            {**_scored(run, step.chosen, "logprob"), "top": [_scored(run, each, "logprob") for each in step.top[:logprobs]]}
            for step in row.scores
        ]
    return result


def _scored(run: Run, token: TokenScore, measure: str) -> dict[str, Any]:
    """A token with its text and its `logit` and `probability`, or its `logprob`."""
    named = {"id": token.id, "text": run.tokenizer.decode([token.id])}
    if measure == "logprob":
        return {**named, "logprob": _finite(token.log_probability)}
    return {**named, "logit": _finite(token.logit), "probability": math.exp(token.log_probability)}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
