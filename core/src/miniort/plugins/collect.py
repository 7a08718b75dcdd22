"""Asking plugins what they offer: in a fixed order, each name once, and one broken plugin doesn't hide the others."""

from __future__ import annotations

import difflib
from typing import Any, Protocol, TypeVar

from miniort.errors import PluginError
from miniort.plugins.manager import PluginManager, describe_exception


class Named(Protocol):
    """What plugins offer has a name, that is unique among its kind."""

    @property
    def name(self) -> str: ...


T = TypeVar("T")
NamedT = TypeVar("NamedT", bound=Named)


def collect(manager: PluginManager, hook: str, kind: type[T], **arguments: Any) -> list[tuple[str, T]]:
    """Everything that plugins return from `hook`, each with its plugin's name, in the order of plugin names.

    A plugin whose implementation raises, or returns something else than a list of `kind`, is left out and its failure is kept in
    `manager.hook_failures`.
    """
    found: list[tuple[str, T]] = []
    plugins = manager.get_plugins()
    implementing = {implementation.plugin_name for implementation in getattr(manager.hook, hook).get_hookimpls()}
    for plugin_name in sorted(implementing):
        plugin = manager.get_plugin(plugin_name)
        only_this_one = manager.subset_hook_caller(hook, plugins - {plugin})
        try:
            results = only_this_one(**arguments)
            items = list(results[0]) if results else []
            for item in items:
                if not isinstance(item, kind):
                    raise TypeError(f"{hook} must return a list of {kind.__name__}, found {type(item).__name__}")
        except (Exception, SystemExit) as error:
            # A plugin may raise anything at all; the others must still be heard.
            manager.hook_failures[f"{plugin_name}.{hook}"] = describe_exception(error)
        else:
            found += [(plugin_name, item) for item in items]
    return found


def first_result(manager: PluginManager, hook: str, **arguments: Any) -> Any:
    """The first answer to a firstresult hook that isn't None, asked in the order of plugin names; None if nobody has one.

    PluginError if an implementation raises: a decision can't be left out.
    """
    caller = getattr(manager.hook, hook)
    for plugin_name in sorted(implementation.plugin_name for implementation in caller.get_hookimpls()):
        only_this_one = manager.subset_hook_caller(hook, manager.get_plugins() - {manager.get_plugin(plugin_name)})
        try:
            answer = only_this_one(**arguments)
        except (Exception, SystemExit) as error:
            # A plugin may raise anything at all; the user has to learn which one it was.
            raise PluginError(
                f"plugin {plugin_name!r} failed in {hook}: {describe_exception(error)}; MINIORT_DISABLE_PLUGINS goes without it"
            ) from error
        if answer is not None:
            return answer
    return None


def collect_mapping(manager: PluginManager, hook: str, kind: type[NamedT]) -> dict[str, NamedT]:
    """What plugins return from `hook`, by name; by priority (higher first) where the kind has one, then by name.

    PluginError if two have one name.
    """
    by_name: dict[str, tuple[str, NamedT]] = {}
    for plugin_name, item in collect(manager, hook, kind):
        if item.name in by_name:
            raise PluginError(
                f"plugins {by_name[item.name][0]!r} and {plugin_name!r} both offer {item.name!r} ({hook}); "
                "uninstall one, or leave one out with MINIORT_DISABLE_PLUGINS"
            )
        by_name[item.name] = (plugin_name, item)
    items = [item for _, item in by_name.values()]
    items.sort(key=lambda item: (-getattr(item, "priority", 0), item.name))
    return {item.name: item for item in items}


def find_named(manager: PluginManager, hook: str, kind: type[NamedT], name: str, noun: str) -> NamedT:
    """What a plugin offers under `name`. PluginError that lists what there is, and what failed to load."""
    known = collect_mapping(manager, hook, kind)
    if name in known:
        return known[name]
    raise PluginError(unknown_name_message(manager, noun, name, list(known)))


def failed_plugins(manager: PluginManager) -> dict[str, str]:
    """What failed and why: plugins by name, and single hooks of others as `plugin.hook`."""
    failed = {record.name: record.reason for record in manager.records.values() if record.status == "failed"}
    return failed | manager.hook_failures


def unknown_name_message(manager: PluginManager, noun: str, name: str, known: list[str]) -> str:
    """One line that says what is there instead, what is spelled like it, and which plugins failed to load."""
    message = f"no {noun} is named {name!r}; there is: {', '.join(known) or 'none at all'}"
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        message += f" (did you mean {close[0]!r}?)"
    failed = [f"{name} ({reason})" for name, reason in failed_plugins(manager).items()]
    if failed:
        message += f"; plugins that failed: {', '.join(failed)}"
    return message
