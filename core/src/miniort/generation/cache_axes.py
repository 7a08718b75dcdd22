"""Which axis of a cache tensor is which, and how many heads of what size it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from miniort.errors import BindingError
from miniort.generation.cache_flow import MICROSOFT, attribute, concat_of
from miniort.graph.inference import infer_types
from miniort.model.constants import shape_of
from miniort.types import Shape

Axes = tuple[int, int, int, int]

LOGICAL: Axes = (0, 1, 2, 3)
"""[batch, kv heads, time, head dim]."""

_TIME_WORDS = ("past", "total", "seq", "len", "time", "ctx", "context", "cache_size")


@dataclass(frozen=True)
class CacheAxes:
    """Where batch, kv heads, time and head dim lie, in this order, among the axes of a graph's keys and values.

    A packed tensor's axes are counted without its first.
    """

    key: Axes = LOGICAL
    value: Axes = LOGICAL


def find_axes(past: ir.Value | None, present: ir.Value | None, tokens: ir.Value) -> Axes:
    """The axes of a key or a value, from what it's joined along, else from the names of its sizes.

    Time is where a `Concat` joins it; else the only axis where past and present differ; else the only one whose size is called so. Batch is
    the axis whose size is called as the tokens' first, else the first that isn't time. Of the other two heads come before head dim.
    """
    shape = cache_shape(past if past is not None else present)
    time = _time_axis(past, present, shape)
    others = [axis for axis in range(4) if axis != time]
    sizes = shape_of(tokens) or ()
    called = [axis for axis in others if isinstance(shape[axis], str) and sizes and shape[axis] == sizes[0]]
    batch = called[0] if len(called) == 1 else others[0]
    heads, size = (axis for axis in others if axis != batch)
    return batch, heads, time, size


def _time_axis(past: ir.Value | None, present: ir.Value | None, shape: Shape) -> int:
    packed = past is not None and len(shape_of(past) or ()) == 5
    if past is not None and not packed:
        joint = concat_of(past, 4)
        if joint is not None:
            return joint.axis
    if past is not None and present is not None:
        other = cache_shape(present)
        different = [axis for axis in range(4) if shape[axis] != other[axis] and None not in (shape[axis], other[axis])]
        if len(different) == 1:
            return different[0]
    called = [axis for axis, size in enumerate(shape) if isinstance(size, str) and any(word in size.lower() for word in _TIME_WORDS)]
    return called[0] if len(called) == 1 else LOGICAL[2]


def cache_shape(value: ir.Value | None) -> Shape:
    """The four sizes of a cache tensor as it's stored, without the first of a packed one; unknown ones are None."""
    shape = (None if value is None else shape_of(value)) or (None,) * 4
    return shape[1:] if len(shape) == 5 else shape


@dataclass(frozen=True)
class CacheTensor:
    """A past or present of one layer, in one of a decoder's graphs, and where its axes lie. `is_value`: a value and not a key."""

    graph: ir.Graph
    tensor: ir.Value
    axes: Axes
    is_value: bool

    def size(self, logical: int) -> int | None:
        """The size of an axis of [batch, kv heads, time, head dim], None where the tensor doesn't say."""
        size = cache_shape(self.tensor)[self.axes[logical]]
        return size if isinstance(size, int) else None


def layer_sizes(tensors: Sequence[CacheTensor], layer: int) -> tuple[int, int, int]:
    """(kv heads, head dim, value head dim) of a layer, from whatever tensor says it, else from what is computed beside it.

    BindingError if tensors disagree, or nothing says it.
    """
    found = []
    for logical, noun, is_value in ((1, "kv heads", False), (3, "head dim", False), (3, "head dim of values", True)):
        wanted = [each for each in tensors if each.is_value == is_value or logical == 1]
        seen = {size for each in wanted if (size := each.size(logical)) is not None}
        seen = seen or {size for each in wanted if (size := _computed_size(each, logical)) is not None}
        if len(seen) > 1:
            raise BindingError(f"layer {layer}: graphs disagree about the {noun}: {sorted(seen)}")
        if not seen:
            listed = ", ".join(f"{each.tensor.name!r} {list(cache_shape(each.tensor))}" for each in wanted)
            raise BindingError(
                f"layer {layer}: nothing says the size of axis {wanted[0].axes[logical]}, the {noun}: {listed}. "
                "Export the model with that size fixed"
            )
        found.append(seen.pop())
    return found[0], found[1], found[2]


def _computed_size(cache: CacheTensor, logical: int) -> int | None:
    """A size that a past's own shape leaves open, from the op that reads it."""
    packed = len(shape_of(cache.tensor) or ()) == 5
    for node, index in cache.tensor.uses():
        if node.domain == MICROSOFT and index >= 3 and isinstance(heads := attribute(node, "num_heads"), int):
            return _size_by_attributes(node, heads, logical)
    joint = None if packed else concat_of(cache.tensor, 4)
    new = None if joint is None else joint.node.inputs[1]
    if joint is None or new is None:
        return None
    if shape_of(new) is None:
        infer_types(ir.Model(cache.graph, ir_version=10))
    shape = shape_of(new)
    size = None if shape is None or len(shape) != 4 else shape[joint.order.index(cache.axes[logical])]
    return size if isinstance(size, int) else None


def _size_by_attributes(node: ir.Node, heads: int, logical: int) -> int | None:
    """Heads are in an attribute; their size is the width of the queries by the number of heads."""
    kv_heads = attribute(node, "kv_num_heads", heads)
    assert isinstance(kv_heads, int)
    if logical == 1:
        return kv_heads
    if node.op_type in ("Attention", "QAttention"):
        weight = node.inputs[1]
        width = None if weight is None else _last_size(weight)
        return None if width is None or width % (3 * heads) else width // (3 * heads)
    width = last_size(node.inputs[0])
    parts = heads if node.inputs[1] is not None else heads + 2 * kv_heads
    return None if width is None or width % parts else width // parts


def last_size(value: ir.Value | None, depth: int = 16) -> int | None:
    """The size of the last axis, from the value's shape, else from the weights that it's computed with."""
    node = None if value is None else value.producer()
    if value is None or depth == 0:
        return None
    own = _last_size(value)
    if own is not None or node is None:
        return own
    if node.op_type == "MatMulNBits":
        return int(node.attributes["N"].as_int())
    if node.op_type == "Gemm":
        weight = None if node.inputs[1] is None else shape_of(node.inputs[1])
        size = None if weight is None else weight[0 if attribute(node, "transB", 0) else 1]
        return size if isinstance(size, int) else None
    if node.op_type in ("MatMul", "MatMulInteger"):
        return last_size(node.inputs[1], depth - 1)
    if node.op_type in ("Split", "Reshape", "Transpose", "Slice", "Gather", "Concat", "Attention", "Unsqueeze", "Squeeze"):
        return None  # ops that change the last axis, or may
    sizes = {size for each in node.inputs if (size := last_size(each, depth - 1)) is not None and size > 1}
    return sizes.pop() if len(sizes) == 1 else None


def _last_size(value: ir.Value) -> int | None:
    shape = shape_of(value)
    return shape[-1] if shape and isinstance(shape[-1], int) else None
