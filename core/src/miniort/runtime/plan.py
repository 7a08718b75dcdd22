"""The compiled plan: a flat list of steps over one list of values, and the two loops that run it.

A value has a *slot* in the list. Slot 0 is always None, for absent inputs; slot 1 holds the list itself while the plan runs, for nodes
whose sub-graphs read values of this graph. Each device that a value is needed on gives it one more slot, filled by a copy step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from miniort.errors import KernelError, MiniortError, RunError
from miniort.kernels import ANY_INPUT, UFUNC_BUFFER, Kernel, NodeContext, NodeView, Run, qualified_op
from miniort.model.constants import constant_array, initial_array, is_constant, value_info
from miniort.model.loading import attribute_graphs
from miniort.model.weights import WeightStore
from miniort.providers import HOST, UploadsTogether
from miniort.runtime.assignment import OpenProvider, Placement
from miniort.runtime.observers import NodeInfo, Observer
from miniort.types import Array, ValueInfo, type_string

ABSENT = 0
SCOPE = 1


class Step(NamedTuple):
    """One kernel call: `run(*values of inputs)` fills `outputs`, then the values of `dead` are dropped."""

    run: Run
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    info: NodeInfo


@dataclass(frozen=True)
class CopyInfo:
    """A value that has to be carried from one device to another in every run."""

    value: str
    source: str
    target: str
    path: str


@dataclass(frozen=True)
class Plan:
    """A graph that is ready to run. Nothing in it changes when it's run, so it may run in several threads at once.

    `names` are the slots of the values that this graph computes or is given, `known_names` also has those of its sub-graphs. `views`: for a
    slot whose value may share its memory with another's, that one's slot. `written_over`: for a slot whose value is written over one that
    dies, if their sizes are the same, the slots that come into question.
    """

    steps: tuple[Step, ...]
    initial: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    copied_outputs: frozenset[int]
    scoped: bool
    copies: tuple[CopyInfo, ...]
    names: Mapping[str, int]
    known_names: frozenset[str]
    observers: tuple[Observer, ...] = ()
    views: Mapping[int, int] = field(default_factory=dict)
    written_over: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def leaving_on_device(self, output: int) -> Plan | None:
        """The same plan, but one output stays on the device that makes it. None if the host makes it or reads it in the run."""
        slot = self.outputs[output]
        download = next((step for step in self.steps if step.outputs == (slot,) and _is_download(step.info)), None)
        if download is None or self.outputs.count(slot) > 1 or any(slot in step.inputs for step in self.steps):
            return None
        (source,) = download.inputs
        if self.scoped or any(source in taken for taken in self.written_over.values()):
            return None
        steps = [
            step._replace(dead=tuple(each for each in step.dead if each != source)) if source in step.dead else step
            for step in self.steps
            if step is not download
        ]
        outputs = [source if each == slot else each for each in self.outputs]
        name = download.info.reads[0]
        copies = tuple(copy for copy in self.copies if (copy.value, copy.target) != (name, HOST))
        return replace(self, steps=tuple(steps), outputs=tuple(outputs), copies=copies)

    def run(self, inputs: Sequence[Any], captured: Sequence[tuple[int, Any]] = ()) -> list[Any]:
        """Run once: values of the inputs in order -> values of the outputs in order."""
        values = list(self.initial)
        for slot, value in zip(self.inputs, inputs, strict=True):
            if value is not None:
                values[slot] = value
        for slot, value in captured:
            values[slot] = value
        if self.scoped:
            values[SCOPE] = values
        try:
            with np.errstate(all="ignore"):  # 1/0 is a result in ONNX, inf or NaN; once here is cheaper than in every kernel
                np.setbufsize(UFUNC_BUFFER)  # leaving errstate takes it back
                if self.observers:
                    _run_observed(self, values)
                else:
                    run_steps(self.steps, values)
            return [values[slot] for slot in self.outputs]
        finally:
            values[SCOPE] = None  # a list that holds itself would live until the garbage collector comes


def _is_download(info: NodeInfo) -> bool:
    return (info.domain, info.op) == ("miniort", "Download")


def run_steps(steps: Sequence[Step], values: list[Any]) -> None:
    """The plain loop: run steps one after the other over a list of values. RunError from a kernel's own exception, with its node."""
    step = None
    try:
        for step in steps:
            run, inputs, outputs, dead, _ = step
            result = run(*[values[slot] for slot in inputs])
            if type(result) is tuple:
                for slot, value in zip(outputs, result, strict=False):
                    values[slot] = value
                value = None  # or it would live until the next kernel with several outputs
            else:
                values[outputs[0]] = result
            for slot in dead:
                values[slot] = None
    except MiniortError:
        raise
    except Exception as error:
        # A kernel may raise anything; the user has to learn which node it was, and with what.
        assert step is not None
        raise failure(step, values, error) from error


def _run_observed(plan: Plan, values: list[Any]) -> None:
    wanted = [(observer, {plan.names[name]: name for name in observer.wants if name in plan.names}) for observer in plan.observers]
    for observer, slots in wanted:
        for slot, name in slots.items():
            if values[slot] is not None:
                observer.on_value(name, values[slot])
    for step in plan.steps:
        inputs = [values[slot] for slot in step.inputs if slot != SCOPE]
        for observer in plan.observers:
            observer.before_node(step.info, inputs)
        try:
            result = step.run(*[values[slot] for slot in step.inputs])
        except MiniortError:
            raise
        except Exception as error:
            raise failure(step, values, error) from error
        results = result if type(result) is tuple else (result,)
        for slot, value in zip(step.outputs, results, strict=False):
            values[slot] = value
        outputs = [values[slot] for slot in step.outputs]
        for observer in plan.observers:
            observer.after_node(step.info, inputs, outputs)
        for observer, slots in wanted:
            for slot in step.outputs:
                if slot in slots:
                    observer.on_value(slots[slot], values[slot])
        for slot in step.dead:
            values[slot] = None
        del inputs, outputs, result, results, value  # or they'd live through the next step


def failure(step: Step, values: Sequence[Any], error: Exception) -> RunError:
    """The error of a kernel that failed, with its node and what it was given."""
    given = ", ".join(describe_value(values[slot]) for slot in step.inputs if slot != SCOPE)
    where = f"node {step.info.path!r} ({qualified_op(step.info.domain, step.info.op)}) on {step.info.provider}"
    return RunError(f"{where} failed on ({given}): {type(error).__name__}: {error}")


def describe_value(value: Any) -> str:
    """`tensor(float)[2, 3]`, without touching the contents."""
    if value is None:
        return "nothing"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type_string(value.dtype)}{list(value.shape)}"
    return type(value).__name__


@dataclass(frozen=True)
class CompiledSubgraph:
    """A sub-graph with its plan; `captures` are pairs (slot of the outer plan, slot of this plan)."""

    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    plan: Plan
    captures: tuple[tuple[int, int], ...]

    def __call__(self, scope: Any, *inputs: Any) -> list[Any]:
        """Run it once, with the values of the outer graph in `scope`."""
        return self.plan.run(inputs, [(inner, scope[outer]) for outer, inner in self.captures])


@dataclass
class Compiler:
    """Compiles a graph whose nodes have been placed to a plan."""

    placements: Mapping[ir.Node, Placement]
    providers: Sequence[OpenProvider]
    weights: WeightStore
    observers: tuple[Observer, ...] = ()

    def compile(self, graph: ir.Graph) -> Plan:
        """The plan of the main graph; its inputs come and its outputs leave as host arrays."""
        return _GraphCompiler(self, graph, outer=None, path="").compile(list(graph.inputs))

    def provider_of(self, device: str) -> OpenProvider:
        """The provider that copies from and to a device."""
        return next(each for each in self.providers if each.provider.device == device)


@dataclass
class _GraphCompiler:
    """Compiles one graph: the state of that is here, and none of it in the plan."""

    compiler: Compiler
    graph: ir.Graph
    outer: _GraphCompiler | None
    path: str
    initial: list[Any] = field(default_factory=lambda: [None, None])
    slots: dict[tuple[ir.Value, str], int] = field(default_factory=dict)  # (value, device) -> slot
    home: dict[ir.Value, str] = field(default_factory=dict)  # the device that a value is made on
    steps: list[tuple[Run, list[int], list[int], NodeInfo]] = field(default_factory=list)
    fixed: set[int] = field(default_factory=lambda: {ABSENT, SCOPE})
    captures: list[tuple[int, int]] = field(default_factory=list)
    body_names: set[str] = field(default_factory=set)
    read_by_bodies: dict[int, tuple[int, ...]] = field(default_factory=dict)  # step -> slots that its sub-graphs capture
    borrowed: set[int] = field(default_factory=set)  # slots whose array may belong to a feed or a weight
    views: dict[int, int] = field(default_factory=dict)  # slot -> the slot that it may be a view of
    written_over: dict[int, tuple[int, ...]] = field(default_factory=dict)  # slot -> slots whose memory it may take over
    copies: list[CopyInfo] = field(default_factory=list)
    copy_of: dict[int, int] = field(default_factory=dict)  # step that copies -> its entry in copies
    scoped: bool = False

    def compile(self, inputs: Sequence[ir.Value]) -> Plan:
        input_slots = []
        for value in inputs:
            default = None if value.const_value is None else initial_array(value, self.compiler.weights)
            slot = self.define(value, HOST, default)
            self.fixed.add(slot)
            self.borrowed.add(slot)
            input_slots.append(slot)
        for node in self.graph:
            self.add_node(node)
        output_slots = tuple(self.locate(value, HOST, f"{self.path}output") for value in self.graph.outputs)
        names = self.names()
        if self.outer is None:
            self.join_uploads()
        return Plan(
            steps=self.with_deaths(output_slots),
            initial=tuple(self.initial),
            inputs=tuple(input_slots),
            outputs=output_slots,
            copied_outputs=self.copied_outputs(output_slots),
            scoped=self.scoped,
            copies=tuple(self.copies),
            names=names,
            known_names=frozenset(names) | self.body_names,
            observers=self.compiler.observers,
            views=dict(self.views),
            written_over=dict(self.written_over),
        )

    def names(self) -> dict[str, int]:
        """The slot of each named value that this graph computes or is given, where it's made; for constants, any."""
        own: dict[str, int] = {}
        for (value, device), slot in self.slots.items():
            if value.name and (self.home.get(value) == device or (value not in self.home and value.graph is self.graph)):
                own.setdefault(value.name, slot)
        return own

    def copied_outputs(self, output_slots: Sequence[int]) -> frozenset[int]:
        """Which outputs may share memory with a feed, a weight, or an output before them, so that a caller needs a copy."""
        copied, seen = set(), set(self.borrowed)
        for index, slot in enumerate(output_slots):
            while slot in self.views and slot not in seen:
                slot = self.views[slot]
            if slot in seen:
                copied.add(index)
            seen.add(slot)
        return frozenset(copied)

    def new_slot(self, value: Any = None) -> int:
        self.initial.append(value)
        return len(self.initial) - 1

    def define(self, value: ir.Value, device: str, initial: Any = None) -> int:
        slot = self.new_slot(initial)
        self.slots[value, device] = slot
        self.home[value] = device
        return slot

    def knows(self, value: ir.Value) -> bool:
        return value in self.home or (self.outer is not None and self.outer.knows(value))

    def locate(self, value: ir.Value | None, device: str | None, reader: str) -> int:
        """The slot that holds a value on a device (None: wherever it is). Adds a copy step, or a captured value, if need be."""
        if value is None:
            return ABSENT
        if value not in self.home:
            constant = constant_array(value, self.compiler.weights)
            if constant is not None and (self.outer is None or value.graph is self.graph):
                return self.locate_constant(value, constant, device or HOST)
            return self.capture(value, device, reader)
        home = self.home[value]
        if device is None or (value, device) in self.slots:
            return self.slots[value, device or home]
        return self.copy(value, home, device, reader)

    def locate_constant(self, value: ir.Value, array: Array, device: str) -> int:
        if (value, device) not in self.slots:
            resident: Any = array
            if device != HOST:
                provider = self.compiler.provider_of(device).provider
                resident = self.compiler.weights.derive(array, f"device:{device}", provider.upload)
            slot = self.new_slot(resident)
            self.slots[value, device] = slot
            self.fixed.add(slot)
            self.borrowed.add(slot)
        return self.slots[value, device]

    def home_of(self, value: ir.Value) -> str:
        """The device that a value of this graph or of one around it is made on; constants come from the host."""
        if value in self.home or self.outer is None:
            return self.home.get(value, HOST)
        return self.outer.home_of(value)

    def capture(self, value: ir.Value, device: str | None, reader: str) -> int:
        """A value of an outer graph. If it has to be copied, then there, before the node is run: a loop would do it in every trip."""
        if self.outer is None or not (is_constant(value) or self.outer.knows(value)):
            raise KernelError(f"nothing computes {value.name!r} before it is used")
        device = device or self.home_of(value)
        if (value, device) not in self.slots:
            outer_slot = self.outer.locate(value, device, reader)
            slot = self.slots[value, device] = self.new_slot()
            self.fixed.add(slot)
            self.borrowed.add(slot)
            self.captures.append((outer_slot, slot))
        return self.slots[value, device]

    def copy(self, value: ir.Value, home: str, device: str, reader: str) -> int:
        """Steps that carry a value to another device, by way of the host; each is made once and serves all readers."""
        if home != HOST and device != HOST and (value, HOST) not in self.slots:
            self.copy(value, home, HOST, reader)
        source_device = home if device == HOST else HOST
        source = self.slots[value, source_device]
        provider = self.compiler.provider_of(home if device == HOST else device)
        run = provider.provider.download if device == HOST else provider.provider.upload
        slot = self.new_slot()
        self.slots[value, device] = slot
        name = value.name or ""
        op = "Download" if device == HOST else "Upload"
        info = NodeInfo(f"{self.path}{op}({name})", op, "miniort", provider.name, (name,), (name,))
        self.copy_of[len(self.steps)] = len(self.copies)
        self.steps.append((run, [source], [slot], info))
        self.copies.append(CopyInfo(name, source_device, device, reader))
        return slot

    def join_uploads(self) -> None:
        """Make one step of all uploads of values that are known before anything runs on a device: inputs, and what the host makes of them.

        For that, steps on the host that wait for no device come first. Providers that don't upload together keep their steps.
        """
        late: set[int] = set()  # slots that are filled when a device has done something
        first: list[int] = []
        joined: dict[str, list[int]] = {}
        rest: list[int] = []
        for index, (_, inputs, outputs, info) in enumerate(self.steps):
            provider = next((each.provider for each in self.compiler.providers if each.name == info.provider), None)
            is_early = provider is not None and late.isdisjoint((*inputs, *self.read_by_bodies.get(index, ())))
            if is_early and index in self.copy_of and info.op == "Upload" and isinstance(provider, UploadsTogether):
                joined.setdefault(info.provider, []).append(index)
                late.update(outputs)
            elif is_early and index not in self.copy_of and provider is not None and provider.device == HOST:
                first.append(index)
            else:
                rest.append(index)
                late.update(outputs)
        if not joined:
            return
        order = [*first, *(indices[0] for indices in joined.values()), *rest]
        dropped: set[int] = set()
        for indices in joined.values():
            self.join_steps(indices)
            dropped.update(self.copy_of[index] for index in indices[1:])
        self.copies = [copy for number, copy in enumerate(self.copies) if number not in dropped]
        self.read_by_bodies = {new: self.read_by_bodies[old] for new, old in enumerate(order) if old in self.read_by_bodies}
        self.steps = [self.steps[index] for index in order]

    def join_steps(self, indices: Sequence[int]) -> None:
        """Make the first of some uploads do what all of them do, and its entry in the copies say so."""
        steps = [self.steps[index] for index in indices]
        info = steps[0][3]
        provider = next(each.provider for each in self.compiler.providers if each.name == info.provider)
        assert isinstance(provider, UploadsTogether)
        names = tuple(name for step in steps for name in step[3].reads)
        text = ", ".join(names)
        info = replace(info, path=f"{self.path}Upload({text})", reads=names, writes=names)
        sources = [slot for _, inputs, _, _ in steps for slot in inputs]
        targets = [slot for _, _, outputs, _ in steps for slot in outputs]
        self.steps[indices[0]] = (provider.upload_together, sources, targets, info)
        number = self.copy_of[indices[0]]
        self.copies[number] = replace(self.copies[number], value=text)

    def add_node(self, node: ir.Node) -> None:
        placement = self.compiler.placements[node]
        view, path = placement.view, f"{self.path}{node.name}"
        provider, kernel = placement.provider, placement.kernel
        if provider is None or kernel is None:
            message = str(missing_kernel(placement, path))

            def run_missing(*_: Any) -> Any:
                raise KernelError(message)  # a new one each time: it keeps the frames that it went through

            self.add_step(node, path, "no provider", run_missing, [self.locate(value, None, path) for value in node.inputs], HOST)
            return
        device = provider.provider.device
        subgraphs = {
            attribute.name: self.compile_body(body, f"{path}/{attribute.name}/")
            for attribute in node.attributes.values()
            for body in attribute_graphs(attribute)
        }
        inputs = [self.locate(value, input_device(kernel, index, device), path) for index, value in enumerate(node.inputs)]
        share = self.compiler.weights.derive
        context = NodeContext(
            **{name: getattr(view, name) for name in NodeView.__dataclass_fields__},
            provider=provider.provider,
            subgraphs=subgraphs,
            share=share,
            block_outputs=frozenset(index for index, value in enumerate(node.outputs) if self.is_read_in_blocks(value)),
            dying_inputs=frozenset(
                index for index in kernel.written_over if index < len(node.inputs) and self.dies_in(node.inputs[index], node)
            ),
        )
        try:
            run = kernel.compile(context)
        except MiniortError:
            raise
        except Exception as error:
            # A kernel may raise anything while it is compiled; the user has to learn for which node.
            raise KernelError(
                f"node {path!r} ({qualified_op(view.domain, view.op)}): its kernel on {provider.name} can't be compiled: "
                f"{type(error).__name__}: {error}"
            ) from error
        if subgraphs:
            self.scoped = True
            inputs.insert(0, SCOPE)
        self.add_step(node, path, provider.name, run, inputs, device, kernel)
        if context.dying_inputs:
            self.written_over[self.steps[-1][2][0]] = tuple(inputs[index] for index in sorted(context.dying_inputs))
        self.read_by_bodies[len(self.steps) - 1] = tuple(slot for body in subgraphs.values() for slot, _ in body.captures)

    def add_step(
        self, node: ir.Node, path: str, provider: str, run: Run, inputs: list[int], device: str, kernel: Kernel | None = None
    ) -> None:
        outputs = []
        for index, value in enumerate(node.outputs):
            if not value.name:
                outputs.append(self.new_slot())  # nobody reads it, so it's dropped right after
                continue
            on_host = kernel is not None and index in kernel.host_outputs
            outputs.append(self.define(value, HOST if on_host else device))
        reads = tuple((value.name or "") if value is not None else "" for value in node.inputs)
        writes = tuple(value.name or "" for value in node.outputs)
        self.steps.append((run, inputs, outputs, NodeInfo(path, node.op_type, node.domain, provider, reads, writes)))
        if kernel is not None and kernel.view_of == ANY_INPUT:
            self.borrowed.update(outputs)
        elif kernel is not None and kernel.view_of is not None and kernel.view_of < len(node.inputs):
            first = 1 if inputs and inputs[0] == SCOPE else 0
            self.views.update(dict.fromkeys(outputs, inputs[first + kernel.view_of]))
        if any(attribute_graphs(attribute) for attribute in node.attributes.values()):
            self.borrowed.update(outputs)  # a branch may hand on a value of the outer graph as it is

    def is_read_in_blocks(self, value: ir.Value) -> bool:
        """Whether every reader of a value is a kernel on the host that takes blocks in place of an array."""

        def takes_blocks(reader: ir.Node, index: int) -> bool:
            placement = self.compiler.placements.get(reader)
            if placement is None:
                return True  # it's in a body of a node that a pass removed, so it never reads anything
            return (
                placement.provider is not None
                and placement.kernel is not None
                and placement.provider.provider.device == HOST
                and index in placement.kernel.block_inputs
            )

        return bool(value.uses()) and not value.is_graph_output() and all(takes_blocks(node, index) for node, index in value.uses())

    def dies_in(self, value: ir.Value | None, reader: ir.Node) -> bool:
        """Whether a node is the only reader of a value that a kernel on the host made anew. Not where somebody watches values."""
        producer = None if value is None else value.producer()
        if value is None or producer is None or producer.graph is not self.graph or value.is_graph_output() or self.compiler.observers:
            return False
        placement = self.compiler.placements[producer]
        return (
            placement.kernel is not None
            and placement.provider is not None
            and placement.provider.provider.device == HOST
            and placement.kernel.view_of is None
            and producer.domain in ("", "com.microsoft")
            and not any(attribute_graphs(attribute) for attribute in producer.attributes.values())
            and [node for node, _ in value.uses()] == [reader]
        )

    def compile_body(self, body: ir.Graph, path: str) -> CompiledSubgraph:
        inner = _GraphCompiler(self.compiler, body, outer=self, path=path)
        plan = inner.compile(list(body.inputs))
        self.copies += plan.copies
        self.body_names |= plan.known_names
        weights = self.compiler.weights
        inputs = tuple(info for value in body.inputs if (info := value_info(value, weights)) is not None)
        outputs = tuple(info for value in body.outputs if (info := value_info(value, weights)) is not None)
        return CompiledSubgraph(inputs, outputs, plan, tuple(inner.captures))

    def with_deaths(self, output_slots: Sequence[int]) -> tuple[Step, ...]:
        """The steps, each with the slots that nobody reads after it."""
        last_use: dict[int, int] = {}
        for index, (_, inputs, outputs, _) in enumerate(self.steps):
            for slot in (*inputs, *outputs, *self.read_by_bodies.get(index, ())):
                last_use[slot] = index
        kept = self.fixed | set(output_slots)
        dead: dict[int, list[int]] = {}
        for slot, index in last_use.items():
            if slot not in kept:
                dead.setdefault(index, []).append(slot)
        return tuple(
            Step(run, tuple(inputs), tuple(outputs), tuple(dead.get(index, ())), info)
            for index, (run, inputs, outputs, info) in enumerate(self.steps)
        )


def input_device(kernel: Kernel, index: int, device: str) -> str | None:
    """The device that a kernel wants an input on; None if any will do."""
    if index in kernel.metadata_inputs:
        return None
    return HOST if index in kernel.host_inputs else device


def missing_kernel(placement: Placement, path: str) -> KernelError:
    """The error for a node that nobody has a kernel for: what it is, and whom was asked."""
    view = placement.view
    types = ", ".join(type_string(info.dtype) if info is not None else "nothing" for info in view.inputs)
    asked = "; ".join(f"{refusal.provider}: {refusal.reason}" for refusal in placement.refusals) or "the session has no provider"
    return KernelError(
        f"node {path!r} ({qualified_op(view.domain, view.op)}, version {view.version}, on {types}) has no kernel. Asked were: {asked}"
    )
