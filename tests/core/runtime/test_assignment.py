"""Who gets a node: the first in the user's order that can take it, with the reasons of those before; and what is an error when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from miniort import InferenceSession, kernels
from miniort.errors import KernelError, ModelError, PluginError, ProviderError
from miniort.host_provider import HostProvider
from miniort.kernels import ANY_PROVIDER, Kernel, KernelTable, NodeView
from miniort.plugins import PluginManager, create_plugin_manager, hookimpl
from miniort.providers import Availability, ProviderInfo, ProviderOptions

Build = Callable[..., InferenceSession]
F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
X = np.array([1, 2], np.float32)
ADD = "g (float[2] x) => (float[2] y) { y = Add(x, x) }"


def kernel(op: str, since: int = 1, until: int | None = None, **fields: Any) -> Kernel:
    """A kernel whose result names it: 100 · its marker."""
    mark, provider, domain = fields.pop("mark", 1.0), fields.pop("provider", "first"), fields.pop("domain", "")
    return Kernel(provider, op, domain, since, until, lambda node: lambda x, *_: np.full_like(x, mark), **fields)


class Offer:
    """A provider on the host with a few kernels."""

    def __init__(self, name: str, *table: Kernel, priority: int = 500, ok: bool = True, reason: str = "made up") -> None:
        self.name, self.table, self.priority, self.availability = name, table, priority, Availability(ok, reason)
        self.options: list[ProviderOptions] = []

    @hookimpl
    def miniort_providers(self) -> list[ProviderInfo]:
        return [ProviderInfo(self.name, self.priority, self._check, self._open)]

    def _check(self) -> Availability:
        return self.availability

    def _open(self, options: ProviderOptions) -> Any:
        self.options.append(options)
        return HostProvider(KernelTable(self.name, self.table))


class Kernels:
    """A plugin that adds kernels to a provider of another."""

    def __init__(self, provider: str, *table: Kernel) -> None:
        self._provider, self._table = provider, table

    @hookimpl
    def miniort_kernels(self, provider: str) -> list[Kernel]:
        return list(self._table) if provider == self._provider else []


class Select:
    def __init__(self, choose: Callable[[NodeView, Sequence[Kernel]], Any]) -> None:
        self._choose = choose

    @hookimpl
    def miniort_select_kernel(self, node: NodeView, candidates: list[Kernel]) -> Any:
        return self._choose(node, candidates)


def node(session: InferenceSession) -> tuple[str | None, list[tuple[str, str]]]:
    (only,) = session.explain().nodes
    return only.provider, [(refusal.provider, refusal.reason) for refusal in only.refusals]


def test_the_first_in_the_users_order(build: Build) -> None:
    providers = (Offer("first", kernel("Add", mark=100.0)), Offer("second", kernel("Add", mark=200.0), priority=400))
    for order, mark in ((["first", "second"], 100), (["second", "first", "cpu"], 200), (["cpu", "first"], 2)):
        session = build(ADD, add=providers, providers=order)
        assert node(session) == (order[0], [])
        assert session.run(None, {"x": X})[0][0] == mark
    assert node(build(ADD, add=providers)) == ("first", [])
    assert node(build(ADD, add=providers, providers="second")) == ("second", [])


def test_one_of_negative_priority_has_to_be_named(build: Build) -> None:
    shy = Offer("shy", kernel("Add", mark=300.0), priority=-1)
    assert [each.name for each in build(ADD, add=(shy,)).providers] == ["cpu"]
    assert node(build(ADD, add=(shy,), providers=["shy", "cpu"])) == ("shy", [])


@pytest.mark.parametrize(
    ("refusing", "reason"),
    [
        (kernel("Mul"), "it has no kernel for this op"),
        (kernel("Add", domain="com.microsoft"), "it has no kernel for this op"),
        (kernel("Add", 1, 13), "its kernel is for versions 1-13, the node is of version 14"),
        (kernel("Add", 15), r"its kernel is for versions 15\+, the node is of version 14"),
        (kernel("Add", types={"T": frozenset([I64])}), r"its kernel takes tensor\(int64\) for input 0, the node has tensor\(float\)"),
        (kernel("Add", types={1: frozenset([I64])}), r"its kernel takes tensor\(int64\) for input 1, the node has tensor\(float\)"),
        (kernel("Add", refuse=lambda view: f"not on {view.dtype(0)}"), "not on float32"),
    ],
)
def test_who_was_asked_before_says_why_it_refused(build: Build, refusing: Kernel, reason: str) -> None:
    import re

    provider, refusals = node(build(ADD, add=(Offer("first", refusing),)))
    assert provider == "cpu"
    ((name, given),) = refusals
    assert name == "first"
    assert re.fullmatch(reason, given), given


def test_a_kernel_that_takes_it_and_one_that_refuses_may_share_a_table(build: Build) -> None:
    small = kernel("Add", mark=1.0, refuse=lambda view: None if view.inputs[0].shape == (2,) else "only pairs")  # type: ignore[union-attr]
    provider = Offer("first", small, kernel("Add", mark=9.0, refuse=lambda view: None))
    assert build(ADD, add=(provider,)).run(None, {"x": X})[0][0] == 1
    text = "g (float[3] x) => (float[3] y) { y = Add(x, x) }"
    assert build(text, add=(provider,)).run(None, {"x": np.ones(3, np.float32)})[0][0] == 9


def test_the_version_is_that_of_the_schema_and_not_of_the_opset(build: Build) -> None:
    """Opset 18 has the Add of opset 14."""
    assert node(build(ADD, add=(Offer("first", kernel("Add", 14, 14)),)))[0] == "first"


def test_an_op_that_changed_after_the_newest_tested_opset_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add is of version 14. A release tested up to 13 must not run it with an open-ended kernel; one that names 14 may."""
    monkeypatch.setattr(kernels, "NEWEST_TESTED", {"": 13})
    monkeypatch.setattr("miniort.runtime.assignment.NEWEST_TESTED", {"": 13})
    provider, refusals = node(build(ADD, add=(Offer("first", kernel("Add", 7)),)))
    assert provider is None
    assert dict(refusals)["first"] == "the op changed in opset 14, and this release of miniort knows opsets up to 13; upgrade miniort"
    assert node(build(ADD, add=(Offer("first", kernel("Add", 14, 14)),)))[0] == "first"


def test_kernels_of_a_plugin_for_a_provider_of_another(build: Build) -> None:
    text = "g (float[2] x) => (float[2] y) { y = test.Own(x) }"
    own = kernel("Own", domain="test", provider="cpu", mark=5.0)
    session = build(text, add=(Kernels("cpu", own),), strict=True)
    assert node(session) == ("cpu", [])
    assert session.run(None, {"x": X})[0].tolist() == [5, 5]
    with pytest.raises(ProviderError, match=r"'test_0' was asked for kernels of 'cpu' and gave one of 'first'"):
        build(text, add=(Kernels("cpu", kernel("Own", domain="test")),))


def test_an_own_op_for_one_session(build: Build) -> None:
    text = "g (float[2] x) => (float[2] y) { y = test.Own <by = 3.0>(x) }"
    own = Kernel("cpu", "Own", "test", 1, None, lambda node: lambda x: x * node.attribute("by"))
    assert build(text, kernels=[own], strict=True).run(None, {"x": X})[0].tolist() == [3, 6]
    any_provider = Kernel(ANY_PROVIDER, "Own", "test", 1, None, lambda node: lambda x: x * node.attribute("by"))
    assert build(text, kernels=[any_provider], strict=True).run(None, {"x": X})[0].tolist() == [3, 6]
    with pytest.raises(ProviderError, match="names the provider 'first'; the session has cpu"):
        build(text, kernels=[kernel("Own", domain="test")])
    with pytest.raises(KernelError, match=r"test\.Own"):
        build(text, strict=True)


@pytest.mark.parametrize("versions", [(1, 3), (5, None)])
def test_the_version_of_an_op_without_a_schema_is_the_opset_that_the_model_imports(build: Build, versions: tuple[int, int | None]) -> None:
    from onnx import parser

    proto = parser.parse_model('<ir_version: 10, opset_import: ["": 18, "test": 4]> g (float[2] x) => (float[2] y) { y = test.Own(x) }')
    session = InferenceSession(proto, kernels=[kernel("Own", *versions, domain="test", provider="cpu")])
    assert session.explain().nodes[0].version == 4
    assert session.explain().nodes[0].provider is None


def test_a_domain_that_the_model_does_not_import() -> None:
    from onnx import parser

    proto = parser.parse_model('<ir_version: 10, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { y = other.Own(x) }')
    with pytest.raises(KernelError, match=r"Own.*doesn't import the domain 'other'"):
        InferenceSession(proto)


def test_a_plugin_may_choose_the_kernel(build: Build) -> None:
    asked: list[tuple[str, list[str]]] = []

    def cheapest(view: NodeView, candidates: Sequence[Kernel]) -> Kernel | None:
        asked.append((view.op, [each.provider for each in candidates]))
        return candidates[-1] if view.op == "Add" else None

    providers = (Offer("first", kernel("Add")), Select(cheapest))
    session = build("g (float[2] x) => (float[2] y) { a = Add(x, x)  y = Exp(a) }", add=providers)
    assert asked == [("Add", ["first", "cpu"]), ("Exp", ["cpu"])]
    first, second = session.explain().nodes
    assert (first.provider, second.provider) == ("cpu", "cpu")
    assert "chosen by a plugin" in first.reason
    assert "chosen by a plugin" not in second.reason
    assert np.allclose(session.run(None, {"x": X})[0], np.exp(2 * X))


def test_of_two_kernels_that_look_alike_the_chosen_one_is_taken(build: Build) -> None:
    alike = [kernel("Add", mark=mark, refuse=lambda view: None) for mark in (1.0, 2.0)]
    session = build(ADD, add=(Offer("first", *alike), Select(lambda view, candidates: candidates[1])))
    assert session.run(None, {"x": X})[0][0] == 2


def test_a_plugin_that_chooses_what_was_not_offered(build: Build) -> None:
    for answer in (kernel("Mul"), "cpu", 7):
        with pytest.raises(KernelError, match="isn't among its candidates"):
            build(ADD, add=(Select(lambda view, candidates, answer=answer: answer),))  # type: ignore[misc]


def test_a_plugin_that_fails_to_choose_is_named(build: Build) -> None:
    def fail(view: NodeView, candidates: Sequence[Kernel]) -> Kernel:
        raise RuntimeError("undecided")

    with pytest.raises(PluginError, match=r"'test_0'.*miniort_select_kernel.*RuntimeError: undecided"):
        build(ADD, add=(Select(fail),))


MISSING = "g (float[2] x, int64[2] i) => (float[2] y) { a = Relu(x)  y = test.Magic(a, i) }"


def test_strict_refuses_when_the_session_is_built(build: Build) -> None:
    with pytest.raises(KernelError) as caught:
        build(MISSING, strict=True)
    message = str(caught.value)
    for part in ("strict", "'Magic_0'", "test.Magic", "version 1", "tensor(float), tensor(int64)", "cpu: it has no kernel for this op"):
        assert part in message
    assert "\n" not in message


def test_strict_looks_into_bodies(build: Build) -> None:
    text = """g (float[2] x, bool c) => (float[2] y) {
        y = If(c) <then_branch = t () => (float[2] p) { p = test.Magic(x) }, else_branch = e () => (float[2] q) { q = Relu(x) }> }"""
    with pytest.raises(KernelError, match=r"test\.Magic"):
        build(text, strict=True)
    session = build(text)
    assert session.run(None, {"x": X, "c": np.array(False)})[0].tolist() == [1, 2]
    with pytest.raises(KernelError, match=r"If_0/then_branch/Magic_0.*test\.Magic"):
        session.run(None, {"x": X, "c": np.array(True)})


def test_without_strict_the_error_comes_when_the_node_is_run(build: Build) -> None:
    session = build(MISSING)
    assert [each.provider for each in session.explain().nodes] == ["cpu", None]
    assert "nobody" in str(session.explain())
    feeds = {"x": X, "i": np.array([1, 2])}
    messages = set()
    for _ in range(2):
        with pytest.raises(KernelError, match=r"'Magic_0' \(test\.Magic, version 1.*cpu: it has no kernel") as caught:
            session.run(None, feeds)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_a_run_that_failed_leaves_nothing_behind(build: Build) -> None:
    """An exception that is kept and raised again would keep the frames, and the values in them, of every run."""
    import gc
    import weakref

    class Kept(np.ndarray):  # type: ignore[type-arg]
        pass

    session = build(MISSING)
    array = np.ones(2, np.float32).view(Kept)
    alive = weakref.ref(array)
    with contextlib.suppress(KernelError):
        session.run(None, {"x": array, "i": np.array([1, 2])})
    del array
    gc.collect()
    assert alive() is None


def test_unknown_and_unavailable_providers(build: Build) -> None:
    broken = Offer("first", ok=False, reason="no driver: install one")
    with pytest.raises(ProviderError, match="provider 'first' can't be used here: no driver: install one"):
        build(ADD, add=(broken,), providers=["first", "cpu"])
    session = build(ADD, add=(broken,))
    assert session.get_providers() == ["cpu"], "what is there was asked for"
    with pytest.raises(ProviderError, match=r"no provider is named 'cqu'.*cpu.*did you mean 'cpu'"):
        build(ADD, providers=["cqu"])
    with pytest.raises(ProviderError, match="no provider is named 'cuda'"):
        build(ADD, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])


def test_a_check_that_raises_makes_a_provider_unavailable(build: Build) -> None:
    def check() -> Availability:
        raise OSError("libnothing.so")

    broken = Offer("first")
    broken._check = check  # type: ignore[method-assign]
    assert build(ADD, add=(broken,)).get_providers() == ["cpu"]
    with pytest.raises(ProviderError, match=r"can't be used here: its check failed: OSError: libnothing\.so"):
        build(ADD, add=(broken,), providers=["first"])


def test_a_provider_that_fails_to_open_is_named(build: Build) -> None:
    def fail(options: ProviderOptions) -> Any:
        raise OSError("out of memory")

    broken = Offer("first")
    broken._open = fail  # type: ignore[method-assign]
    with pytest.raises(ProviderError, match="'first' can't be opened: OSError: out of memory"):
        build(ADD, add=(broken,), providers=["first"])


def test_no_provider_at_all() -> None:
    from onnx import parser

    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {ADD}')
    with pytest.raises(ProviderError, match="none is installed: pip install miniort-cpu"):
        InferenceSession(proto, plugins=create_plugin_manager([]))
    with pytest.raises(ProviderError, match=r"no provider can be used here.*'typo'"):
        InferenceSession(proto, plugins=create_plugin_manager([], allow=["typo"]))
    plugins = PluginManager()
    plugins.register(Offer("first", ok=False, reason="no driver"))
    with pytest.raises(ProviderError, match="first: no driver"):
        InferenceSession(proto, plugins=plugins)


def test_the_spelling_of_onnxruntime(build: Build) -> None:
    for providers in ("CPUExecutionProvider", ["CPUExecutionProvider"], ["cpu"], [("CPUExecutionProvider", {})], "cpu", "auto", None):
        assert build(ADD, providers=providers).get_providers() == ["cpu"]
    with pytest.raises(ProviderError, match="asked for twice"):
        build(ADD, providers=["cpu", "CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("providers", "options", "message"),
    [
        (["cpu"], [{}, {}], r"as many as providers \(1\), found 2"),
        (["cpu"], [], r"as many as providers \(1\), found 0"),
        (None, [{}], "need providers that are named"),
        ([], None, "providers is empty"),
        (["cpu"], [{"device_id": 0}], "'cpu' has no option 'device_id'; its options: none"),
        ([("cpu", {"a": 1})], None, "'cpu' has no option 'a'"),
        ([7], None, "by name or as"),
        ([("cpu",)], None, "by name or as"),
        ([("cpu", "fast")], None, "by name or as"),
        (["cpu"], ["fast"], "by name or as"),
    ],
)
def test_provider_options_that_make_no_sense(build: Build, providers: Any, options: Any, message: str) -> None:
    with pytest.raises(ProviderError, match=message):
        build(ADD, providers=providers, provider_options=options)


def test_provider_options_arrive_as_text_and_the_later_wins(build: Build) -> None:
    provider = Offer("first", kernel("Add"))
    build(ADD, add=(provider,), providers=[("first", {"a": 1, "b": "x"}), "cpu"], provider_options=[{"a": 2}, {}])
    assert dict(provider.options[0].options) == {"a": "2", "b": "x"}
    assert provider.options[0].threads is None


def test_a_kernel_that_fails_to_compile_is_named(build: Build) -> None:
    def fail(node: Any) -> Any:
        raise TypeError("bad attribute")

    broken = Kernel("first", "Add", "", 1, None, fail)
    with pytest.raises(KernelError, match=r"'Add_0' \(Add\): its kernel on first can't be compiled: TypeError: bad attribute"):
        build(ADD, add=(Offer("first", broken),))


def test_a_provider_whose_own_table_is_in_conflict(build: Build) -> None:
    with pytest.raises(KernelError, match=r"'first' has two kernels for Add: versions 1\+ and 7-9 overlap"):
        build(ADD, add=(Offer("first", kernel("Add"), kernel("Add", 7, 9)),))


def test_model_errors_come_before_any_provider_is_opened(build: Build) -> None:
    from onnx import parser

    provider = Offer("first", kernel("Add"))
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["": 9999]> {ADD}')
    plugins = create_plugin_manager([])
    plugins.register(provider)
    with pytest.raises(ModelError):
        InferenceSession(proto, plugins=plugins)
    assert provider.options == []
