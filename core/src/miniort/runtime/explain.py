"""What a session did with its graph, for people: changes, placements with their reasons, and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from miniort.graph.passes import Change
from miniort.kernels import qualified_op
from miniort.runtime.assignment import Placement, Refusal
from miniort.runtime.plan import CopyInfo, Plan


@dataclass(frozen=True)
class NodeExplanation:
    """Who runs a node and why; `provider` is None where nobody has a kernel. `refusals` are of the providers that were asked before."""

    name: str
    op: str
    version: int
    provider: str | None
    reason: str
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True)
class Explanation:
    """All that a session decided when it was built. `str()` of it is a report."""

    changes: tuple[Change, ...]
    nodes: tuple[NodeExplanation, ...]
    copies: tuple[CopyInfo, ...]

    def __str__(self) -> str:
        counts = Counter(node.provider or "nobody" for node in self.nodes)
        lines = [f"{len(self.nodes)} nodes: " + ", ".join(f"{count} on {name}" for name, count in counts.most_common())]
        lines += [f"  {text}" for node in self.nodes if (text := _describe(node)) is not None]
        lines.append(f"{len(self.copies)} copies between devices in each run")
        lines += [f"  {copy.value}: {copy.source} -> {copy.target}, for {copy.path}" for copy in self.copies]
        reasons = Counter((change.graph_pass, change.reason) for change in self.changes)
        lines.append(f"{len(self.changes)} changes of the graph")
        lines += [f"  {name}: {reason} ({count})" for (name, reason), count in reasons.items()]
        return "\n".join(lines)


def _describe(node: NodeExplanation) -> str | None:
    """A line for a node that not everybody would expect where it is."""
    if node.provider is not None and not node.refusals:
        return None
    refusals = "; ".join(f"{refusal.provider}: {refusal.reason}" for refusal in node.refusals)
    return f"{node.name} ({node.op}, version {node.version}) on {node.provider or 'nobody'}; {refusals}"


def explain(changes: Sequence[Change], placements: Mapping[ir.Node, Placement], plan: Plan) -> Explanation:
    """The explanation of a session that was built from these."""
    nodes = tuple(
        NodeExplanation(
            name=each.view.name,
            op=qualified_op(each.view.domain, each.view.op),
            version=each.view.version,
            provider=None if each.provider is None else each.provider.name,
            reason=each.reason,
            refusals=each.refusals,
        )
        for each in placements.values()
    )
    return Explanation(tuple(changes), nodes, plan.copies)
