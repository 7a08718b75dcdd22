"""The loader: entry points in the order of their names, each failure kept to itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from miniort.plugins import PluginManager, create_plugin_manager

MakePlugin = Callable[..., EntryPoint]

HOOK = """
from miniort.plugins import hookimpl

@hookimpl
def miniort_providers():
    return []
"""


@pytest.fixture
def make_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePlugin]:
    """A module in a temporary folder, and the entry point that names it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def make(name: str, source: str = HOOK, module: str | None = None) -> EntryPoint:
        module = module or f"miniort_test_plugin_{name}"
        (tmp_path / f"{module}.py").write_text(source)
        made.append(module)
        return EntryPoint(name, module, "miniort")

    yield make
    for module in made:
        sys.modules.pop(module, None)


def statuses(manager: PluginManager) -> dict[str, str]:
    return {name: record.status for name, record in manager.records.items()}


def test_plugins_are_imported_in_the_order_of_their_names(make_plugin: MakePlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import sys\nsys.miniort_test_order.append(__name__[-1])" + HOOK
    order: list[str] = []
    monkeypatch.setattr(sys, "miniort_test_order", order, raising=False)
    manager = create_plugin_manager([make_plugin(name, source) for name in "cab"])
    assert order == ["a", "b", "c"]
    assert list(manager.records) == ["a", "b", "c"]
    assert [name for name, _ in manager.list_name_plugin()] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise KeyError('lost')", "KeyError: 'lost'"),
        ("import miniort_test_no_such_module", "ModuleNotFoundError: No module named 'miniort_test_no_such_module'"),
        ("raise SystemExit('needs a newer Python')", "SystemExit: needs a newer Python"),
        ("def broken(:", "SyntaxError"),
        ("raise ValueError('one\\ntwo')", "ValueError: one"),
        ("class Odd(Exception):\n    def __str__(self): raise RuntimeError('no text')\nraise Odd", "Odd"),
    ],
)
def test_a_plugin_that_fails_to_import_is_recorded_and_harms_nobody(make_plugin: MakePlugin, source: str, reason: str) -> None:
    manager = create_plugin_manager([make_plugin("bad", source), make_plugin("good"), make_plugin("also_good")])
    assert statuses(manager) == {"also_good": "loaded", "bad": "failed", "good": "loaded"}
    assert manager.records["bad"].reason.startswith(reason)
    assert "\n" not in manager.records["bad"].reason
    assert not manager.has_plugin("bad")


def test_a_hook_with_an_argument_that_the_spec_lacks_fails_its_plugin_alone(make_plugin: MakePlugin) -> None:
    source = HOOK + "\n@hookimpl\ndef miniort_kernels(provider, colour):\n    return []\n"
    manager = create_plugin_manager([make_plugin("bad", source), make_plugin("good")])
    assert statuses(manager) == {"bad": "failed", "good": "loaded"}
    assert "colour" in manager.records["bad"].reason
    assert [each.plugin_name for each in manager.hook.miniort_providers.get_hookimpls()] == ["good"]


def test_a_hook_that_no_spec_knows_fails_its_plugin_alone(make_plugin: MakePlugin) -> None:
    bad = make_plugin("bad", HOOK.replace("miniort_providers", "miniort_provider"))
    manager = create_plugin_manager([bad, make_plugin("good")])
    assert statuses(manager) == {"bad": "failed", "good": "loaded"}
    assert "miniort_provider" in manager.records["bad"].reason


def test_a_hook_may_take_fewer_arguments(make_plugin: MakePlugin) -> None:
    source = HOOK + "\n@hookimpl\ndef miniort_kernels():\n    return []\n"
    assert statuses(create_plugin_manager([make_plugin("frugal", source)])) == {"frugal": "loaded"}


def test_allow_list_and_deny_list(make_plugin: MakePlugin) -> None:
    points = [make_plugin(name) for name in ("a", "b", "c")]
    manager = create_plugin_manager(points, allow=["a", "b"], deny=["b"])
    assert statuses(manager) == {"a": "loaded", "b": "disabled", "c": "disabled"}
    assert manager.records["b"].reason == "in MINIORT_DISABLE_PLUGINS"
    assert manager.records["c"].reason == "not in MINIORT_PLUGINS"


def test_lists_come_from_the_environment(make_plugin: MakePlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [make_plugin(name) for name in ("a", "b", "c")]
    monkeypatch.setenv("MINIORT_PLUGINS", "a, b,")
    monkeypatch.setenv("MINIORT_DISABLE_PLUGINS", " b")
    assert statuses(create_plugin_manager(points)) == {"a": "loaded", "b": "disabled", "c": "disabled"}
    assert statuses(create_plugin_manager(points, allow=["b", "c"], deny=[])) == {"a": "disabled", "b": "loaded", "c": "loaded"}


def test_an_empty_allow_list_allows_nothing(make_plugin: MakePlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIORT_PLUGINS", "")
    assert statuses(create_plugin_manager([make_plugin("a")])) == {"a": "disabled"}


def test_a_plugin_that_is_not_allowed_is_not_even_imported(make_plugin: MakePlugin) -> None:
    point = make_plugin("bad", "raise ValueError")
    assert statuses(create_plugin_manager([point], deny=["bad"])) == {"bad": "disabled"}


def test_an_allowed_name_that_nobody_has_is_reported(make_plugin: MakePlugin) -> None:
    manager = create_plugin_manager([make_plugin("a")], allow=["a", "typo"])
    assert statuses(manager) == {"a": "loaded", "typo": "failed"}
    assert "no installed package" in manager.records["typo"].reason


def test_two_modules_under_one_name_are_both_left_out(make_plugin: MakePlugin) -> None:
    points = [make_plugin("twin", module="miniort_test_twin_1"), make_plugin("twin", module="miniort_test_twin_2"), make_plugin("good")]
    for order in (points, points[::-1]):
        manager = create_plugin_manager(order)
        assert statuses(manager) == {"good": "loaded", "twin": "failed"}
        assert "miniort_test_twin_1 and miniort_test_twin_2" in manager.records["twin"].reason
        assert not manager.has_plugin("twin")


def test_one_entry_point_seen_twice_is_no_conflict(make_plugin: MakePlugin) -> None:
    point = make_plugin("a")
    assert statuses(create_plugin_manager([point, point])) == {"a": "loaded"}


def test_a_module_that_was_not_found_at_all(make_plugin: MakePlugin) -> None:
    manager = create_plugin_manager([EntryPoint("gone", "miniort_test_gone.plugin", "miniort"), make_plugin("a")])
    assert statuses(manager) == {"a": "loaded", "gone": "failed"}


def test_managers_share_nothing(make_plugin: MakePlugin) -> None:
    first = create_plugin_manager([make_plugin("a")])
    second = create_plugin_manager([])
    assert second.list_name_plugin() == []
    assert statuses(second) == {}
    assert statuses(first) == {"a": "loaded"}


def test_records_name_the_distribution() -> None:
    manager = create_plugin_manager()
    record = manager.records["cpu"]
    assert (record.status, record.module, record.distribution) == ("loaded", "miniort_cpu.plugin", "miniort-cpu")
    assert record.version
