"""Asking plugins what they offer: a fixed order, each name once, and one broken hook hides no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest

from miniort.errors import PluginError
from miniort.plugins import PluginManager, collect, collect_mapping, find_named, hookimpl
from miniort.providers import Availability, ProviderInfo


def provider(name: str, priority: int = 0) -> ProviderInfo:
    def never_opened(options: Any) -> Any:
        raise AssertionError

    return ProviderInfo(name, priority, lambda: Availability(True, ""), never_opened)


class Plugin:
    """Offers what a function gives."""

    def __init__(self, give: Callable[[], Any]) -> None:
        self._give = give

    @hookimpl
    def miniort_providers(self) -> Any:
        return self._give()


def manager_of(plugins: Sequence[tuple[str, Callable[[], Any]]]) -> PluginManager:
    manager = PluginManager()
    for name, give in plugins:
        manager.register(Plugin(give), name=name)
    return manager


def raises() -> Any:
    raise ZeroDivisionError("in the hook")


def names(manager: PluginManager) -> list[str]:
    return list(collect_mapping(manager, "miniort_providers", ProviderInfo))


def test_order_is_priority_then_name_whatever_was_registered_first() -> None:
    plugins: list[tuple[str, Callable[[], Any]]] = [
        ("z", lambda: [provider("slow", 1), provider("fast", 9)]),
        ("m", lambda: [provider("b", 5)]),
        ("a", lambda: [provider("a", 5), provider("last", -1)]),
    ]
    for order in permutations(plugins):
        assert names(manager_of(order)) == ["fast", "a", "b", "slow", "last"]


def test_collect_goes_by_plugin_names() -> None:
    plugins: list[tuple[str, Callable[[], Any]]] = [("z", lambda: [provider("1")]), ("a", lambda: [provider("2"), provider("3")])]
    for order in permutations(plugins):
        found = collect(manager_of(order), "miniort_providers", ProviderInfo)
        assert [(plugin, item.name) for plugin, item in found] == [("a", "2"), ("a", "3"), ("z", "1")]


@pytest.mark.parametrize(
    ("give", "reason"),
    [
        (raises, "ZeroDivisionError: in the hook"),
        (lambda: [provider("half"), "no provider"], "TypeError: miniort_providers must return a list of ProviderInfo, found str"),
        (lambda: provider("bare"), "TypeError"),
        (lambda: 7, "TypeError"),
    ],
)
def test_a_hook_that_fails_is_left_out_whole_and_noted(give: Callable[[], Any], reason: str) -> None:
    manager = manager_of([("bad", give), ("good", lambda: [provider("ok")]), ("also_good", lambda: [provider("fine")])])
    assert names(manager) == ["fine", "ok"]
    assert manager.hook_failures["bad.miniort_providers"].startswith(reason)


def test_a_hook_may_offer_nothing() -> None:
    assert names(manager_of([("a", lambda: []), ("b", lambda: None), ("c", lambda: [provider("x")])])) == ["x"]


def test_one_name_offered_twice_is_an_error_that_names_both_plugins() -> None:
    manager = manager_of([("one", lambda: [provider("same")]), ("two", lambda: [provider("same")])])
    with pytest.raises(PluginError, match=r"plugins 'one' and 'two' both offer 'same'.*MINIORT_DISABLE_PLUGINS"):
        names(manager)


def test_an_unknown_name_lists_what_there_is_and_what_is_spelled_like_it() -> None:
    manager = manager_of([("a", lambda: [provider("greedy"), provider("top_k")]), ("bad", raises)])
    assert find_named(manager, "miniort_providers", ProviderInfo, "top_k", "sampler").name == "top_k"
    with pytest.raises(PluginError) as caught:
        find_named(manager, "miniort_providers", ProviderInfo, "gredy", "sampler")
    message = str(caught.value)
    assert "no sampler is named 'gredy'; there is: greedy, top_k" in message
    assert "did you mean 'greedy'?" in message
    assert "ZeroDivisionError" in message
    assert "\n" not in message


def test_no_plugin_at_all() -> None:
    with pytest.raises(PluginError, match="there is: none at all"):
        find_named(manager_of([]), "miniort_providers", ProviderInfo, "x", "provider")
