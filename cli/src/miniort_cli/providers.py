"""`miniort providers`: what can run a graph here, and what can't and why."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def providers(as_json: bool) -> None:
    """List providers, and which can be used here."""
    from miniort.plugins import create_plugin_manager
    from miniort.plugins.collect import failed_plugins
    from miniort.providers import check_provider, list_providers
    from miniort_cli.tables import print_table

    manager = create_plugin_manager()
    found = [(info, check_provider(info)) for info in list_providers(manager).values()]
    failures = failed_plugins(manager)
    if as_json:
        listed = [
            {
                "name": info.name,
                "priority": info.priority,
                "available": availability.ok,
                "reason": availability.reason,
                "summary": info.summary,
            }
            for info, availability in found
        ]
        click.echo(json.dumps({"providers": listed, "failures": failures}))
        return
    rows = [
        (info.name, str(info.priority), "yes" if availability.ok else "no", availability.reason, info.summary)
        for info, availability in found
    ]
    print_table(("provider", "priority", "available", "reason", "what it is"), rows, right=("priority",))
    for name, reason in failures.items():
        click.echo(f"plugin {name} failed: {reason}", err=True)
