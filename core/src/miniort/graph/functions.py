"""Functions: those of the model are inlined, those of schemas stand in for ops that no provider has."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from miniort.graph.inference import infer_types
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.model.loading import all_nodes
from miniort.model.schemas import find_schema, node_opset, schema_version
from miniort.types import dtype_from_onnx

_DEPTH = 16
"""How deep functions may lie in functions before it's taken for a recursion."""


def inline_functions(model: ir.Model, context: PassContext) -> None:
    """Replace every call of a function by its body: the model's own, and a schema's where no provider has a kernel for the op."""
    for _ in range(_DEPTH):
        _add_schema_functions(model, context)
        if not model.functions:
            return
        for node in all_nodes(model):
            called = model.functions.get(node.op_identifier())
            if called is not None:
                context.changed(node, f"a call of the function {node.op_type}, inlined")
                node.resize_outputs(len(called.outputs))  # onnx-ir wants all of them, also those that nobody reads
        for function in model.functions.values():
            _pin_versions(function, model.graph.opset_imports)
        InlinePass()(model)
        model.functions.clear()
        infer_types(model)  # a function that a body calls may depend on types


def _add_schema_functions(model: ir.Model, context: PassContext) -> None:
    for node in list(all_nodes(model)):
        if node.op_identifier() in model.functions:
            continue
        opset = node_opset(node, context.opsets)
        schema: Any = None if opset is None else find_schema(node.op_type, node.domain, opset)
        # onnx's type stubs don't know what a schema says of functions.
        if opset is None or schema is None or not (schema.has_function or schema.has_context_dependent_function):
            continue
        dtypes = [
            None if value is None or value.dtype is None or not int(value.dtype) else dtype_from_onnx(int(value.dtype))
            for value in node.inputs
        ]
        if context.supports(node.op_type, node.domain, schema.since_version, dtypes):
            continue
        body = _function_body(schema, opset, node)
        if body is None:
            continue
        _write_out_defaults(node, schema)
        # One function for each node: a body that depends on the node's types can't serve another.
        name = f"{node.op_type}_{len(model.functions)}"
        body.name, body.domain = name, "miniort.functions"
        function = ir.serde.deserialize_function(body)
        model.functions[function.identifier()] = function
        model.graph.opset_imports["miniort.functions"] = 1
        node.op_type, node.domain = name, "miniort.functions"


def _pin_versions(function: ir.Function, opsets: dict[str, int]) -> None:
    """Let each node keep the opset that its function was written in, where the op means something else in the model's."""
    for node in ir.traversal.RecursiveGraphIterator(function):
        written = function.opset_imports.get(node.domain)
        if written is None:
            continue
        op, domain, current = node.op_type, node.domain, opsets.get(node.domain, written)
        if schema_version(op, domain, written) != schema_version(op, domain, current):
            node.version = written
    for domain in function.opset_imports:
        function.opset_imports[domain] = opsets.setdefault(domain, function.opset_imports[domain])


def _function_body(schema: Any, opset: int, node: ir.Node) -> onnx.FunctionProto | None:
    """The body that the schema gives for a node, None where it has none for this opset or these types."""
    if schema.has_function:
        versions = [version for version in schema.function_opset_versions if version <= opset]
        if not versions:
            return None
        text = schema.get_function_with_opset_version(max(versions))
    else:
        versions = [version for version in schema.context_dependent_function_opset_versions if version <= opset]
        if not versions or any(value is not None and value.type is None for value in node.inputs):
            return None
        types = [
            onnx.TypeProto().SerializeToString() if value is None or value.type is None else _type_proto(value).SerializeToString()
            for value in node.inputs
        ]
        text = schema.get_context_dependent_function_with_opset_version(
            max(versions), ir.serde.serialize_node(node).SerializeToString(), types
        )
    if not text:
        return None
    body: onnx.FunctionProto = onnx.FunctionProto.FromString(text)
    del body.output[len(node.outputs) :]
    computed = {name for each in body.node for name in each.output} | set(body.input)
    for name in body.output:
        if name not in computed:  # an output that the node doesn't ask for: something must stand in its place
            body.node.add(op_type="Identity", input=[body.output[0]], output=[name])
    return body


def _write_out_defaults(node: ir.Node, schema: Any) -> None:
    """Give the node the schema's value of each attribute that it leaves out: the body refers to them by name."""
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.name:
            node.attributes[name] = ir.serde.deserialize_attribute(attribute.default_value)


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    return ir.serde.serialize_value(value).type


INLINE_FUNCTIONS = GraphPass("inline-functions", Level.REQUIRED, inline_functions)
