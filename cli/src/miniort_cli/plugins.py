"""`miniort plugins`: what became of every plugin, and what each one offers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from miniort.plugins import PluginManager

# What is offered, the hook that offers it, and where the class is that the hook returns a list of. The class is imported only if a plugin
# has the hook: that of graph passes brings onnx-ir with it, which is slow.
NAMED_OFFERS = (
    ("providers", "miniort_providers", "miniort.providers", "ProviderInfo"),
    ("graph passes", "miniort_graph_passes", "miniort.graph.passes", "GraphPass"),
    ("logits processors", "miniort_logits_processors", "miniort.generation.sampling", "LogitsProcessorInfo"),
    ("samplers", "miniort_samplers", "miniort.generation.sampling", "SamplerInfo"),
    ("cache layouts", "miniort_cache_layouts", "miniort.generation.cache", "CacheLayoutInfo"),
    ("model formats", "miniort_model_formats", "miniort.generation.sources", "ModelFormat"),
    ("architectures", "miniort_architectures", "miniort.generation.sources", "Architecture"),
)

# Hooks that can only be called while a session is built: here it's only said that a plugin has them.
UNNAMED_OFFERS = ("miniort_select_kernel", "miniort_observers")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def plugins(ctx: click.Context, as_json: bool) -> None:
    """List plugins, and what each one offers."""
    from miniort.plugins import create_plugin_manager
    from miniort_cli.tables import print_table

    root = ctx.find_root().command
    manager = create_plugin_manager()
    offers = _offers_by_plugin(manager, root.commands if isinstance(root, click.Group) else ())
    records = sorted(manager.records.values(), key=lambda record: record.name)
    failures = {record.name: _hook_failures(manager, record.name) for record in records}
    if as_json:
        listed = [
            {
                "name": record.name,
                "module": record.module,
                "distribution": record.distribution,
                "version": record.version,
                "status": record.status,
                "reason": record.reason,
                "offers": offers.get(record.name, {}),
                "failures": failures[record.name],
            }
            for record in records
        ]
        click.echo(json.dumps({"plugins": listed}))
        return
    rows = []
    for record in records:
        said = [f"{kind}: {', '.join(names)}" if names else kind for kind, names in offers.get(record.name, {}).items()]
        said += [f"{hook} failed: {reason}" for hook, reason in failures[record.name].items()]
        rows.append((record.name, f"{record.distribution} {record.version}", record.status, record.reason or "; ".join(said)))
    print_table(("plugin", "distribution", "status", "what it offers, or why it isn't there"), rows)


def _offers_by_plugin(manager: PluginManager, built_in_commands: Any) -> dict[str, dict[str, list[str]]]:
    """Names of all that each plugin offers, by kind; for hooks that give no names, an empty list."""
    from importlib import import_module

    from miniort.plugins import collect
    from miniort_cli.plugin_commands import commands_by_plugin

    offers: dict[str, dict[str, list[str]]] = {}

    def offer(plugin: str, kind: str, *names: str) -> None:
        offers.setdefault(plugin, {}).setdefault(kind, []).extend(names)

    for kind, hook, module, class_name in NAMED_OFFERS:
        if _implementing(manager, hook):
            for plugin, item in collect(manager, hook, getattr(import_module(module), class_name)):
                offer(plugin, kind, item.name)
    if _implementing(manager, "miniort_kernels"):
        from miniort.kernels import Kernel, qualified_op

        providers = [name for each in offers.values() for name in each.get("providers", ())]
        for provider in sorted(set(providers)):
            for plugin, kernel in collect(manager, "miniort_kernels", Kernel, provider=provider):
                offer(plugin, f"kernels for {provider}", qualified_op(kernel.domain, kernel.op))
    for hook in UNNAMED_OFFERS:
        for plugin in _implementing(manager, hook):
            offer(plugin, hook)
    for plugin, commands in commands_by_plugin(manager, built_in_commands).items():
        offer(plugin, "commands", *commands)
    return offers


def _implementing(manager: PluginManager, hook: str) -> list[str]:
    return sorted({implementation.plugin_name for implementation in getattr(manager.hook, hook).get_hookimpls()})


def _hook_failures(manager: PluginManager, plugin: str) -> dict[str, str]:
    """Why hooks of a plugin failed, by hook. The manager keys them by `plugin.hook`."""
    split = ((*key.rpartition("."), reason) for key, reason in manager.hook_failures.items())
    return {hook: reason for name, _, hook, reason in split if name == plugin}
