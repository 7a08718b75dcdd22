"""`miniort compare`: one input through several providers and levels, how far their outputs lie apart, and the node where that begins."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import numpy as np

    from miniort.plugins import PluginManager
    from miniort.runtime.comparison import Search, Tolerance
    from miniort_cli.compare_report import Comparison

DIFFERENT = 1
"""Exit status where an output differs; an error, such as a provider that isn't there, is 2."""

LEVELS = ("none", "basic", "extended", "all")


def parse_names(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    """`"cuda,cpu"` -> `["cuda", "cpu"]`."""
    names = [name.strip() for name in value.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise click.BadParameter(f"{value!r} must be different names with commas between", ctx, param)
    return names


def parse_levels(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    """`"none,all"` -> `["none", "all"]`."""
    names = parse_names(ctx, param, value)
    for name in names:
        if name not in LEVELS:
            raise click.BadParameter(f"{name!r} is no level; there are {', '.join(LEVELS)}", ctx, param)
    return names


def parse_sizes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    """`("batch=2",)` -> `{"batch": 2}`."""
    sizes: dict[str, int] = {}
    for value in values:
        name, _, size = value.rpartition("=")
        if not name or not size.isdecimal():
            raise click.BadParameter(f"{value!r} is not of the form NAME=SIZE, such as batch=2", ctx, param)
        sizes[name] = int(size)
    return sizes


def parse_inputs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """`("x=x.npy",)` -> `{"x": Path("x.npy")}`."""
    files: dict[str, Path] = {}
    for value in values:
        name, _, file = value.partition("=")
        if not (name and file):
            raise click.BadParameter(f"{value!r} is not of the form NAME=FILE, such as pixels=picture.npy", ctx, param)
        files[name] = Path(file)
    return files


@click.command()
@click.argument("model")
@click.option("--providers", callback=parse_names, default="cpu,reference", show_default=True, metavar="NAMES", help=(
    "Providers with commas between; onnxruntime and reference (ONNX's own) are other runtimes. The others are compared with the last."
))  # fmt: skip
@click.option("--levels", callback=parse_levels, default="all", show_default=True, metavar="LEVELS", help=(
    "Optimisation levels with commas between; each provider is run at each. The last provider at the first level is the baseline."
))  # fmt: skip
@click.option(
    "--input", "inputs", callback=parse_inputs, multiple=True, metavar="NAME=FILE", help="An input, as a .npy file; may be repeated."
)
@click.option("--size", "sizes", callback=parse_sizes, multiple=True, metavar="NAME=N", help=(
    "A symbolic size of the random inputs; may be repeated. A decoder's are batch, tokens and past."
))  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random inputs.")
@click.option("--relative", type=click.FloatRange(min=0), metavar="X", help="Let pass this share of each element.  [default: by type]")
@click.option("--absolute", type=click.FloatRange(min=0), metavar="X", help="Let pass this, on top.  [default: by type]")
@click.option("--warm-up", type=click.IntRange(min=0), default=2, show_default=True, help="Runs that aren't measured.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Runs that are; the median counts.")
@click.option("--locate", is_flag=True, help="Find the first node whose output differs from the baseline's.")
@click.option(
    "--save", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="With --locate: write that node and its values there."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else.")
@click.pass_context
def compare(
    ctx: click.Context,
    model: str,
    providers: list[str],
    levels: list[str],
    inputs: dict[str, Path],
    sizes: dict[str, int],
    seed: int,
    relative: float | None,
    absolute: float | None,
    warm_up: int,
    repeats: int,
    locate: bool,
    save: Path | None,
    as_json: bool,
) -> None:
    """Run one input through several providers, and compare.

    MODEL is an ONNX file, or a name or folder with a decoder. Inputs are random unless they're given. The exit status is 1 if an output
    (with --locate, any value) differs by more than rounding.
    """
    from miniort.plugins import create_plugin_manager
    from miniort.runtime.comparison import Tolerance
    from miniort_cli.compare_report import print_comparison, to_json

    if save is not None and not locate:
        raise click.UsageError("--save needs --locate, which finds what is saved")
    if len(providers) * len(levels) < 2:
        raise click.UsageError("there is nothing to compare with; name two providers, or two levels")
    plugins = create_plugin_manager()
    tolerance = Tolerance(relative, absolute)
    found = []
    for path, feeds in _graphs(model, plugins, sizes, seed, _load(inputs)):
        result = _compare(path, feeds, providers, levels, tolerance, warm_up, repeats, locate, plugins)
        found.append(result)
        if save is not None:
            _save(save if len(found) == 1 else save / path.stem, result, path)
    if as_json:
        click.echo(json.dumps([to_json(each) for each in found], allow_nan=False))
    else:
        for each in found:
            print_comparison(each)
    if not all(each.passed for each in found):
        ctx.exit(DIFFERENT)


def _load(files: Mapping[str, Path]) -> dict[str, np.ndarray[Any, Any]]:
    import numpy as np

    arrays = {}
    for name, path in files.items():
        try:
            arrays[name] = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise click.UsageError(f"--input {name}: {path} can't be read as .npy: {error}") from None
    return arrays


def _graphs(
    model: str, plugins: PluginManager, sizes: Mapping[str, int], seed: int, given: Mapping[str, Any]
) -> list[tuple[Path, dict[str, Any]]]:
    """Each graph of a model, with what it's fed."""
    from miniort.generation.decoder import find_source
    from miniort.generation.decoder_feeds import decoder_feeds, decoder_sizes
    from miniort.model.loading import load_model
    from miniort.runtime.random_feeds import random_feeds, with_given

    path = Path(model)
    paths = [path] if path.is_file() else list(find_source(model, plugins).graphs)
    graphs = [load_model(each).graph for each in paths]
    of_decoder = decoder_feeds(graphs, decoder_sizes({}), seed)
    if of_decoder is not None:
        feeds = decoder_feeds(graphs, decoder_sizes(sizes), seed) or of_decoder
        unknown = [name for name in given if not any(name in each for each in feeds)]
        return [
            (each, with_given(random, {name: array for name, array in given.items() if name in random or name in unknown}, graph))
            for each, random, graph in zip(paths, feeds, graphs, strict=True)
        ]
    return [(each, with_given(random_feeds(graph, sizes, seed, given), given, graph)) for each, graph in zip(paths, graphs, strict=True)]


def _compare(
    path: Path,
    feeds: Mapping[str, Any],
    providers: Sequence[str],
    levels: Sequence[str],
    tolerance: Tolerance,
    warm_up: int,
    repeats: int,
    locate: bool,
    plugins: PluginManager,
) -> Comparison:
    from miniort.providers import check_provider, list_providers
    from miniort.runtime.comparison import difference, first_difference
    from miniort.runtime.engines import open_engines, run_times
    from miniort_cli.compare_report import Comparison, Contender

    others = [name for name, info in list_providers(plugins).items() if name == "cpu" and check_provider(info).ok]
    with ExitStack() as stack:
        engines = open_engines(path, providers, levels, others=others, plugins=plugins)
        for engine in engines:
            stack.enter_context(closing(engine))
        _say(f"running {path.name}: {', '.join(engine.label for engine in engines)}")
        results = [engine.run(feeds) for engine in engines]
        seconds = run_times(engines, feeds, warm_up, repeats)
        base = len(engines) - (1 if providers[-1] == "reference" else len(levels))
        contenders = []
        for index, engine in enumerate(engines):
            differences = (
                {}
                if index == base
                else {name: difference(results[index][name], wanted, tolerance) for name, wanted in results[base].items()}
            )
            search: Search | None = None
            if locate and index != base:
                _say(f"searching {engine.label}")
                search = first_difference(engine, engines[base], feeds, tolerance, same_graph=engine.graph == engines[base].graph)
            contenders.append(Contender(engine.label, engine.placement, seconds[index], differences, search))
    return Comparison(path, feeds, contenders, base)


def _save(folder: Path, comparison: Comparison, path: Path) -> None:
    """The values around each divergence, in a folder for each contender that has one."""
    from miniort_cli.compare_report import save_divergence

    found = [
        (each, each.search.divergence) for each in comparison.contenders if each.search is not None and each.search.divergence is not None
    ]
    for contender, divergence in found:
        place = folder if len(found) == 1 else folder / "".join(c if c.isalnum() else "_" for c in contender.label)
        try:
            save_divergence(place, divergence, path)
        except OSError as error:
            raise click.UsageError(f"--save: {place} can't be written: {error.strerror}") from None


def _say(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"{text} …", err=True)
