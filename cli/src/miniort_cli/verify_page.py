"""What `miniort verify` found, as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from miniort.generation.measurement import Measurement, TimeAt
from miniort_cli.plots import COLOURS, Axis, Series, legend, line_plot
from miniort_cli.verify_report import Report, Table, scientific, tables

LIGHT = ("#2a78d6", "#c2571a", "#12875c", "#7b4bc4", "#c2317f", "#8a6d00", "#0e7f96", "#b3372f")
DARK = ("#6aa9f4", "#f0955c", "#4cc795", "#b397f0", "#ef82b8", "#d9b83f", "#58c3d8", "#f08279")

FOLDED_FROM = 20
"""Tables with more rows than that are folded up."""

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #1c1c1a; --muted: #66655f; --line: #e2e1dc;
  --good: #12733f; --good-back: #e3f3ea; --bad: #b0281f; --bad-back: #fbe6e4; %LIGHT% }
@media (prefers-color-scheme: dark) { :root { --page: #161615; --card: #1f1f1d; --ink: #eceae4; --muted: #a3a198; --line: #383733;
  --good: #7bd6a3; --good-back: #17352a; --bad: #ff9d94; --bad-back: #45201d; %DARK% } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1280px; padding: 1.5rem 1rem 3rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem }
h3 { font-size: .95rem; margin: 1rem 0 .4rem; font-weight: 600 }
p { margin: .4rem 0 } .muted { color: var(--muted) }
.verdict { display: inline-block; padding: .1rem .7rem; border-radius: 1rem; font-weight: 600; font-size: 1rem; vertical-align: .15em }
.ok { color: var(--good) } .verdict.ok { background: var(--good-back) }
.bad { color: var(--bad) } .verdict.bad { background: var(--bad-back) }
td.bad { font-weight: 700 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .8rem 0 } dt { color: var(--muted) }
dd { margin: 0; overflow-wrap: anywhere }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); gap: 1rem }
figure { margin: 0; padding: .8rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; min-width: 0 }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .3rem }
figure > svg { width: 100%; height: auto; display: block }
svg text { font-size: 11px; fill: var(--muted); font-family: inherit }
.grid { stroke: var(--line) } .tick { stroke: var(--muted) }
.limit { stroke: var(--bad); stroke-dasharray: 5 3 } svg .limit-label { fill: var(--bad) }
polyline, .key line { fill: none; stroke-width: 2; stroke-linejoin: round } circle { stroke: var(--card) }
polyline.baseline, .key .baseline { stroke: var(--muted); stroke-dasharray: 4 3 } circle.baseline { fill: var(--muted) }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .82rem; margin: .3rem 0 0 }
.legend span { white-space: nowrap } .key { width: 20px; height: 8px; margin-right: .35rem; vertical-align: .1em }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; background: var(--card) }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums }
th, td { padding: .28rem .7rem; text-align: left; white-space: nowrap } th { color: var(--muted); font-weight: 600 }
tr + tr td, thead + tbody td { border-top: 1px solid var(--line) } .right { text-align: right }
summary { margin: 1rem 0 .4rem; font-size: .95rem; font-weight: 600; cursor: pointer }
td.note { white-space: normal; min-width: 14rem }
"""

COLOUR_RULES = " ".join(
    f"polyline.s{index}, .key .s{index} {{ stroke: var(--s{index}) }} circle.s{index} {{ fill: var(--s{index}) }}"
    for index in range(COLOURS)
)


def page(report: Report) -> str:
    """The whole page."""
    style = STYLE.replace("%LIGHT%", _colours(LIGHT)).replace("%DARK%", _colours(DARK)) + COLOUR_RULES
    verdict = '<span class="verdict ok">passed</span>' if report.passed else '<span class="verdict bad">FAILED</span>'
    all_tables = tables(report)
    sections = []
    for name in dict.fromkeys(table.section for table in all_tables):
        plots = "\n".join(_plots(name, report))
        grid = f'<div class="plots">\n{plots}\n</div>' if plots else ""
        body = "\n".join(_table(table) for table in all_tables if table.section == name)
        grid += _overview(report) if name == "Correctness" else ""
        sections.append(f"<section>\n<h2>{name}</h2>\n<p class=muted>{_INTRODUCTIONS[name]}</p>\n{grid}\n{body}\n</section>")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>miniort verify: {escape(report.model)}</title>
<style>{style}</style>
</head>
<body>
<h1>{escape(report.model)} {verdict}</h1>
{_facts(report)}
{chr(10).join(sections)}
</body>
</html>
"""


_INTRODUCTIONS = {
    "Correctness": "Decoding with a cache must be the same computation as decoding without one. An error is the absolute difference of two "
    "logits; a result is ok if the largest is within what is allowed.",
    "Latency": "Medians of several runs, on this machine, as it was busy then.",
    "Throughput": "Prompts aren't counted.",
    "Memory": "By formula: 2 · layers · kv heads · head dim · tokens · bytes per element. Live: what the cache says that its tokens take. "
    "The process's peak never falls, so it belongs to all rows above as well.",
}


def _colours(colours: Sequence[str]) -> str:
    return " ".join(f"--s{index}: {colour};" for index, colour in enumerate(colours))


def _facts(report: Report) -> str:
    facts = [
        ("layouts", ", ".join(layout.layout for layout in report.layouts)),
        ("providers", ", ".join(report.providers)),
        ("cache", report.cache),
        ("context", f"{report.context_length or 'no limit known'}, tried up to {report.max_context}"),
        *((f"cache in {name}", how) for name, how in report.joins.items()),
        *((f"left out: {name}", reason) for name, reason in report.left_out.items()),
    ]
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts) + "</dl>"


def _table(table: Table) -> str:
    def cell(column: str, text: str, tag: str) -> str:
        kinds = ["right"] if column in table.right else []
        kinds += ["note"] if column == "note" else []
        if column == "result" and tag == "td":
            kinds.append("ok" if text == "ok" else "bad")
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    # A column in which nothing is said would only make the table wider.
    kept = [index for index, column in enumerate(table.columns) if column != "note" or any(row[index] for row in table.rows)]
    columns = [table.columns[index] for index in kept]
    head = "".join(cell(column, column, "th") for column in columns)
    body = "\n".join(
        "<tr>" + "".join(cell(column, row[index], "td") for column, index in zip(columns, kept, strict=True)) + "</tr>"
        for row in table.rows
    )
    grid = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    if len(table.rows) > FOLDED_FROM:
        return f"<details><summary>{escape(table.title)}</summary>\n{grid}</details>"
    return f"<h3>{escape(table.title)}</h3>\n{grid}"


def _overview(report: Report) -> str:
    """The largest error of each check, [checks, layouts]."""
    results = {(check.name, check.detail, layout.layout): check for layout in report.layouts for check in layout.checks}
    rows = []
    for name, detail in dict.fromkeys((name, detail) for name, detail, _ in results):
        cells = []
        for layout in report.layouts:
            check = results.get((name, detail, layout.layout))
            if check is None:
                cells.append('<td class="right muted">·</td>')
            else:
                text = scientific(check.max_error) if check.passed else f"{scientific(check.max_error)} FAILED"
                cells.append(f'<td class="right {"ok" if check.passed else "bad"}">{text}</td>')
        rows.append(f"<tr><td>{escape(name)}</td><td>{escape(detail)}</td>{''.join(cells)}</tr>")
    head = "<th>check</th><th>with</th>" + "".join(f'<th class="right">{escape(layout.layout)}</th>' for layout in report.layouts)
    body = "\n".join(rows)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    return f"<h3>largest error of each check</h3>\n{table}"


def _plots(section: str, report: Report) -> list[str]:
    if section == "Correctness":
        return _error_plots(report)
    measured = report.measurement
    if measured is None:
        return []
    if section == "Latency":
        return _latency_plots(measured)
    if section == "Throughput":
        return [_throughput_plot(measured)]
    return [_memory_plot(measured)]


def _figure(title: str, series: Sequence[Series], x_axis: Axis, y_axis: Axis, limits: Mapping[str, float] | None = None) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>\n{line_plot(series, x_axis, y_axis, limits)}\n{legend(series)}</figure>"


def _error_plots(report: Report) -> list[str]:
    """The error of each step behind each prompt, all layouts in one plot."""
    figures = []
    names = {check.detail for layout in report.layouts for check in layout.checks if check.name == "cached = uncached" and check.by_step}
    for detail in sorted(names, key=lambda each: [int(word) for word in each.replace(",", "").split() if word.isdigit()]):
        series, by_limit = [], dict[float, list[str]]()
        for index, layout in enumerate(report.layouts):
            for check in layout.checks:
                if check.name == "cached = uncached" and check.detail == detail and check.by_step:
                    by_limit.setdefault(check.tolerance, []).append(layout.layout)
                    series.append(Series(layout.layout, list(enumerate(check.by_step, 1)), index))
        axes = Axis("step"), Axis("largest error", log=True, format=lambda value: f"{value:.0e}")
        limits = {"allowed" if len(by_limit) == 1 else f"allowed: {_few(names)}": limit for limit, names in by_limit.items()}
        figures.append(_figure(f"Error by step: {detail}", series, *axes, limits))
    return figures


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else "the others"


def _milliseconds(points: Sequence[TimeAt]) -> list[tuple[float, float]]:
    return [(point.tokens, point.seconds * 1000) for point in points]


def _latency_plots(measured: Measurement) -> list[str]:
    first = [Series(each.layout, _milliseconds(each.first_token), index) for index, each in enumerate(measured.latency)]
    following = [Series(each.layout, _milliseconds(each.next_token), index) for index, each in enumerate(measured.latency)]
    uncached = Series("uncached", _milliseconds(measured.uncached.next_token), None)
    lengths = Axis("tokens in the context", log=True)
    return [
        _figure("Time to first token (ms)", first, Axis("tokens of the prompt", log=True), Axis("ms")),
        _figure("Time per token (ms)", [uncached, *following], lengths, Axis("ms", log=True)),
        _figure("Time per token, cached alone (ms)", following, lengths, Axis("ms")),
    ]


def _throughput_plot(measured: Measurement) -> str:
    series = [
        Series(each.layout, [(rate.batch, rate.tokens_per_second) for rate in measured.throughput if rate.layout == each.layout], index)
        for index, each in enumerate(measured.latency)
    ]
    return _figure("New tokens per second", series, Axis("rows in the batch", log=True), Axis("tokens/s"))


def _memory_plot(measured: Measurement) -> str:
    series = []
    for index, each in enumerate(measured.latency):
        points = [memory for memory in measured.memory if memory.layout == each.layout]
        if index == 0:
            series.append(Series("by formula", [(point.tokens, point.by_formula / 2**20) for point in points], None))
        series.append(Series(each.layout, [(point.tokens, point.live / 2**20) for point in points], index))
    return _figure("Live bytes of the cache (MiB)", series, Axis("tokens in the context", log=True), Axis("MiB"))
