"""Observers: what watches a session run. Profiling, tracing and searching for a difference are observers; none is built into the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

ReadValue: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class NodeInfo:
    """A step of a plan, as observers see it.

    `path` is the way to a node in a sub-graph, `Loop_3/body/Add_1`; for one in the main graph it's its name. Copies between devices are
    steps as well: ops `Upload` and `Download` of the domain `miniort`. `reads` and `writes` name the values, "" for absent ones.
    """

    path: str
    op: str
    domain: str
    provider: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@runtime_checkable
class Observer(Protocol):
    """Watches every step of a run. Values are the arrays themselves, on whatever device they are: an observer must not write into them.

    `wants` names values that `on_value` is to be called for, whoever computes them, graph inputs and constants included. What's raised by
    an observer ends the run.
    """

    wants: Collection[str]

    def before_node(self, node: NodeInfo, inputs: Sequence[Any]) -> None:
        """Called before a step is run, with its inputs in order."""

    def after_node(self, node: NodeInfo, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Called after a step was run, with its inputs and outputs in order."""

    def on_value(self, name: str, value: Any) -> None:
        """Called once in a run for each wanted value, as soon as it's there (in a loop's body once in each trip)."""


class BaseObserver:
    """An observer that does nothing: override what you need."""

    wants: Collection[str] = ()

    def before_node(self, node: NodeInfo, inputs: Sequence[Any]) -> None:
        """Nothing."""

    def after_node(self, node: NodeInfo, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Nothing."""

    def on_value(self, name: str, value: Any) -> None:
        """Nothing."""


class ValueRecorder(BaseObserver):
    """Keeps the latest value of each wanted name in `values`."""

    def __init__(self, wants: Collection[str]) -> None:
        self.wants = tuple(wants)
        self.values: dict[str, Any] = {}

    def on_value(self, name: str, value: Any) -> None:
        """Keep it."""
        self.values[name] = value


class Profiler(BaseObserver):
    """Adds up the time of each step, in seconds, over all runs. For one thread at a time."""

    def __init__(self) -> None:
        self.seconds: dict[NodeInfo, float] = {}
        self.calls: dict[NodeInfo, int] = {}
        self._started: list[float] = []

    def before_node(self, node: NodeInfo, inputs: Sequence[Any]) -> None:
        """Start the clock; steps of sub-graphs lie inside of their node's."""
        self._started.append(time.perf_counter())

    def after_node(self, node: NodeInfo, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Stop it."""
        self.seconds[node] = self.seconds.get(node, 0.0) + time.perf_counter() - self._started.pop()
        self.calls[node] = self.calls.get(node, 0) + 1

    def by_op(self) -> dict[str, float]:
        """Seconds by op, the longest first."""
        totals: dict[str, float] = {}
        for node, seconds in self.seconds.items():
            totals[node.op] = totals.get(node.op, 0.0) + seconds
        return dict(sorted(totals.items(), key=lambda item: -item[1]))
