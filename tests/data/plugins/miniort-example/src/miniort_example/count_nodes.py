"""The command `miniort count-nodes`."""

from __future__ import annotations

from collections import Counter

import click


@click.command("count-nodes")
@click.argument("model")
@click.option("--providers", default="cpu", show_default=True, help="Names with commas between.")
def count_nodes(model: str, providers: str) -> None:
    """Say which provider runs how many nodes of an ONNX model, by op."""
    from miniort import InferenceSession

    session = InferenceSession(model, providers=providers.split(","))
    counts = Counter((node.provider or "nobody", node.op) for node in session.explain().nodes)
    for (provider, op), count in sorted(counts.items()):
        click.echo(f"{provider} {op} {count}")
