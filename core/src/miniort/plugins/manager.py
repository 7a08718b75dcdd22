"""The plugin manager and the loader that fills it from entry points."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from miniort.plugins import hookspecs

ENTRY_POINT_GROUP = "miniort"
ALLOW_VARIABLE = "MINIORT_PLUGINS"
DENY_VARIABLE = "MINIORT_DISABLE_PLUGINS"


@dataclass(frozen=True)
class PluginRecord:
    """What became of one entry point: `status` is `loaded`, `failed` or `disabled`, `reason` says why where it isn't loaded."""

    name: str
    module: str
    distribution: str
    version: str
    status: str
    reason: str = ""


class PluginManager(pluggy.PluginManager):
    """pluggy's manager with miniort's hook specs, and a record of what became of every plugin."""

    def __init__(self) -> None:
        super().__init__("miniort")
        self.add_hookspecs(hookspecs)
        self.records: dict[str, PluginRecord] = {}
        self.hook_failures: dict[str, str] = {}

    def load_entry_points(self, points: Iterable[EntryPoint], allow: Collection[str] | None = None, deny: Collection[str] = ()) -> None:
        """Import and register each entry point, in the order of their names; one that fails is recorded and left out."""
        for point in sorted(points, key=lambda point: (point.name, point.value)):
            self._load_entry_point(point, allow, deny)
        for name in sorted(set(allow or ()) - self.records.keys()):
            self.records[name] = PluginRecord(name, "?", "?", "?", "failed", f"in {ALLOW_VARIABLE}, but no installed package has it")

    def _load_entry_point(self, point: EntryPoint, allow: Collection[str] | None, deny: Collection[str]) -> None:
        def record(status: str, reason: str = "") -> None:
            distribution = point.dist
            self.records[point.name] = PluginRecord(
                name=point.name,
                module=point.value,
                distribution=distribution.name if distribution else "?",
                version=distribution.version if distribution else "?",
                status=status,
                reason=reason,
            )

        if point.name in self.records:
            first = self.records[point.name]
            if first.module != point.value:  # one distribution seen twice on the path is no conflict
                del self.records[point.name]
                self.unregister(name=point.name)
                record("failed", f"two distributions name a plugin {point.name!r}: {first.module} and {point.value}; remove one")
        elif allow is not None and point.name not in allow:
            record("disabled", f"not in {ALLOW_VARIABLE}")
        elif point.name in deny:
            record("disabled", f"in {DENY_VARIABLE}")
        else:
            try:
                self.register(point.load(), name=point.name)
                self.check_pending()  # a hook that no spec knows, such as a misspelt one
                record("loaded")
            except (Exception, SystemExit) as error:
                # A plugin may raise anything at all while it's imported, or try to leave, and must take nobody else down.
                self.unregister(name=point.name)
                record("failed", describe_exception(error))

    def unregister(self, plugin: Any = None, name: str | None = None) -> Any:
        """Pluggy's unregister, but a name that isn't registered is no error."""
        if plugin is None and name is not None and not self.has_plugin(name):
            return None
        return super().unregister(plugin, name)


def describe_exception(error: BaseException) -> str:
    """`KeyError: 'x'` on one line."""
    try:
        text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    except Exception:
        text = ""  # an exception of a plugin's own may not even be able to say what it is
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def create_plugin_manager(
    points: Iterable[EntryPoint] | None = None,
    allow: Collection[str] | None = None,
    deny: Collection[str] | None = None,
) -> PluginManager:
    """A new plugin manager with every installed plugin; there is no global one.

    points: the entry points to load; None for those of the group `miniort` in this environment.
    allow, deny: names of plugins; None for the environment's MINIORT_PLUGINS and MINIORT_DISABLE_PLUGINS (separated by commas).
    """
    manager = PluginManager()
    manager.load_entry_points(
        entry_points(group=ENTRY_POINT_GROUP) if points is None else points,
        allow=_names_from_environment(ALLOW_VARIABLE) if allow is None else allow,
        deny=(_names_from_environment(DENY_VARIABLE) or ()) if deny is None else deny,
    )
    return manager


def _names_from_environment(variable: str) -> list[str] | None:
    text = os.environ.get(variable)
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
