"""The kernels of the provider: which nodes they take, and the compiled functions that they call.

They take float32 alone, and of each op the forms that decoders use; for all else the reason is in `explain()`, and the CPU provider has it.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, cast

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.tape import call
from miniort.types import Array, DType

if TYPE_CHECKING:
    from miniort_numba.provider import NumbaProvider

FLOAT32: DType = np.dtype(np.float32)

KERNELS = KernelTable("numba")

FEW_ROWS = 4
"""Rows of a product up to which one dot product for each, with a matrix stored column by column, is best."""

NO_VECTOR = np.empty(0, np.float32)
"""What stands for an absent bias where compiled code takes an array."""
NOTHING_ELSE = 0, 0
"""What stands for an absent finish of a product, and its arguments; see `miniort_numba.compiled.products.FINISH`."""
_NO_MASK = np.empty((0, 0, 0, 0), np.uint8)


def crew_of(node: NodeContext) -> tuple[int, int]:
    """The board and the helpers of the node's provider, as compiled functions take them."""
    crew = cast("NumbaProvider", node.provider).crew
    return crew.board, crew.helpers


def refuse_product(node: NodeView) -> str | None:
    """Why the provider doesn't take a product, None if it does."""
    matrix = node.inputs[1]
    if matrix is None or matrix.shape is None or len(matrix.shape) != 2:
        return "it multiplies with one matrix only, not with a stack of them"
    left = node.inputs[0]
    if left is None or left.shape is None or len(left.shape) < 2:
        return "it multiplies rows of a matrix only, not a vector"
    return None


@KERNELS.register("MatMul", types={"T": [FLOAT32]}, refuse=refuse_product)
def matmul(node: NodeContext) -> Run:
    """`a` · b. a: [..., K], b: [K, N] -> [..., N]."""
    multiply, allocate = multiply_into(node), node.provider.allocate

    def run(a: Array, b: Array) -> Array:
        inner, columns = b.shape
        y: Array = allocate((*a.shape[:-1], columns), FLOAT32)
        if y.size:
            multiply(a.reshape(-1, inner), b, y.reshape(-1, columns))
        return y

    return run


@KERNELS.register("Gemm", versions=(7, None), types={"T": [FLOAT32]}, refuse=refuse_product)
def gemm(node: NodeContext) -> Run:
    """alpha · a · b + beta · c. a: [M, K], b: [K, N], each transposed if an attribute says so; c broadcasts to [M, N] -> [M, N]."""
    alpha, beta = np.float32(node.attribute("alpha", 1.0)), np.float32(node.attribute("beta", 1.0))
    turn_a, turn_b = node.attribute("transA", 0), node.attribute("transB", 0)
    multiply, allocate = multiply_into(node), node.provider.allocate

    def run(a: Array, b: Array, c: Array | None = None) -> Array:
        a, b = a.T if turn_a else a, b.T if turn_b else b
        y: Array = allocate((a.shape[0], b.shape[1]), FLOAT32)
        multiply(a, b, y)
        if alpha != 1:
            call(np.multiply, y, alpha, y, writes=(y,))
        if c is not None:
            call(np.add, y, c if beta == 1 else beta * c, y, writes=(y,))
        return y

    return run


def multiply_into(node: NodeContext) -> Run:
    """multiply(a, b, y) writes a · b into y. a: [M, K], b: [K, N], y: [M, N]."""
    from miniort_numba.compiled import few_rows, products

    board, helpers = crew_of(node)
    by_rows, by_dots, by_strips = products.BY_ROWS, products.BY_DOTS, products.BY_STRIPS
    few_by_rows, few_by_dots, most = few_rows.FEW_BY_ROWS, few_rows.FEW_BY_DOTS, few_rows.MOST_ROWS

    def multiply(a: Array, b: Array, y: Array) -> None:
        rows = len(a)
        if rows == 1 and b.flags.c_contiguous:
            call(products.multiply_row, board, helpers, by_rows, a.reshape(-1), b, *NOTHING_ELSE, y[0], writes=(y,))
        elif rows <= FEW_ROWS and b.flags.f_contiguous:
            call(products.multiply_rows_by_dots, board, helpers, by_dots, np.ascontiguousarray(a), b.T, y, writes=(y,))
        elif rows <= most and b.flags.c_contiguous:
            call(few_rows.multiply_few_rows, board, helpers, few_by_rows, np.ascontiguousarray(a), b, y, writes=(y,))
        elif rows <= most and b.flags.f_contiguous:
            call(few_rows.multiply_few_rows_by_dots, board, helpers, few_by_dots, np.ascontiguousarray(a), b.T, y, writes=(y,))
        elif b.flags.c_contiguous or b.flags.f_contiguous:
            call(products.multiply_many_rows, board, helpers, by_strips, np.ascontiguousarray(a), b, 1, 1, *NOTHING_ELSE, y, writes=(y,))
        else:
            call(np.matmul, a, b, y, writes=(y,))

    return multiply


def _refuse_normalization(node: NodeView) -> str | None:
    if any(output is not None for output in node.outputs[1:]):
        return "it gives no mean and no deviation"
    first = node.inputs[0]
    rank = None if first is None or first.shape is None else len(first.shape)
    axis = node.attribute("axis", -1)
    if axis != -1 and (rank is None or axis != rank - 1):
        return "it normalizes the last axis only"
    if node.attribute("stash_type", 1) != 1:
        return "it computes in float32 only"
    for index in (1, 2):
        info = node.inputs[index] if node.has_input(index) else None
        if info is not None and (info.shape is None or len(info.shape) != 1):
            return "it takes scale and bias of one axis only"
    return None


def _normalization(node: NodeContext, part: int) -> Run:
    from miniort_numba.compiled.rows import normalize_rows

    board, helpers = crew_of(node)
    epsilon, allocate = node.attribute("epsilon", 1e-5), node.provider.allocate

    def run(x: Array, scale: Array, bias: Array | None = None) -> Array:
        size = x.shape[-1]
        y: Array = allocate(x.shape, FLOAT32)
        if x.size:
            rows = np.ascontiguousarray(x).reshape(-1, size)
            added = NO_VECTOR if bias is None else row_of(bias, size)
            call(normalize_rows, board, helpers, part, rows, row_of(scale, size), added, epsilon, y.reshape(-1, size), writes=(y,))
        return y

    return run


def row_of(x: Array, size: int) -> Array:
    """[size] or [1] -> [size]."""
    return np.ascontiguousarray(x if len(x) == size else np.broadcast_to(x, size))


@KERNELS.register("LayerNormalization", versions=(17, None), types={"T": [FLOAT32]}, refuse=_refuse_normalization)
def layer_normalization(node: NodeContext) -> Run:
    """(x - mean) / √(variance + epsilon) · scale + bias over the last axis (Ba et al. 2016, arXiv:1607.06450). x: [..., n] -> the same."""
    from miniort_numba.compiled.rows import LAYER_ROWS

    return _normalization(node, LAYER_ROWS)


@KERNELS.register("RMSNormalization", versions=(23, None), types={"T": [FLOAT32], "V": [FLOAT32]}, refuse=_refuse_normalization)
def rms_normalization(node: NodeContext) -> Run:
    """x / √(mean of x² + epsilon) · scale over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467). x: [..., n] -> the same."""
    from miniort_numba.compiled.rows import ROOT_MEAN_SQUARE_ROWS

    return _normalization(node, ROOT_MEAN_SQUARE_ROWS)


def _refuse_gelu(node: NodeView) -> str | None:
    return None if node.attribute("approximate", "none") == "tanh" else "it has the approximation by tanh only"


@KERNELS.register("Gelu", versions=(20, None), types={"T": [FLOAT32]}, written_over=(0,), refuse=_refuse_gelu)
def gelu(node: NodeContext) -> Run:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) (Hendrycks and Gimpel 2016, arXiv:1606.08415). x: any shape -> the same."""
    from miniort_numba.compiled.rows import GELU

    return _activation(node, GELU, 1.0)


@KERNELS.register("Swish", versions=(24, None), types={"T": [FLOAT32]}, written_over=(0,))
def swish(node: NodeContext) -> Run:
    """x · sigmoid(alpha · x) (Ramachandran et al. 2017, arXiv:1710.05941). x: any shape -> the same."""
    from miniort_numba.compiled.rows import SWISH

    return _activation(node, SWISH, node.attribute("alpha", 1.0))


def _activation(node: NodeContext, part: int, alpha: float) -> Run:
    from miniort_numba.compiled.rows import activate

    board, helpers = crew_of(node)
    allocate, over = node.provider.allocate, 0 in node.dying_inputs

    def run(x: Array) -> Array:
        contiguous = x.flags.c_contiguous
        y: Array = x if over and contiguous and x.flags.writeable else allocate(x.shape, FLOAT32)
        source = (x if contiguous else np.ascontiguousarray(x)).reshape(-1)
        call(activate, board, helpers, part, source, alpha, y.reshape(-1), writes=(y,))
        return y

    return run


def refuse_attention(node: NodeView) -> str | None:
    """Why the provider doesn't take an `Attention`, None if it does."""
    for name, plain in (("softcap", 0.0), ("left_window_size", -1), ("right_window_size", -1), ("softmax_precision", 1)):
        if node.attribute(name, plain) != plain:
            return f"it has no {name}"
    if any(output is not None for output in node.outputs[1:]) or any(node.has_input(index) for index in (4, 5, 6)):
        return "it takes no past and gives no present and no scores"
    first = node.inputs[0]
    if first is None or first.shape is None or len(first.shape) != 4:
        return "it takes heads on an axis of their own only"
    if node.has_input(3) and node.dtype(3) != np.bool_:
        return "it takes a mask of booleans only"
    return None


@KERNELS.register("Attention", versions=(23, None), types={"T1": [FLOAT32], "T2": [FLOAT32]}, refuse=refuse_attention)
def attention(node: NodeContext) -> Run:
    """softmax(scale · q · kᵀ + mask) · v (Vaswani et al. 2017, arXiv:1706.03762).

    A query that may see no key gives zeros.

    q: [batch, heads, N, dim]; k, v: [batch, kv heads, T, dim], heads a multiple of kv heads; mask: broadcasts to [batch, heads, N, T],
    bool, its last axis may be shorter -> as q, with v's dim, a view of [batch, N, heads, dim].
    """
    attend = attend_by_token(node)

    def run(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        return attend(q, k, v, mask).transpose(0, 2, 1, 3)  # type: ignore[no-any-return]

    return run


def attend_by_token(node: NodeContext) -> Run:
    """As `attention`, but the result is [batch, N, heads, dim]."""
    from miniort_numba.compiled.attention import ATTEND, FEW_ROWS, attend
    from miniort_numba.compiled.one_query import ATTEND_PARTS, attend_one_query
    from miniort_numba.compiled.prompt_attention import BY_STRIPS, attend_by_strips

    board, helpers = crew_of(node)
    allocate = node.provider.allocate
    causal, scale = bool(node.attribute("is_causal", 0)), node.attribute("scale", None)

    def run(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        batch, heads, queries, size = q.shape
        keys, width = k.shape[2], v.shape[3]
        y: Array = allocate((batch, queries, heads, width), FLOAT32)
        factor = sqrt(1 / size) if scale is None else scale
        seen = _NO_MASK if mask is None else _mask(mask, keys)
        offset = 0 if causal else -1
        if queries == 1 and not causal:
            rows = _last_together(q), _rows_together(k), _rows_together(v)
            call(attend_one_query, board, helpers, ATTEND_PARTS, *rows, seen, factor, y, writes=(y,))
        elif heads // k.shape[1] * queries <= FEW_ROWS:
            rows = _last_together(q), _rows_together(k), _rows_together(v)
            call(attend, board, helpers, ATTEND, *rows, seen, offset, factor, y, writes=(y,))
        else:
            together = _last_together(q), _last_together(k), _last_together(v)
            call(attend_by_strips, board, helpers, BY_STRIPS, *together, seen, offset, factor, y, writes=(y,))
        return y

    return run


def _mask(mask: Array, keys: int) -> Array:
    """[..., T or fewer] booleans -> [1 or B, 1 or H, 1 or N, T] of 0 and 1; keys beyond its last axis are hidden."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask.shape[3] != keys:
        whole = np.zeros((*mask.shape[:3], keys), np.bool_)
        whole[..., : mask.shape[3]] = mask
        mask = whole
    return _last_together(mask).view(np.uint8)


def _last_together(x: Array) -> Array:
    """The array, or a copy whose last axis has no gaps."""
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


def _rows_together(x: Array) -> Array:
    """The array, or a copy, in which the rows of the last two axes follow each other. x: [batch, heads, T, dim]."""
    step = x.shape[3] * x.itemsize
    return x if x.strides[3] == x.itemsize and (x.strides[2] == step or x.shape[2] == 1) else np.ascontiguousarray(x)
