"""Commands that plugins add."""

from __future__ import annotations

from collections.abc import Collection

import click

from miniort.errors import PluginError
from miniort.plugins import PluginManager, create_plugin_manager
from miniort.plugins.collect import unknown_name_message
from miniort.plugins.manager import describe_exception

HOOK = "miniort_commands"


def commands_by_plugin(manager: PluginManager, built_in: Collection[str]) -> dict[str, dict[str, click.Command]]:
    """The commands of each plugin that adds any, by plugin and by command, in the order of plugin names.

    Each plugin is handed a group of its own, so that none can replace another's command. One that raises adds nothing, and one that uses
    a name of `built_in` loses that command; both are kept in `manager.hook_failures`.
    """
    found: dict[str, dict[str, click.Command]] = {}
    plugins = manager.get_plugins()
    for plugin_name in sorted({each.plugin_name for each in manager.hook.miniort_commands.get_hookimpls()}):
        group = click.Group("miniort")
        only_this_one = manager.subset_hook_caller(HOOK, plugins - {manager.get_plugin(plugin_name)})
        try:
            only_this_one(cli=group)
        except Exception as error:
            # A plugin may raise anything at all; the others' commands must still be there.
            manager.hook_failures[f"{plugin_name}.{HOOK}"] = describe_exception(error)
            continue
        taken = sorted(group.commands.keys() & set(built_in))
        if taken:
            manager.hook_failures[f"{plugin_name}.{HOOK}"] = f"commands of these names are built in: {', '.join(taken)}"
        found[plugin_name] = {name: command for name, command in group.commands.items() if name not in taken}
    return found


def find_plugin_command(name: str, built_in: Collection[str]) -> click.Command:
    """The command that a plugin adds under that name. UsageError if none does, PluginError if several do."""
    manager = create_plugin_manager()
    by_plugin = commands_by_plugin(manager, built_in)
    offering = [plugin_name for plugin_name, commands in by_plugin.items() if name in commands]
    if not offering:
        known = sorted({*built_in, *(command for commands in by_plugin.values() for command in commands)})
        raise click.UsageError(unknown_name_message(manager, "command", name, known))
    if len(offering) > 1:
        raise PluginError(
            f"plugins {' and '.join(map(repr, offering))} all add a command {name!r}; "
            "uninstall all but one, or leave them out with MINIORT_DISABLE_PLUGINS"
        )
    return by_plugin[offering[0]][name]
