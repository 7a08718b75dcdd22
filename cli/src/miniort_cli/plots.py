"""Line plots as SVG: small, without any library, in colours that the page's style sheet sets (`--series-0` … and so on)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 10, 40
COLOURS = 8
"""How many series have a colour of their own."""


@dataclass(frozen=True)
class Series:
    """A line through points (x, y), ascending in x. `colour` counts from 0; None is the muted one of a baseline, drawn in dashes."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int | None


@dataclass(frozen=True)
class Axis:
    """What an axis shows. `log`: to base 2 for x, to base 10 for y; what isn't positive is then drawn at the lower edge."""

    label: str
    log: bool = False
    format: Callable[[float], str] = "{:g}".format


@dataclass(frozen=True)
class _Scale:
    """From values to places: low -> start, high -> end, evenly or by their logarithms."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        if self.log:
            value, low, high = (math.log(max(each, self.low)) for each in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def line_plot(series: Sequence[Series], x_axis: Axis, y_axis: Axis, limits: Mapping[str, float] | None = None) -> str:
    """An `<svg>` of all series. `limits`: values of y that get a line across, by what is written at it."""
    xs = sorted({x for each in series for x, _ in each.points})
    ys = [y for each in series for _, y in each.points if math.isfinite(y)] + list((limits or {}).values())
    x_ticks = xs if len(xs) <= 9 else _even_ticks(xs[0], xs[-1])
    y_ticks = _decades(ys) if y_axis.log else _even_ticks(0, max(ys, default=1))
    x_scale = _Scale(*_range(xs[0], xs[-1], x_axis.log), LEFT, WIDTH - RIGHT, x_axis.log)
    y_scale = _Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP, y_axis.log)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_axis.label)} by {escape(x_axis.label)}">']
    for tick in y_ticks:
        y = y_scale(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(y_axis.format(tick))}</text>')
    for tick in _apart(x_ticks, x_scale):
        x = x_scale(tick)
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(x_axis.format(tick))}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_axis.label)}</text>')
    for label, value in (limits or {}).items():
        y = y_scale(value)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="limit-label" x="{WIDTH - RIGHT}" y="{y - 4:.1f}" text-anchor="end">{escape(label)}</text>')
    for each in series:
        parts += _line(each, x_scale, y_scale, x_axis, y_axis)
    return "\n".join([*parts, "</svg>"])


def legend(series: Sequence[Series]) -> str:
    """The names of all series, each behind a piece of its line."""

    def key(each: Series) -> str:
        return f'<svg class="key" viewBox="0 0 20 8"><line class="{_colour(each)}" x1="1" x2="19" y1="4" y2="4"/></svg>'

    items = " ".join(f"<span>{key(each)}{escape(each.label)}</span>" for each in series)
    return f'<p class="legend">{items}</p>'


def _colour(series: Series) -> str:
    return "baseline" if series.colour is None else f"series s{series.colour % COLOURS}"


def _line(series: Series, x_scale: _Scale, y_scale: _Scale, x_axis: Axis, y_axis: Axis) -> list[str]:
    """The line, broken where a value isn't finite, and a mark on each point that says its values when pointed at."""
    places = [(x_scale(x), y_scale(y), x, y) for x, y in series.points if math.isfinite(y)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in places)
    parts = [f'<polyline class="{_colour(series)}" points="{path}"/>']
    if len(places) <= 32:
        parts += [
            f'<circle class="{_colour(series)}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">'
            f"<title>{escape(series.label)}: {escape(y_axis.format(value))} at {escape(x_axis.format(at))}</title></circle>"
            for x, y, at, value in places
        ]
    return parts


def _range(low: float, high: float, log: bool) -> tuple[float, float]:
    """Never empty, so that a single point has a place."""
    return (low, high) if low < high else (low / 2, high * 2) if log else (low - 1, high + 1)


def _even_ticks(low: float, high: float) -> list[float]:
    """From 4 to 8 round numbers that enclose both ends, 1, 2 or 5 · 10ⁿ apart."""
    rough = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * index for index in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    """Powers of ten that enclose all positive values, a few of them where they're many."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)
    step = -(-(high - low) // 6)
    return [10.0**exponent for exponent in range(low, high + step, step)]


def _apart(ticks: Sequence[float], scale: _Scale) -> list[float]:
    """The ticks whose labels don't touch each other, the last one in any case."""
    kept: list[float] = []
    for tick in reversed(ticks):
        if not kept or scale(kept[-1]) - scale(tick) >= 26:
            kept.append(tick)
    return [tick for tick in kept[::-1] if LEFT - 1 <= scale(tick) <= WIDTH - RIGHT + 1]
