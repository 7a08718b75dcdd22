"""What a graph pass is, and how a list of them is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from miniort.errors import MiniortError, ModelError
from miniort.types import Array, DType

if TYPE_CHECKING:  # a plugin says what passes it has before anything of a graph is needed
    import onnx_ir as ir

    from miniort.model.weights import WeightStore


class Level(IntEnum):
    """How far a graph is changed. A pass runs where the session's level is at least its own.

    REQUIRED passes always run: without them some graphs can't run at all. BASIC keeps every op that the model has; EXTENDED may
    replace many by one, of the ONNX standard, so that the result is a model for any runtime; ALL may also make ops that only providers of
    miniort have.
    """

    REQUIRED = 0
    BASIC = 1
    EXTENDED = 2
    ALL = 3

    @classmethod
    def from_name(cls, name: str) -> Level:
        """`"none"`, `"basic"`, `"extended"` or `"all"`, as onnxruntime calls them. KeyError for another."""
        return {"none": cls.REQUIRED, "basic": cls.BASIC, "extended": cls.EXTENDED, "all": cls.ALL}[name.lower()]


@dataclass(frozen=True)
class Change:
    """One thing that a pass did: to which node, and why it was allowed."""

    graph_pass: str
    node: str
    reason: str


Supports = Callable[[str, str, int, Sequence[DType | None]], bool]
Evaluate: TypeAlias = "Callable[[ir.Node, Sequence[Array | None]], Sequence[Array] | None]"
ProviderOf: TypeAlias = "Callable[[ir.Node], str | None]"


@dataclass
class PassContext:
    """What passes may ask, and where they say what they did.

    `supports(op, domain, version, input dtypes)`: whether a provider of the session has a kernel; ask before making a node that the model
    didn't have. `evaluate(node, inputs)`: the outputs of a node on host arrays, None where they can't be had before a run.
    `opset_bound`: the newest opset of the default domain that the whole model can be written in, None while nobody has looked; a pass makes
    no node of a newer one.
    `provider_of(node)`: the name of the provider that would get a node, None for nobody. Where a fusion would move work from one provider
    to another, the graph is better left as it is.
    """

    supports: Supports
    evaluate: Evaluate
    weights: WeightStore
    opsets: Mapping[str, int]
    opset_bound: int | None = None
    provider_of: ProviderOf = lambda node: None
    changes: list[Change] = field(default_factory=list)
    _running: str = ""

    def changed(self, node: ir.Node | str, reason: str) -> None:
        """Note a change. Every pass calls this for whatever it changes."""
        name = node if isinstance(node, str) else node.name or node.op_type
        self.changes.append(Change(self._running, name, reason))


@dataclass(frozen=True)
class GraphPass:
    """A change of a graph that keeps what it computes. `run(model, context)` changes the model in place.

    Graph inputs and outputs keep their names and types. A value that's a graph output, or has another consumer, stays.
    Among plugins' passes of one level those with higher `priority` run first.
    """

    name: str
    level: Level
    run: Callable[[ir.Model, PassContext], None]
    priority: int = 0


def run_passes(model: ir.Model, passes: Sequence[GraphPass], level: Level, context: PassContext) -> Sequence[Change]:
    """Run those passes whose level isn't above `level`, in order. ModelError that names the pass that failed or broke the signature."""
    signature = _signature(model)
    for graph_pass in passes:
        if graph_pass.level > level:
            continue
        context._running = graph_pass.name
        try:
            graph_pass.run(model, context)
        except MiniortError:
            raise
        except Exception as error:
            # A pass may come from a plugin and raise anything; the user has to learn which one it was.
            raise ModelError(
                f"graph pass {graph_pass.name!r} failed: {type(error).__name__}: {error}; "
                "a lower graph_optimization_level, or MINIORT_DISABLE_PLUGINS, goes without it"
            ) from error
        before, signature = signature, _signature(model)
        if len(before) != len(signature) or not all(map(_same, before, signature)):
            raise ModelError(f"graph pass {graph_pass.name!r} changed the graph's inputs or outputs, which no pass may do")
    return tuple(context.changes)


def _signature(model: ir.Model) -> tuple[tuple[str, str | None, object], ...]:
    inputs, outputs = model.graph.inputs, model.graph.outputs
    return (*(("input", value.name, value.type) for value in inputs), *(("output", value.name, value.type) for value in outputs))


def _same(before: tuple[str, str | None, object], after: tuple[str, str | None, object]) -> bool:
    """Whether an input or output kept its name and type. One that had no type may get one."""
    return before[:2] == after[:2] and before[2] in (None, after[2])
