"""`miniort optimise`: what graph passes make of a model, told pass by pass, and written to a file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from miniort_cli.options import Providers, check_folder, parse_providers

if TYPE_CHECKING:
    from miniort.graph.passes import Change
    from miniort.runtime.optimise import OptimisedModel


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), callback=check_folder, help="Write the model here.")
@click.option(
    "--level",
    type=click.Choice(["none", "basic", "extended", "all"]),
    default="extended",
    show_default=True,
    help="How far to go: basic keeps the model's own ops, extended puts one standard op in the place of many, all also makes miniort's.",
)
@click.option(
    "--providers", metavar="NAMES", default="auto", callback=parse_providers, help="Whose ops may be made; auto for all there are."
)
@click.option("--external-data/--no-external-data", default=None, help="Keep weights in a file beside the model's. [default: above 1 GiB]")
@click.option("--changes", "every", is_flag=True, help="Show every change with its node, not only how many there were.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def optimise(
    model: Path,
    output: Path | None,
    level: str,
    providers: Providers,
    external_data: bool | None,
    every: bool,
    as_json: bool,
) -> None:
    """Run the graph passes on MODEL, an ONNX file, say what each changed, and write the result to a file that any runtime loads."""
    from miniort.runtime.optimise import optimise_model

    optimised = optimise_model(model, level, providers=providers)
    written: Sequence[Path] = [] if output is None else optimised.save(output, external_data=external_data)
    if as_json:
        click.echo(json.dumps(_as_object(optimised, written), indent=2))
        return
    _print(optimised, every)
    for path in written:
        click.echo(f"wrote {path}, {path.stat().st_size:,} bytes")


def _as_object(optimised: OptimisedModel, written: Sequence[Path]) -> dict[str, object]:
    return {
        "nodes_before": optimised.nodes_before,
        "nodes_after": optimised.nodes_after,
        "opsets": {domain or "ai.onnx": opset for domain, opset in optimised.opsets.items()},
        "ops": dict(_ops(optimised).most_common()),
        "changes": [{"pass": each.graph_pass, "node": each.node, "reason": each.reason} for each in optimised.changes],
        "files": [str(path) for path in written],
    }


def _print(optimised: OptimisedModel, every: bool) -> None:
    from miniort_cli.tables import print_table

    if every:
        print_table(["pass", "node", "change"], [[each.graph_pass, each.node, each.reason] for each in optimised.changes])
    else:
        counted = Counter((each.graph_pass, _kind(each)) for each in optimised.changes)
        print_table(["pass", "times", "change"], [[name, str(times), kind] for (name, kind), times in counted.items()], right=["times"])
    opsets = ", ".join(f"{domain or 'ai.onnx'} {opset}" for domain, opset in optimised.opsets.items())
    click.echo(f"\n{optimised.nodes_before} nodes before, {optimised.nodes_after} after; opset {opsets}")
    click.echo(", ".join(f"{op} {count}" for op, count in _ops(optimised).most_common()))


def _kind(change: Change) -> str:
    """A change without what differs from node to node: names behind "equal to" and the like, and sizes."""
    text = re.sub(r"^(equal to|joined with|the same sizes as) .*", r"\1 another", change.reason)
    return re.sub(r"\[[-0-9, ]*\]", "[…]", text)


def _ops(optimised: OptimisedModel) -> Counter[str]:
    return Counter(node.op_type for graph in optimised.model.graphs() for node in graph)
