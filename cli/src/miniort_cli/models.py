"""`miniort models`: which models are here, and how to be rid of one."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command()
@click.option("--remove", metavar="NAME", help="Delete a model that was pulled, or the graphs of one that was converted.")
@click.option("--yes", is_flag=True, help="Don't ask before --remove.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def models(remove: str | None, yes: bool, as_json: bool) -> None:
    """List the models that are here, or delete one."""
    if remove is None:
        if yes:
            raise click.UsageError("--yes is of use only with --remove")
        _list(as_json)
    else:
        _remove(remove, yes, as_json)


def _list(as_json: bool) -> None:
    from miniort_cli.tables import print_table
    from miniort_models.file_size import describe_size
    from miniort_models.local_models import list_models

    found = list_models()
    if as_json:
        click.echo(json.dumps({"models": [asdict(model) for model in found]}))
        return
    rows = []
    for model in found:
        revision = " ".join(text for text in (model.revision, (model.commit or "")[:7]) if text)
        when = (model.when or "").partition("T")[0]
        rows.append((model.name, describe_size(model.size), model.dtype or "", revision, when, model.origin, model.trouble or ""))
    columns = ("model", "size", "dtype", "revision", "since", "from", "what is wrong")
    shown = len(columns) if any(model.trouble for model in found) else -1  # without the last where all is well
    print_table(columns[:shown], [row[:shown] for row in rows], right=("size",))


def _remove(name: str, yes: bool, as_json: bool) -> None:
    from miniort_models.file_size import describe_size
    from miniort_models.local_models import find_removable, remove_model

    model = find_removable(name)
    if not yes and not click.confirm(f"Delete {name} ({describe_size(model.size)}, from {model.origin})?", err=True):
        raise click.Abort
    freed = remove_model(name)
    if as_json:
        click.echo(json.dumps({"removed": name, "freed": freed}))
    else:
        click.echo(f"deleted {name}: {describe_size(freed)} are free again")
