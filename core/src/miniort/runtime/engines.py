"""Runtimes that one model can be run through side by side: sessions of ours, onnxruntime, and ONNX's reference evaluator."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from miniort.errors import MiniortError, ProviderError, RunError
from miniort.model.weights import WeightStore
from miniort.plugins import PluginManager
from miniort.plugins.manager import describe_exception
from miniort.providers import HOST, Provider
from miniort.runtime.comparison import ComputedNode, Visit
from miniort.runtime.observers import BaseObserver, NodeInfo
from miniort.runtime.session import InferenceSession, SessionOptions

EXTERNAL = ("onnxruntime", "reference")
"""Runtimes that aren't ours, named as providers are."""

AS_GIVEN = "as given"
"""The graph of a model that no pass has changed."""

COPIES = frozenset({"Upload", "Download"})


class Engine(Protocol):
    """One way to run one model.

    placement: who runs how many of its nodes. graph: what graph it shows while it's traced; two with the same have the same values by name.
    """

    label: str
    placement: str
    graph: str

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """All outputs by name, on the host."""

    def trace(self, feeds: Mapping[str, Any], visit: Visit) -> None:
        """Run once, with a call of `visit` after every node, until it says True."""

    def close(self) -> None:
        """Give memory back."""


class _Stopped(MiniortError):
    """A visitor has seen enough. One of ours, so that no node is blamed for it."""


class _Visitor(BaseObserver):
    """Shows each node of a session's run, copies left out, and ends the run when the visitor has seen enough."""

    def __init__(self, providers: Mapping[str, Provider], visit: Visit) -> None:
        self._providers = providers
        self._visit = visit

    def after_node(self, node: NodeInfo, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Show it."""
        if node.domain == "miniort" and node.op in COPIES:
            return
        provider = self._providers.get(node.provider)

        def fetch(values: Sequence[Any]) -> list[Any]:
            return [_on_host(value, provider) for value in values]

        if self._visit(ComputedNode(node, lambda: fetch(inputs), lambda: fetch(outputs))):
            raise _Stopped


def _on_host(value: Any, provider: Provider | None) -> Any:
    """A value as host arrays; None for what is no array, such as a cache."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, list):
        return [_on_host(item, provider) for item in value]
    if value is None or not hasattr(value, "dtype"):
        return None
    return np.asarray(value) if provider is None or provider.device == HOST else provider.download(value)


class SessionEngine:
    """A session of ours. `provider` is asked first for each node, then those of `others`."""

    def __init__(
        self, path: Path, provider: str, level: str, others: Sequence[str], *, weights: WeightStore, plugins: PluginManager
    ) -> None:
        wanted = [provider, *(name for name in others if name != provider)]
        self.session = InferenceSession(path, SessionOptions(level), wanted, weights=weights, plugins=plugins)
        self.label = f"{provider} ({level})"
        self.graph = AS_GIVEN if level == "none" else level
        counts = Counter(node.provider or "nobody" for node in self.session.explain().nodes)
        self.placement = ", ".join(f"{name} {count}" for name, count in counts.most_common())

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """All outputs by name."""
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(None, feeds), strict=True))

    def trace(self, feeds: Mapping[str, Any], visit: Visit) -> None:
        """Run once, observed."""
        providers = {each.name: each.provider for each in self.session.providers}
        with suppress(_Stopped):
            self.session.observe(_Visitor(providers, visit)).run(None, feeds)

    def close(self) -> None:
        """Give the providers' memory back."""
        self.session.close()


class OnnxRuntimeEngine:
    """Onnxruntime on the CPU. Its optimiser's level is named as ours."""

    placement = "onnxruntime"
    graph = AS_GIVEN

    def __init__(self, path: Path, level: str) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ProviderError("onnxruntime isn't installed; pip install onnxruntime") from error
        self._module = onnxruntime
        self._path = path
        self._level = level
        self.label = f"onnxruntime ({level})"
        self._session = self._open(str(path))

    def _open(self, model: str | bytes) -> Any:
        options = self._module.SessionOptions()
        options.log_severity_level = 3
        levels = self._module.GraphOptimizationLevel
        options.graph_optimization_level = getattr(
            levels,
            {"none": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "extended": "ORT_ENABLE_EXTENDED", "all": "ORT_ENABLE_ALL"}[
                self._level
            ],
        )
        try:
            return self._module.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no common class
            raise ProviderError(f"onnxruntime can't open {self._path}: {describe_exception(error)}") from error

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """All outputs by name."""
        return self._run(self._session, feeds)

    def _run(self, session: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
        names = [output.name for output in session.get_outputs()]
        try:
            return dict(zip(names, session.run(None, dict(feeds)), strict=True))
        except Exception as error:
            raise RunError(f"onnxruntime failed: {describe_exception(error)}") from error

    def trace(self, feeds: Mapping[str, Any], visit: Visit) -> None:
        """Run a copy of the model that gives every value as an output; all of them are held at once."""
        import onnx

        model = onnx.load(self._path)
        given = {output.name for output in model.graph.output}
        for node in model.graph.node:
            model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name and name not in given)
        session = self._open(model.SerializeToString())
        _show(model.graph, {**feeds, **self._run(session, feeds)}, "onnxruntime", visit)

    def close(self) -> None:
        """Nothing of ours."""


class ReferenceEngine:
    """ONNX's reference evaluator: slow, and independent of everything else."""

    label = "reference"
    placement = "onnx.reference"
    graph = AS_GIVEN

    def __init__(self, path: Path) -> None:
        import onnx
        from onnx.reference import ReferenceEvaluator

        try:
            self._model = onnx.load(path)
            self._evaluator = ReferenceEvaluator(self._model)
        except Exception as error:  # ops that it lacks are errors of several classes
            raise ProviderError(f"the reference evaluator can't open {path}: {describe_exception(error)}") from error

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """All outputs by name."""
        values = self._values(feeds, intermediate=False)
        names = [output.name for output in self._model.graph.output]
        return dict(zip(names, (np.asarray(value) if not isinstance(value, list) else value for value in values), strict=True))

    def _values(self, feeds: Mapping[str, Any], intermediate: bool) -> Any:
        try:
            with np.errstate(all="ignore"):
                return self._evaluator.run(None, dict(feeds), intermediate=intermediate)
        except Exception as error:
            raise RunError(f"the reference evaluator failed: {describe_exception(error)}") from error

    def trace(self, feeds: Mapping[str, Any], visit: Visit) -> None:
        """Run once; all values are held at once."""
        _show(self._model.graph, self._values(feeds, intermediate=True), "reference", visit)

    def close(self) -> None:
        """Nothing of ours."""


def _show(graph: Any, values: Mapping[str, Any], provider: str, visit: Visit) -> None:
    """Visit the nodes of an ONNX graph, in its order, with values that are known already."""

    def read(names: Sequence[str]) -> list[Any]:
        found = [values.get(name) if name else None for name in names]
        return [value if value is None or isinstance(value, list) else np.asarray(value) for value in found]

    for node in graph.node:
        info = NodeInfo(
            node.name or f"{node.op_type}({', '.join(node.output)})",
            node.op_type,
            node.domain,
            provider,
            *map(tuple, (node.input, node.output)),
        )
        if visit(ComputedNode(info, lambda names=info.reads: read(names), lambda names=info.writes: read(names))):  # type: ignore[misc]
            return


def open_engines(
    path: Path, providers: Sequence[str], levels: Sequence[str], *, others: Sequence[str], plugins: PluginManager
) -> list[Engine]:
    """An engine for each provider at each level, over one copy of the weights; the reference evaluator has no levels.

    others: the providers that take what the first doesn't. MiniortError if one can't be used.
    """
    weights = WeightStore()
    return list(_engines(path, providers, levels, others, weights, plugins))


def _engines(
    path: Path, providers: Sequence[str], levels: Sequence[str], others: Sequence[str], weights: WeightStore, plugins: PluginManager
) -> Iterator[Engine]:
    for provider in providers:
        if provider == "reference":
            yield ReferenceEngine(path)
            continue
        for level in levels:
            if provider == "onnxruntime":
                yield OnnxRuntimeEngine(path, level)
            else:
                yield SessionEngine(path, provider, level, others, weights=weights, plugins=plugins)


def run_times(engines: Sequence[Engine], feeds: Mapping[str, Any], warm_up: int, repeats: int) -> list[float]:
    """The median seconds of a run of each engine. They take turns, so that what else the machine does hits all of them alike."""
    seconds: list[list[float]] = [[] for _ in engines]
    for turn in range(warm_up + repeats):
        for engine, found in zip(engines, seconds, strict=True):
            start = time.perf_counter()
            engine.run(feeds)
            if turn >= warm_up:
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in seconds]
