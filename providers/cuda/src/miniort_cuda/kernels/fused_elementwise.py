"""FusedElementwise of the domain miniort: a chain of elementwise ops. `miniort.graph.elementwise_fusion` makes such nodes."""

from __future__ import annotations

from miniort.graph.elementwise_body import DOMAIN, FUSED_ELEMENTWISE, read_body
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort_cuda.chains import in_one_launch
from miniort_cuda.elementwise_source import refusal

kernels = KernelTable("cuda")


def _refuse(node: NodeView) -> str | None:
    return refusal(read_body(node.attribute("body")), [None if info is None else info.dtype for info in node.inputs])


@kernels.register(FUSED_ELEMENTWISE, (1, 1), domain=DOMAIN, refuse=_refuse)
def fused_elementwise(node: NodeContext) -> Run:
    """The chain of ops that the attribute `body` says, of arrays that broadcast to each other. Only for providers with a compiler."""
    return in_one_launch(node, read_body(node.attribute("body")))
