"""Which provider runs which node: the first in the session's order that has a kernel for it, with the reasons of those before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from miniort.errors import KernelError
from miniort.kernels import NEWEST_TESTED, Kernel, KernelTable, NodeView, TypeKey, qualified_op
from miniort.model.constants import is_constant, shape_of, value_info
from miniort.model.loading import attribute_graphs, attribute_value
from miniort.model.schemas import find_schema, node_opset
from miniort.model.weights import WeightStore
from miniort.providers import HOST, Provider
from miniort.types import DType, type_string

SHAPE_OPS = frozenset(
    {"Shape", "Size", "Add", "Cast", "Concat", "Div", "Equal", "Gather", "Identity", "Max", "Min", "Mod", "Mul", "Neg"}
    | {"Reshape", "Slice", "Split", "Squeeze", "Sub", "Unsqueeze", "Where", "ReduceProd", "ConstantOfShape"}
)
"""Ops that compute with shapes. Where all that they read is shapes, they stay on the host: a device would only wait for each number."""

SHAPE_INPUTS = frozenset({"miniort.past_shape"})
"""Graph inputs that are shapes themselves: that of a decoder's past, which a join to a cache leaves in its stead."""


@dataclass(frozen=True)
class OpenProvider:
    """A provider of a session, with the kernels that other plugins add to it, and the options that it was opened with."""

    name: str
    provider: Provider
    kernels: KernelTable
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """A provider that was asked for a node before the one that got it, and why it didn't take it."""

    provider: str
    reason: str


@dataclass(frozen=True)
class Placement:
    """Where a node runs. `kernel` and `provider` are None where nobody has a kernel."""

    view: NodeView
    provider: OpenProvider | None
    kernel: Kernel | None
    reason: str
    refusals: tuple[Refusal, ...]


SelectKernel = Callable[[NodeView, list[Kernel]], "Kernel | None"]


@dataclass(frozen=True)
class Assigner:
    """Places nodes on providers."""

    providers: Sequence[OpenProvider]
    weights: WeightStore
    opsets: Mapping[str, int]
    select: SelectKernel

    def assign(self, graph: ir.Graph) -> dict[ir.Node, Placement]:
        """A placement for every node of a graph and of its sub-graphs."""
        placements: dict[ir.Node, Placement] = {}
        self._assign(graph, {value for value in graph.inputs if value.name in SHAPE_INPUTS}, placements)
        return placements

    def _assign(self, graph: ir.Graph, shapes: set[ir.Value], placements: dict[ir.Node, Placement]) -> None:
        for node in graph:
            shape_only = self._computes_shapes(node, shapes)
            if shape_only:
                shapes.update(node.outputs)
                placements[node] = self.place(node, "it computes with shapes, which stay on the host")
            elif _hands_on_host_value(node, placements):
                placements[node] = self.place(node, "its input is on the host already")
            else:
                placements[node] = self.place(node)
            for attribute in node.attributes.values():
                for body in attribute_graphs(attribute):
                    self._assign(body, shapes, placements)

    def _computes_shapes(self, node: ir.Node, shapes: set[ir.Value]) -> bool:
        if node.domain != "" or node.op_type not in SHAPE_OPS:
            return False
        if node.op_type in ("Shape", "Size"):
            return True
        if not all(value is None or value in shapes or is_constant(value) for value in node.inputs):
            return False
        rank = None if not node.outputs or (shape := shape_of(node.outputs[0])) is None else len(shape)
        return any(value in shapes for value in node.inputs) and rank is not None and rank <= 1

    def view(self, node: ir.Node) -> NodeView:
        """What kernels may know of a node. KernelError if its domain isn't imported."""
        opset = node_opset(node, self.opsets)
        if opset is None:
            raise KernelError(
                f"node {node.name!r} ({qualified_op(node.domain, node.op_type)}): the model doesn't import the domain {node.domain!r}"
            )
        schema = find_schema(node.op_type, node.domain, opset)
        return NodeView(
            op=node.op_type,
            domain=node.domain,
            version=opset if schema is None else schema.since_version,
            name=node.name or "",
            inputs=tuple(value_info(value, self.weights) for value in node.inputs),
            outputs=tuple(value_info(value if value.name else None, self.weights) for value in node.outputs),
            attributes={
                name: attribute_value(attribute)
                for name, attribute in node.attributes.items()
                if not attribute_graphs(attribute) and not attribute.is_ref()
            },
        )

    def place(self, node: ir.Node, on_host: str | None = None) -> Placement:
        """The placement of one node. `on_host` says why it should be on the host, if it should."""
        view = self.view(node)
        refusals: list[Refusal] = []
        candidates: list[tuple[OpenProvider, Kernel]] = []
        for provider in self.providers:
            if on_host is not None and provider.provider.device != HOST:
                refusals.append(Refusal(provider.name, on_host))
                continue
            kernels, reason = matching_kernels(provider.kernels, view)
            candidates += [(provider, kernel) for kernel in kernels]
            if not kernels:
                refusals.append(Refusal(provider.name, reason))
        if not candidates and on_host is not None:
            return self.place(node)  # no provider on the host has it, so a device does
        if not candidates:
            return Placement(view, None, None, "no provider has a kernel", tuple(refusals))
        chosen = self.select(view, [kernel for _, kernel in candidates])
        provider, kernel = candidates[0]
        reason = "the first provider that has a kernel"
        if chosen is not None:
            offered = [pair for pair in candidates if pair[1] is chosen]
            if not offered:
                raise KernelError(f"a plugin chose a kernel for node {node.name!r} ({node.op_type}) that isn't among its candidates")
            provider, kernel = offered[0]
            reason = "chosen by a plugin (miniort_select_kernel)"
        names = [each.name for each in self.providers]
        before = names[: names.index(provider.name)]
        return Placement(view, provider, kernel, reason, tuple(refusal for refusal in refusals if refusal.provider in before))

    def provider_of(self, node: ir.Node) -> str | None:
        """The name of the provider that would get a node, None for nobody."""
        provider = self.place(node).provider
        return None if provider is None else provider.name

    def supports(self, op: str, domain: str, version: int, dtypes: Sequence[DType | None] = ()) -> bool:
        """Whether some provider has a kernel for an op of this schema version and these input types."""
        return any(
            kernel.covers(version) and within_tested(kernel, version) and type_mismatch(kernel, op, domain, version, dtypes) is None
            for provider in self.providers
            for kernel in provider.kernels.find(domain, op)
        )


def _hands_on_host_value(node: ir.Node, placements: Mapping[ir.Node, Placement]) -> bool:
    """Whether a node is an `Identity` of a value that's on the host: a device would only carry it there and back."""
    if node.op_type != "Identity" or node.domain != "" or node.inputs[0] is None:
        return False
    value = node.inputs[0]
    producer = value.producer()
    if producer is None:
        return True  # inputs come from the host, and constants are there as well
    made_by = placements.get(producer)
    if made_by is None or made_by.provider is None or made_by.kernel is None:
        return False
    return made_by.provider.provider.device == HOST or value.index() in made_by.kernel.host_outputs


def matching_kernels(table: KernelTable, view: NodeView) -> tuple[list[Kernel], str]:
    """The kernels of a table that take a node, and why it has none where there are none."""
    known = table.find(view.domain, view.op)
    if not known:
        return [], "it has no kernel for this op"
    matching: list[Kernel] = []
    reasons: list[str] = []
    dtypes = [None if info is None else info.dtype for info in view.inputs]
    for kernel in known:
        if not kernel.covers(view.version):
            reasons.append(f"its kernel is for versions {kernel.versions_text()}, the node is of version {view.version}")
        elif not within_tested(kernel, view.version):
            newest = NEWEST_TESTED[view.domain]
            reasons.append(
                f"the op changed in opset {view.version}, and this release of miniort knows opsets up to {newest}; upgrade miniort"
            )
        elif mismatch := type_mismatch(kernel, view.op, view.domain, view.version, dtypes):
            reasons.append(mismatch)
        elif kernel.refuse is not None and (refusal := kernel.refuse(view)) is not None:
            reasons.append(refusal)
        else:
            matching.append(kernel)
    return matching, "; ".join(dict.fromkeys(reasons))


def within_tested(kernel: Kernel, version: int) -> bool:
    """Whether an open-ended range of versions reaches this far: to the newest opset that this release was tested with."""
    return kernel.until is not None or version <= NEWEST_TESTED.get(kernel.domain, version)


def type_mismatch(kernel: Kernel, op: str, domain: str, version: int, dtypes: Sequence[DType | None]) -> str | None:
    """Why a kernel doesn't take inputs of these types, None if it does. A type that isn't known before the run is let through."""
    keys = _type_keys(op, domain, version, len(dtypes))
    for index, (key, dtype) in enumerate(zip(keys, dtypes, strict=False)):
        allowed = kernel.types.get(key, kernel.types.get(index))
        if allowed is None or dtype is None or dtype in allowed:
            continue
        wanted = ", ".join(sorted(type_string(each) for each in allowed))
        return f"its kernel takes {wanted} for input {index}, the node has {type_string(dtype)}"
    return None


def _type_keys(op: str, domain: str, version: int, count: int) -> Sequence[TypeKey]:
    """The type parameter of each input by the op's schema; a variadic last input repeats."""
    schema = find_schema(op, domain, version)
    if schema is None or not schema.inputs:
        return range(count)
    return [schema.inputs[min(index, len(schema.inputs) - 1)].type_str for index in range(count)]
