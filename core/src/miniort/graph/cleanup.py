"""Cleaning up: identities, common sub-expressions, and what nobody reads."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, IdentityEliminationPass, RemoveUnusedNodesPass

from miniort.graph.passes import GraphPass, Level, PassContext


def clean_up(model: ir.Model, context: PassContext) -> None:
    """Remove identities, compute equal things once, and drop nodes and initializers that nothing reads."""
    for reason, clean in (
        ("identities removed", IdentityEliminationPass()),
        ("equal nodes merged", CommonSubexpressionEliminationPass()),
        ("unused nodes removed", RemoveUnusedNodesPass()),
    ):
        before = len(model.graph)
        if clean(model).modified and len(model.graph) != before:
            context.changed(f"{before - len(model.graph)} nodes", reason)


CLEAN_UP = GraphPass("clean-up", Level.BASIC, clean_up)
