"""What `miniort verify` found, as tables for people and as one object for JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from miniort.generation.measurement import Latency, Measurement, TimeAt
from miniort.generation.verification import Check, LayoutVerification


@dataclass(frozen=True)
class Report:
    """Everything about one decoder. `left_out`: layouts that it can't be given, and why. `measurement` None: no layout was right."""

    model: str
    providers: Sequence[str]
    cache: str
    joins: Mapping[str, str]
    context_length: int | None
    max_context: int
    layouts: Sequence[LayoutVerification]
    left_out: Mapping[str, str]
    measurement: Measurement | None

    @property
    def passed(self) -> bool:
        """Whether every layout has passed every check."""
        return all(layout.passed for layout in self.layouts)


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns, those named in `right` aligned to the right. `section`: which of the sets of figures it belongs to."""

    section: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[str] = ()


def tables(report: Report) -> list[Table]:
    """All figures, in the order in which they're read."""
    found = [_checks(report.layouts), _layers(report.layouts)]
    if report.measurement is not None:
        found += _figures(report.measurement)
    return found


def to_json(report: Report) -> dict[str, Any]:
    """All of it as values that JSON has: seconds, bytes; a number that isn't finite is null."""
    result: dict[str, Any] = {
        "model": report.model,
        "passed": report.passed,
        "providers": list(report.providers),
        "cache": report.cache,
        "joins": dict(report.joins),
        "context_length": report.context_length,
        "max_context": report.max_context,
        "layouts": [{**asdict(layout), "passed": layout.passed} for layout in report.layouts],
        "left_out": dict(report.left_out),
        "measurement": None if report.measurement is None else asdict(report.measurement),
    }
    finite: dict[str, Any] = _finite(result)
    return finite


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _checks(layouts: Sequence[LayoutVerification]) -> Table:
    rows = [
        (
            layout.layout,
            check.name,
            check.detail,
            scientific(check.max_error),
            scientific(check.mean_error),
            "none" if check.first_difference is None and check.max_error is not None else str(check.first_difference or "-"),
            scientific(check.tolerance),
            verdict(check),
            check.note,
        )
        for layout in layouts
        for check in layout.checks
    ]
    columns = ("layout", "check", "with", "max error", "mean error", "other token", "allowed", "result", "note")
    return Table("Correctness", "every check", columns, rows, ("max error", "mean error", "other token", "allowed"))


def verdict(check: Check) -> str:
    """`ok` or `FAILED`."""
    return "ok" if check.passed else "FAILED"


def _layers(layouts: Sequence[LayoutVerification]) -> Table:
    """Layers that are alike share a row."""
    rows = []
    for layout in layouts:
        kinds = groupby(layout.layers, key=lambda each: (each.key_shape, each.value_shape, each.dtype, each.device, each.passed))
        for (keys, values, dtype, device, passed), alike in kinds:
            numbers = [each.layer for each in alike]
            span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
            rows.append((layout.layout, span, _shape(keys), _shape(values), dtype, device, "ok" if passed else "FAILED"))
    columns = ("layout", "layers", "keys", "values", "type", "device", "result")
    return Table("Correctness", "layers of the cache: [batch, kv heads, time, head dim]", columns, rows)


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _figures(measurement: Measurement) -> list[Table]:
    layouts = [each.layout for each in measurement.latency]
    steps = {"uncached": measurement.uncached.next_token, **{each.layout: each.next_token for each in measurement.latency}}
    prompts = {each.layout: each.first_token for each in measurement.latency}
    batches = sorted({each.batch for each in measurement.throughput})
    rates = {(each.layout, each.batch): f"{each.tokens_per_second:.1f}" for each in measurement.throughput}
    last = measurement.uncached.full_run
    totals = [("uncached (by the measured lengths)", "-", seconds(last.seconds), f"{last.tokens / last.seconds:.1f}")]
    totals += [
        (
            each.layout,
            _crossover(each),
            seconds(each.full_run.seconds),
            f"{each.full_run.tokens / each.full_run.seconds:.1f}",
        )
        for each in measurement.latency
    ]
    memory = [
        (
            each.layout,
            str(each.tokens),
            bytes_text(each.by_formula),
            bytes_text(each.live),
            bytes_text(each.reserved),
            "-" if each.peak is None else bytes_text(each.peak),
        )
        for each in measurement.memory
    ]
    return [
        _by_length("Latency", "time to first token, by length of the prompt (ms)", "prompt", prompts),
        _by_length("Latency", "time per token, by tokens in the context (ms)", "context", steps),
        Table(
            "Latency",
            f"one token, then on until the context of {last.tokens} is full",
            ("layout", "faster than uncached from", "total", "tokens/s"),
            totals,
            ("faster than uncached from", "total", "tokens/s"),
        ),
        Table(
            "Throughput",
            "new tokens per second, all rows of the batch together",
            ("layout", *(f"batch {batch}" for batch in batches)),
            [(layout, *(rates[layout, batch] for batch in batches)) for layout in layouts],
            [f"batch {batch}" for batch in batches],
        ),
        Table(
            "Memory",
            "memory, one request (MiB)",
            ("layout", "tokens", "by formula", "live", "reserved by pools", "process peak"),
            memory,
            ("tokens", "by formula", "live", "reserved by pools", "process peak"),
        ),
    ]


def _crossover(latency: Latency) -> str:
    if latency.crossover is None:
        return "never"
    shortest = latency.next_token[0].tokens
    return f"{shortest} tokens or fewer" if latency.crossover == shortest else f"{latency.crossover:.0f} tokens"


def _by_length(section: str, title: str, column: str, series: Mapping[str, Sequence[TimeAt]]) -> Table:
    """One row per length, one column per layout."""
    lengths = [each.tokens for each in next(iter(series.values()))]
    rows = [(str(length), *(f"{points[row].seconds * 1000:.2f}" for points in series.values())) for row, length in enumerate(lengths)]
    return Table(section, title, (column, *series), rows, (column, *series))


def scientific(number: float | None) -> str:
    """`1.2e-05`; `-` for None."""
    return "-" if number is None else f"{number:.1e}"


def seconds(number: float) -> str:
    """`1.23 s`, `4.56 ms`."""
    return f"{number:.2f} s" if number >= 1 else f"{number * 1000:.2f} ms"


def bytes_text(count: int) -> str:
    """MiB, three digits behind the point."""
    return f"{count / 2**20:,.3f}"
