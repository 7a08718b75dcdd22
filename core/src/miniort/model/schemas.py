"""Op schemas of the installed onnx, by the opset that a model imports."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import onnx
import onnx_ir as ir

from miniort.errors import ModelError


@cache
def find_schema(op: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """The schema that an opset implies for an op; None where onnx knows none, as for every domain but its own."""
    try:
        return onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None


def schema_version(op: str, domain: str, opset: int) -> int:
    """The version of the op's schema that an opset implies; the opset itself for a domain without schemas."""
    schema = find_schema(op, domain, opset)
    return opset if schema is None else schema.since_version


def node_opset(node: ir.Node, opsets: Mapping[str, int]) -> int | None:
    """The opset that a node is written in: the model's, or that of the function that it was inlined from."""
    return opsets.get(node.domain) if node.version is None else node.version


def check_opsets(name: str, opsets: Mapping[str, int]) -> None:
    """ModelError if the model imports a newer opset than the installed onnx knows: what its ops mean can't be told."""
    newest = onnx.defs.onnx_opset_version()
    if opsets.get("", 0) > newest:
        raise ModelError(
            f"{name}: imports opset {opsets['']}, but the installed onnx {onnx.__version__} knows opsets up to {newest}; upgrade onnx"
        )
