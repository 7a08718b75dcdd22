"""What `miniort inspect` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from miniort_cli.tables import print_table

if TYPE_CHECKING:
    from miniort_cli.decoder_facts import DecoderFacts, RoleFacts
    from miniort_cli.graph_facts import GraphFacts
    from miniort_cli.inspect import BuiltGraph, Inspection


def print_inspection(found: Inspection) -> None:
    """The whole report: each file, the decoder, and what becomes of each graph."""
    for facts in found.files:
        _print_file(facts)
    if found.decoder is not None:
        _print_decoder(found.decoder)
    elif found.not_a_decoder is not None and any("int" in value.type for facts in found.files for value in facts.inputs):
        click.echo(f"not a decoder: {found.not_a_decoder}")
        click.echo()
    in_files = [facts.ops for facts in found.files] if len(found.files) == len(found.graphs) else [{} for _ in found.graphs]
    for (name, graph), ops in zip(found.graphs.items(), in_files, strict=True):
        _print_graph(name, graph, ops)


def _print_file(facts: GraphFacts) -> None:
    opsets = ", ".join(f"{domain} {version}" for domain, version in facts.opsets.items())
    parameters = sum(each.parameters for each in facts.weights)
    external = ", ".join(f"{name} ({_size(size)})" for name, size in facts.external.items())
    functions = ", ".join(f"{each.name} ({each.nodes} nodes, called {each.calls} times)" for each in facts.functions)
    rows = [
        ("file", f"{facts.path} ({_size(facts.bytes)})"),
        ("written by", facts.producer or "unknown"),
        ("IR version", str(facts.ir_version)),
        ("opsets", opsets),
        ("nodes", f"{facts.nodes:,}" + (f", in {facts.subgraphs} sub-graphs too" if facts.subgraphs else "")),
        ("functions", functions or "none"),
        ("weights", f"{parameters:,} numbers, {_size(sum(each.bytes for each in facts.weights))}"),
        ("external data", external or "none"),
    ]
    _print_pairs(rows)
    values = [("input", each) for each in facts.inputs] + [("output", each) for each in facts.outputs]
    print_table(("", "name", "type", "shape"), [(kind, each.name, each.type, _shape(each.shape)) for kind, each in values])
    if facts.overridable:
        click.echo(f"{facts.overridable} more inputs are weights that a feed may replace")
    click.echo()
    if facts.weights:
        weights = [(each.type, f"{each.tensors:,}", f"{each.parameters:,}", _size(each.bytes)) for each in facts.weights]
        print_table(("weights", "tensors", "numbers", "bytes"), weights, right=("tensors", "numbers", "bytes"))
        click.echo()


def _print_decoder(facts: DecoderFacts) -> None:
    rows = [(each.role, each.graph, each.name, each.type, _shape(each.shape)) for each in _shortened(facts.roles)]
    print_table(("role", "graph", "name", "type", "shape"), rows, title="decoder")
    click.echo()
    dims = str(facts.head_dim) if facts.head_dim == facts.value_head_dim else f"{facts.head_dim} (keys), {facts.value_head_dim} (values)"
    about = [
        *([("graphs", "both are branches of one file")] if facts.merged else []),
        ("layers", str(facts.layers)),
        ("kv heads", str(facts.kv_heads)),
        ("head dim", dims),
        ("vocabulary", "unknown" if facts.vocabulary_size is None else f"{facts.vocabulary_size:,}"),
        ("context", "unknown" if facts.context_length is None else f"{facts.context_length:,} tokens"),
        ("end tokens", ", ".join(map(str, facts.end_tokens)) or "unknown"),
        ("tokenizer", "beside the model" if facts.tokenizer else "none beside the model"),
        ("cache", f"{facts.dtype}, {facts.cache_bytes_per_token:,} bytes per token"),
    ]
    for graph, axes in facts.cache_axes.items():
        stored = {kind: "[" + ", ".join(names) + "]" for kind, names in axes.items()}
        text = stored["key"] if stored["key"] == stored["value"] else f"keys {stored['key']}, values {stored['value']}"
        about.append((f"cache axes in {graph}", text))
    about += [
        (f"cache in {graph}", f"{'joined' if facts.appends[graph] else 'not joined'}: {reason}") for graph, reason in facts.joins.items()
    ]
    if facts.trouble is not None:
        about.append(("can't be run", facts.trouble))
    else:
        several = "yes" if facts.takes_several_tokens else "no: the decode graph has no mask between them"
        padded = "yes, padded on the left" if facts.padding is None else f"no: {facts.padding}"
        about += [("several new tokens at once", several), ("rows of different lengths", padded)]
    _print_pairs(about)


def _print_pairs(rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name.ljust(width)}  {text}")
    click.echo()


def _shortened(roles: Sequence[RoleFacts]) -> list[RoleFacts]:
    """All roles, but of the cache's the first and the last layer alone where there are more than three."""
    layers = [int(each.role.split(".")[1]) for each in roles if each.role.startswith(("past.", "present."))]
    last = max(layers, default=0)
    if last < 3:
        return list(roles)
    return [each for each in roles if "." not in each.role or int(each.role.split(".")[1]) in (0, last)]


def _print_graph(name: str, graph: BuiltGraph, in_file: Mapping[str, int]) -> None:
    if graph.trouble is not None:
        click.echo(f"{name} can't be run: {graph.trouble}")
        return
    counts = ({"file": in_file} if in_file else {}) | graph.ops
    placed = {op: ", ".join(provider for provider, ops in graph.providers.items() if op in ops) for op in graph.ops[list(graph.ops)[-1]]}
    ops = sorted({op for each in counts.values() for op in each}, key=lambda op: (-max(each.get(op, 0) for each in counts.values()), op))
    rows = [(op, *(_count(each.get(op, 0)) for each in counts.values()), placed.get(op, "") or _nobody(op, graph)) for op in ops]
    total = ("all", *(f"{sum(each.values()):,}" for each in counts.values()), "")
    columns = ("op", *counts, "runs on")
    print_table(
        columns, [total, *rows], title=f"{name}: nodes{' in the file and' if in_file else ''} at each optimization level", right=(*counts,)
    )
    for op, reason in graph.unsupported.items():
        click.echo(f"no kernel for {op}: {reason}")
    if graph.copies:
        click.echo(f"{graph.copies} copies between devices in each run")
    click.echo()


def _nobody(op: str, graph: BuiltGraph) -> str:
    return "nobody" if op in graph.unsupported else ""


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _shape(shape: Sequence[int | str | None] | None) -> str:
    return "unknown" if shape is None else "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,} bytes"
