"""`miniort verify`: the proof that a decoder with a cache computes what it computes without one, and what the cache brings."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from miniort.errors import PluginError
from miniort_cli.options import NAMED, Named, Providers, bind_option, check_folder, parse_all_named, providers_option

if TYPE_CHECKING:
    from miniort.generation import Decoder
    from miniort_cli.verify_report import Report

FAILED = 1
"""Exit status where a check has failed; an error, such as a model that isn't there, is 2."""

QUICK_CONTEXT = 64


@click.command()
@click.argument("model")
@click.option(
    "--cache",
    "caches",
    callback=parse_all_named,
    multiple=True,
    metavar=NAMED,
    help="A layout to check, such as window:window=64; may be repeated.  [default: all]",
)
@click.option("--quick", is_flag=True, help=f"Fewer steps, and contexts of up to {QUICK_CONTEXT} tokens.")
@click.option("--tolerance", type=click.FloatRange(min=0), metavar="X", help="The largest difference of two logits that is let pass.")
@click.option("--max-context", type=click.IntRange(min=2), metavar="N", help="The longest context that is tried.  [default: the model's]")
@providers_option
@bind_option
@click.option(
    "--html", callback=check_folder, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a page with plots, too."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else.")
@click.pass_context
def verify(
    ctx: click.Context,
    model: str,
    caches: tuple[Named, ...],
    quick: bool,
    tolerance: float | None,
    max_context: int | None,
    providers: Providers,
    bind: dict[str, str],
    html: Path | None,
    as_json: bool,
) -> None:
    """Prove that a decoder's cache is right, and measure it.

    MODEL is a name, an ONNX file, or a folder with a decoder. Its logits with each cache layout are compared with those without any cache,
    at every step. Then time and memory are measured. The exit status is 1 if a comparison fails, 2 if there's nothing to compare.
    """
    from miniort.generation import open_decoder
    from miniort_cli.tables import print_table
    from miniort_cli.verify_report import tables, to_json

    with closing(open_decoder(model, providers=providers, bindings=bind)) as decoder:
        report = _examine(decoder, caches, quick=quick, tolerance=tolerance, max_context=max_context)
    if html is not None:
        _write_page(html, report)
    if as_json:
        click.echo(json.dumps(to_json(report), allow_nan=False))
    else:
        for table in tables(report):
            print_table(table.columns, table.rows, title=table.title, right=table.right)
            click.echo()
        for name, reason in report.left_out.items():
            click.echo(f"left out: {name}: {reason}")
        failed = [layout.layout for layout in report.layouts if not layout.passed]
        click.echo(f"FAILED: {', '.join(failed)}" if failed else f"passed: {', '.join(layout.layout for layout in report.layouts)}")
    if not report.passed:
        ctx.exit(FAILED)


def _examine(decoder: Decoder, caches: tuple[Named, ...], *, quick: bool, tolerance: float | None, max_context: int | None) -> Report:
    """Check and measure. A layout that's wrong isn't measured, for nothing holds of it. What is under way is said on a terminal."""
    from miniort.generation.measurement import BATCHES, Meter
    from miniort.generation.verification import LayoutChoice, Verifier, context_limit, usable_layouts
    from miniort_cli.verify_report import Report

    limit = context_limit(decoder, max_context)
    if quick and max_context is None:
        limit = min(limit, QUICK_CONTEXT)
    usable, left_out = ([LayoutChoice(each.name, each.options) for each in caches], {}) if caches else usable_layouts(decoder)
    if not usable:
        raise PluginError(f"there is no cache layout to check: {'; '.join(left_out.values()) or 'none is installed'}")
    verifier = Verifier(decoder, max_context=limit, tolerance=tolerance, steps=6 if quick else 16)
    verified = []
    for layout in usable:
        _say(f"checking {layout.label}")
        verified.append(verifier.verify(layout))
    right = [layout for layout, result in zip(usable, verified, strict=True) if result.passed]
    measurement = None
    if right:
        _say(f"measuring {', '.join(layout.label for layout in right)}")
        meter = Meter(decoder, max_context=limit, repeats=3 if quick else 5, batches=BATCHES[:2] if quick else BATCHES)
        measurement = meter.measure(right)
    return Report(
        model=decoder.source.name,
        providers=next(iter(decoder.sessions.values())).get_providers(),
        cache=_describe_cache(decoder),
        joins={name: join.reason for name, join in decoder.joins.items()},
        context_length=decoder.context_length,
        max_context=limit,
        layouts=verified,
        left_out=left_out,
        measurement=measurement,
    )


def _describe_cache(decoder: Decoder) -> str:
    spec = decoder.cache_spec(1)
    size = str(spec.head_dim) if spec.head_dim == spec.value_head_dim else f"{spec.head_dim} and {spec.value_head_dim}"
    return f"{spec.layers} layers, {spec.kv_heads} kv heads of {size}, {spec.dtype}, {spec.bytes_per_token():,} bytes per token"


def _say(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"{text} …", err=True)


def _write_page(path: Path, report: Report) -> None:
    from miniort_cli.verify_page import page

    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"--html: {path} can't be written: {error.strerror}") from None
