"""Figures of latency, throughput and memory: what they're of, and the arithmetic that sums them up."""

from __future__ import annotations

from pathlib import Path

import pytest

from miniort.generation import LayoutChoice, Meter, open_decoder
from miniort.generation.measurement import TimeAt, crossover, sum_over_lengths
from miniort.plugins import PluginManager


def test_figures_of_every_kind_for_every_layout(data: Path, plugins: PluginManager) -> None:
    decoder = open_decoder(data / "fixtures" / "gpt2_optimum", plugins=plugins)
    meter = Meter(decoder, max_context=40, repeats=1, batches=(1, 2), steps=4)
    assert meter.contexts == (16, 32, 40)
    found = meter.measure([LayoutChoice("concat_bhtd"), LayoutChoice("paged")])
    assert [each.layout for each in found.latency] == ["concat_bhtd", "paged"]
    for latency in found.latency:
        assert [point.tokens for point in latency.first_token] == [point.tokens for point in latency.next_token] == [16, 32, 40]
        assert all(point.seconds > 0 for point in (*latency.first_token, *latency.next_token, latency.full_run))
        assert latency.full_run.tokens == 40
    assert [(each.layout, each.batch) for each in found.throughput] == [("concat_bhtd", 1), ("concat_bhtd", 2), ("paged", 1), ("paged", 2)]
    assert all(each.tokens_per_second > 0 for each in found.throughput)
    bytes_per_token = 2 * 3 * 4 * 16 * 4
    plain = [each for each in found.memory if each.layout == "concat_bhtd"]
    assert [(each.tokens, each.by_formula) for each in plain] == [(n, n * bytes_per_token) for n in (16, 32, 40)]
    assert all(each.live == each.by_formula for each in plain)
    assert all(each.reserved >= 0 and (each.peak is None or each.peak > 0) for each in found.memory)


def points(*seconds: float) -> list[TimeAt]:
    return [TimeAt(tokens, each) for tokens, each in zip((16, 32, 64), seconds, strict=False)]


@pytest.mark.parametrize(
    ("cached", "uncached", "wanted"),
    [
        ((1, 1, 1), (2, 4, 8), 16),
        ((3, 3, 3), (2, 4, 8), 24),  # slower by 1, then faster by 1: in the middle
        ((3, 5, 6), (2, 4, 8), 32 + 32 / 3),
        ((1, 5, 6), (2, 4, 8), 32 + 32 / 3),  # faster, slower, faster: from where it stays so
        ((3, 5, 9), (2, 4, 8), None),
    ],
)
def test_crossover(cached: tuple[float, ...], uncached: tuple[float, ...], wanted: float | None) -> None:
    assert crossover(points(*cached), points(*uncached)) == (None if wanted is None else pytest.approx(wanted))


def test_total_over_all_lengths() -> None:
    assert sum_over_lengths(points(2)) == 16 * 2
    # 16 times 1, then 1 + k/16 for k = 1 … 16
    assert sum_over_lengths(points(1, 2)) == pytest.approx(16 + 16 + 136 / 16)
