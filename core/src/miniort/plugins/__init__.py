"""Finding plugins, and asking them what they offer."""

from miniort.plugins.collect import collect, collect_mapping, find_named, first_result
from miniort.plugins.hookspecs import hookimpl, hookspec
from miniort.plugins.manager import PluginManager, PluginRecord, create_plugin_manager

__all__ = [
    "PluginManager",
    "PluginRecord",
    "collect",
    "collect_mapping",
    "create_plugin_manager",
    "find_named",
    "first_result",
    "hookimpl",
    "hookspec",
]
