"""Fusing the small nodes of a decoder's block for the provider `numba`: with one token, a node costs more than its work.

Each takes the place of nodes only where the provider would get what's made; see `miniort_numba.fused_kernels` for the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from miniort.graph.cleanup import replace_outputs
from miniort.graph.matching import consumers, int_attribute, integers, is_enclosed, other_input, producer
from miniort.graph.passes import PassContext
from miniort.graph.replacement import replace_value
from miniort.model.constants import is_constant, shape_of

PROVIDER = "numba"
CONTRIB, OWN = "com.microsoft", "miniort"


def fuse_decoder_blocks(model: ir.Model, context: PassContext) -> None:
    """Make `SkipLayerNormalization` and its kin, `FastGelu`, `SwiGLU`, `SplitHeads`, these with a product, and `JoinedAttention`."""
    for graph in list(model.graphs()):
        for fuse, op in (
            (_fuse_normalization, "LayerNormalization"),
            (_fuse_normalization, "RMSNormalization"),
            (_fuse_gelu, "Gelu"),
            (_fuse_swiglu, "Swish"),
            (_fuse_heads, "Split"),
            (_fuse_attention, "Attention"),
        ):
            for node in list(graph):
                if node.graph is not None and node.domain == "" and node.op_type == op:
                    fuse(node, context)


def _insert(
    context: PassContext,
    before: ir.Node,
    domain: str,
    op: str,
    inputs: Sequence[ir.Value | None],
    attributes: dict[str, ir.Attr],
    outputs: Sequence[ir.Value | None],
) -> ir.Node | None:
    """A node whose outputs have the types and shapes of others; None, and no node, if this provider wouldn't get it."""
    graph = before.graph
    assert isinstance(graph, ir.Graph)
    given = list(inputs)
    while given[-1] is None:
        given.pop()
    node = ir.Node(domain, op, given, list(attributes.values()), name=f"{before.name}/{op}", version=1, num_outputs=len(outputs))
    for made, like in zip(node.outputs, outputs, strict=True):
        if like is not None:
            made.name, made.type, made.shape = f"{like.name}/fused", like.type, like.shape
        else:
            made.name = ""
    graph.insert_before(before, node)
    if context.provider_of(node) != PROVIDER:
        graph.remove(node, safe=True)
        return None
    graph.opset_imports.setdefault(domain, 1)
    return node


def _replace(context: PassContext, fused: ir.Node | None, nodes: Sequence[ir.Node]) -> None:
    """Let a node take the place of others, whose last one computes the same."""
    if fused is None:
        return
    if replace_value(nodes[-1].outputs[0], fused.outputs[0], nodes):
        context.changed(fused, f"{', '.join(node.op_type for node in nodes)} made {fused.op_type}")
        return
    graph = fused.graph
    assert isinstance(graph, ir.Graph)
    graph.remove(fused, safe=True)


def _is_vector(value: ir.Value | None, size: int | str | None) -> bool:
    """Whether a value is a constant of one axis, as long as another's last."""
    return value is not None and is_constant(value) and size is not None and shape_of(value) == (size,)


def _is_like(value: ir.Value | None, shape: Sequence[int | str | None]) -> bool:
    """Whether a value has as many axes as a shape, and the last one of the same, known size."""
    own = None if value is None else shape_of(value)
    return own is not None and len(own) == len(shape) and isinstance(own[-1], int) and own[-1] == shape[-1]


def _product_of(value: ir.Value, reader: ir.Node) -> ir.Node | None:
    """The product with one matrix, in the same graph as a reader, that a value is, if only one node reads it."""
    matmul = producer(value, "MatMul")
    if matmul is None or matmul.graph is not reader.graph or value.is_graph_output() or len(list(value.uses())) > 1:
        return None
    left, matrix = (len(shape_of(each) or ()) if each is not None else 0 for each in matmul.inputs)
    return matmul if left >= 2 and matrix == 2 else None


def _bias_below(value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Node] | None:
    """What a constant vector is added to, that vector, and the node that does it, if nobody else reads the sum."""
    add = producer(value, "Add")
    if value is None or add is None or add.outputs[0] is not value or value.is_graph_output() or len(list(value.uses())) != 1:
        return None
    shape = shape_of(value)
    for bias in add.inputs:
        x = None if bias is None else other_input(add, bias)
        if bias is not None and x is not None and shape and _is_vector(bias, shape[-1]) and _is_like(x, shape):
            return x, bias, add
    return None


def _fuse_normalization(norm: ir.Node, context: PassContext) -> None:
    """Norm(a + b), a + (c + bias): SkipLayerNormalization, whose fourth output is the sum."""
    add = producer(norm.inputs[0], "Add")
    shape = None if add is None else shape_of(add.outputs[0])
    if add is None or not shape or add.graph is not norm.graph or add.outputs[0] is not norm.inputs[0] or add.outputs[0].is_graph_output():
        return
    if not all(_is_like(value, shape) for value in add.inputs) or int_attribute(norm, "axis", -1) not in (-1, len(shape) - 1):
        return
    if int_attribute(norm, "stash_type", 1) != 1 or not all(_is_vector(value, shape[-1]) for value in norm.inputs[1:] if value is not None):
        return
    if any(output.uses() or output.is_graph_output() for output in norm.outputs[1:]):
        return
    first, second = add.inputs
    absorbed = [add, norm]
    bias = None
    for x, skip in ((first, second), (second, first)):
        below = _bias_below(x)
        if below is not None:
            first, second, bias = below[0], skip, below[1]
            absorbed.append(below[2])
            break
    by_mean = norm.op_type == "LayerNormalization"
    vectors = [*norm.inputs[1:], None][:2] if by_mean else [norm.inputs[1]]
    attributes = {"epsilon": norm.attributes.get("epsilon") or ir.AttrFloat32("epsilon", 1e-5)}
    op = "SkipLayerNormalization" if by_mean else "SkipSimplifiedLayerNormalization"
    total = add.outputs[0]
    others_read_it = len(list(total.uses())) > 1
    outputs = [norm.outputs[0], None, None, total] if others_read_it else [norm.outputs[0]]
    fused = _insert(context, add, CONTRIB, op, [first, second, *vectors, bias], attributes, outputs)
    if fused is None:
        return
    graph = norm.graph
    assert isinstance(graph, ir.Graph)
    names = ", ".join(node.op_type for node in absorbed)
    if not replace_outputs(graph, norm, [fused.outputs[0], *[None] * (len(norm.outputs) - 1)]):
        graph.remove(fused, safe=True)
        return
    if others_read_it:
        total.replace_all_uses_with(fused.outputs[3])
    for node in absorbed:
        if node is not norm and node.graph is not None:
            graph.remove(node, safe=True)
    context.changed(fused, f"{names} made {op}")


def _fuse_gelu(node: ir.Node, context: PassContext) -> None:
    """Gelu(x + bias), the approximation by tanh: FastGelu, or GemmFastGelu where nobody else reads the product that x is."""
    approximate = node.attributes.get("approximate")
    below = _bias_below(node.inputs[0])
    if below is None or approximate is None or approximate.as_string() != "tanh":
        return
    x, bias, add = below
    matmul = _product_of(x, node)
    if matmul is not None:
        fused = _insert(context, node, CONTRIB, "GemmFastGelu", [*matmul.inputs, bias], {}, [node.outputs[0]])
        _replace(context, fused, [matmul, add, node])
        return
    fused = _insert(context, node, CONTRIB, "FastGelu", [x, bias], {}, [node.outputs[0]])
    _replace(context, fused, [add, node])


def _fuse_swiglu(node: ir.Node, context: PassContext) -> None:
    """Swish(first half) · second half: SwiGLU, or MatMulSwiGLU where nobody else reads the product that's halved."""
    alpha = node.attributes.get("alpha")
    gate = node.inputs[0]
    split = producer(gate, "Split")
    readers = list(consumers(node.outputs[0], "Mul"))
    if split is None or gate is None or (alpha is not None and alpha.as_float() != 1.0) or len(split.outputs) != 2 or len(readers) != 1:
        return
    (mul,) = readers
    x, shape = split.inputs[0], shape_of(split.inputs[0]) if split.inputs[0] is not None else None
    if x is None or not shape or split.outputs[0] is not gate or other_input(mul, node.outputs[0]) is not split.outputs[1]:
        return
    if int_attribute(split, "axis", 0) not in (-1, len(shape) - 1) or not is_enclosed([split, node, mul], mul.outputs[0]):
        return
    halves = [(shape_of(half) or (None,))[-1] for half in split.outputs]
    if halves[0] is None or halves[0] != halves[1]:
        return
    matmul = _product_of(x, split)
    if matmul is not None:
        fused = _insert(context, mul, OWN, "MatMulSwiGLU", matmul.inputs, {}, [mul.outputs[0]])
        _replace(context, fused, [matmul, split, node, mul])
        return
    fused = _insert(context, mul, OWN, "SwiGLU", [x], {}, [mul.outputs[0]])
    _replace(context, fused, [split, node, mul])


@dataclass(frozen=True)
class _Heads:
    """One part of a projection, split into heads: [batch, heads, time, dim], turned by angles or not."""

    value: ir.Value
    heads: int
    dim: int
    turn: ir.Node | None
    nodes: tuple[ir.Node, ...]


def _heads(part: ir.Value, context: PassContext) -> _Heads | None:
    """What becomes of a part [batch, time, heads · dim]; None if it isn't split into heads, and only that."""
    reshape = _only_reader(part, "Reshape")
    transpose = None if reshape is None else _only_reader(reshape.outputs[0], "Transpose")
    if reshape is None or transpose is None or tuple(transpose.attributes["perm"].as_ints()) != (0, 2, 1, 3):
        return None
    target = integers(reshape.inputs[1], context.weights)
    width = (shape_of(part) or (None,))[-1]
    if target is None or len(target) != 4 or target[2] < 1 or target[3] < 1 or target[2] * target[3] != width:
        return None
    if int_attribute(reshape, "allowzero", 0) or target[:2] not in ((0, 0), (0, -1), (-1, 0)):
        return None
    turn = _only_reader(transpose.outputs[0], "RotaryEmbedding")
    if turn is None:
        return _Heads(transpose.outputs[0], target[2], target[3], None, (reshape, transpose))
    return _Heads(turn.outputs[0], target[2], target[3], turn, (reshape, transpose, turn))


def _only_reader(value: ir.Value, op: str) -> ir.Node | None:
    """The one node that reads a value, if it's this op and reads it first."""
    uses = list(value.uses())
    if value.is_graph_output() or len(uses) != 1 or uses[0][1] != 0:
        return None
    node = uses[0][0]
    return node if (node.domain, node.op_type) == ("", op) and node.attributes.get("perm", True) is not None else None


def _angles(parts: Sequence[_Heads], time: int | str | None) -> tuple[tuple[ir.Value, ir.Value] | None, int] | None:
    """The cosines and sines that all turned parts are turned by, and how pairs lie; None if they can't be turned together."""
    turned = [part for part in parts if part.turn is not None]
    kinds = set()
    for part in turned:
        turn = part.turn
        assert turn is not None
        if len(turn.inputs) != 3 or None in turn.inputs:
            return None
        width = int_attribute(turn, "rotary_embedding_dim", 0) or part.dim
        cosines, sines = turn.inputs[1], turn.inputs[2]
        shape = shape_of(cosines) if cosines is not None else None
        if shape is None or len(shape) != 3 or shape[2] not in (None, width // 2) or shape[1] != time or time is None:
            return None
        kinds.add((cosines, sines, int_attribute(turn, "interleaved", 0)))
    if len(kinds) > 1:
        return None
    if not kinds:
        return None, 0
    ((cosines, sines, interleaved),) = kinds
    assert cosines is not None
    assert sines is not None
    return (cosines, sines), interleaved


def _fuse_heads(split: ir.Node, context: PassContext) -> None:
    """Queries, keys and values of one projection, with its bias, split into heads and turned: SplitHeads, or MatMulSplitHeads."""
    x = split.inputs[0]
    shape = None if x is None else shape_of(x)
    if x is None or shape is None or len(shape) != 3 or int_attribute(split, "axis", 0) not in (-1, 2):
        return
    found = [_heads(part, context) for part in split.outputs]
    parts = [part for part in found if part is not None]
    angles = _angles(parts, shape[1])
    if len(parts) != len(found) or len({part.dim for part in parts}) != 1 or angles is None:
        return
    graph = split.graph
    assert isinstance(graph, ir.Graph)
    turning, interleaved = angles
    below = _bias_below(x)
    source, bias = (below[0], below[1]) if below is not None else (x, None)
    matmul = _product_of(source, split)
    given = [source] if matmul is None else list(matmul.inputs)
    inputs = [*given, bias, *(turning or (None, None))]
    place = _place(graph, [value for value in inputs if value is not None], [part.value for part in parts])
    if place is None:
        return
    attributes: dict[str, ir.Attr] = {
        "num_heads": ir.AttrInt64s("num_heads", [part.heads for part in parts]),
        "turned": ir.AttrInt64s("turned", [int(part.turn is not None) for part in parts]),
        "interleaved": ir.AttrInt64("interleaved", interleaved),
    }
    op = "SplitHeads" if matmul is None else "MatMulSplitHeads"
    fused = _insert(context, place, OWN, op, inputs, attributes, [part.value for part in parts])
    if fused is None:
        return
    if any(part.value.is_graph_output() for part in parts):
        graph.remove(fused, safe=True)
        return
    for part, made in zip(parts, fused.outputs, strict=True):
        part.value.replace_all_uses_with(made)
        for node in reversed(part.nodes):
            graph.remove(node, safe=True)
    graph.remove(split, safe=True)
    if below is not None:
        graph.remove(below[2], safe=True)
    if matmul is not None:
        graph.remove(matmul, safe=True)
    before = f"{'MatMul, ' if matmul else ''}{'Add, ' if below else ''}"
    context.changed(fused, f"{before}Split and {sum(len(part.nodes) for part in parts)} nodes behind it made {op}")


def _fuse_attention(node: ir.Node, context: PassContext) -> None:
    """Attention whose heads lie side by side again for each token: JoinedAttention."""
    transpose = _only_reader(node.outputs[0], "Transpose")
    reshape = None if transpose is None else _only_reader(transpose.outputs[0], "Reshape")
    if transpose is None or reshape is None or tuple(transpose.attributes["perm"].as_ints()) != (0, 2, 1, 3):
        return
    target, joined = integers(reshape.inputs[1], context.weights), shape_of(reshape.outputs[0])
    shape = shape_of(node.outputs[0])
    if target is None or len(target) != 3 or joined is None or shape is None or len(shape) != 4 or int_attribute(reshape, "allowzero", 0):
        return
    heads, dim = shape[1], shape[3]
    if not isinstance(heads, int) or not isinstance(dim, int) or target not in (
        (0, 0, heads * dim), (0, -1, heads * dim), (-1, 0, heads * dim), (0, 0, -1)
    ):  # fmt: skip
        return
    fused = _insert(context, node, OWN, "JoinedAttention", node.inputs, dict(node.attributes), [reshape.outputs[0]])
    _replace(context, fused, [node, transpose, reshape])


def _place(graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Node | None:
    """The first node that reads one of the outputs, if all inputs are there before it."""
    readers = {node for value in outputs for node, _ in value.uses()}
    missing = {node for value in inputs if (node := value.producer()) is not None and node.graph is graph}
    for node in graph:
        if node in readers:
            return None if missing else node
        missing.discard(node)
    return None
