"""Operators of decoders, each as one node where the opset has it, else spelled out in older ones.

Every function appends to a graph and returns the name of its result. The axes in the comments are

    B batch        S sequence: the tokens given in this run        T time: the past and the sequence
    H heads        D head dim                                      N any other
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from miniort.errors import ModelError

if TYPE_CHECKING:
    from miniort_models.graphs.writer import GraphWriter

OLDEST_OPSET = 13
"""Before it, axes of Squeeze, Unsqueeze and Split were attributes, and Cast knew no bfloat16."""

NEWEST_OPSET = 24
"""What is written here has been checked up to this one."""

MASKED = float(np.finfo(np.float32).min)
"""Added to a score that a query may not see. Not -inf: a row that sees nothing would be NaN, and padding has such rows."""


# --------------------------------------------------------------------------------------------------- sizes


def size(graph: GraphWriter, x: str, axis: int) -> str:
    """How long a value is along one axis, as a scalar."""
    if graph.opset >= 15:
        length = graph.add("Shape", x, to=f"{x}.shape", start=axis, end=axis + 1)  # [1]
        return graph.add("Squeeze", length, to=f"{x}.size")
    shape = graph.add("Shape", x, to=f"{x}.shape")
    return graph.add("Gather", shape, graph.integer(axis), to=f"{x}.size", axis=0)


def split(graph: GraphWriter, x: str, sizes: Sequence[int], to: Sequence[str], axis: int = -1) -> list[str]:
    """A value cut along an axis into parts of these sizes."""
    graph.add("Split", x, graph.integers(sizes), to=to, axis=axis)
    return list(to)


def split_heads(graph: GraphWriter, x: str, heads: int, head_dim: int, to: str) -> str:
    """[B, S, H · D] -> [B, S, H, D]"""
    return graph.add("Reshape", x, graph.integers([0, 0, heads, head_dim]), to=to)  # 0: as it is


def heads_first(graph: GraphWriter, x: str, to: str) -> str:
    """[B, S, H, D] -> [B, H, S, D]"""
    return graph.add("Transpose", x, to=to, perm=[0, 2, 1, 3])


def join_heads(graph: GraphWriter, x: str, width: int) -> str:
    """[B, H, S, D] -> [B, S, H · D]"""
    by_token = graph.add("Transpose", x, to=f"{x}.by_token", perm=[0, 2, 1, 3])  # [B, S, H, D]
    return graph.add("Reshape", by_token, graph.integers([0, 0, width]), to=f"{x}.joined")


# ------------------------------------------------------------------------------------------- normalisations


def layer_norm(graph: GraphWriter, x: str, scale: str, bias: str, epsilon: float, to: str) -> str:
    """(x - mean) / sqrt(variance + epsilon) · scale + bias, over the last axis (Ba et al. 2016, arXiv:1607.06450)."""
    if graph.opset >= 17:
        return graph.add("LayerNormalization", x, scale, bias, to=to, axis=-1, epsilon=epsilon)
    centred = graph.add("Sub", x, _mean(graph, x, to=f"{to}.mean"), to=f"{to}.centred")
    scaled = graph.add("Mul", _over_root_mean_square(graph, centred, epsilon, to), scale, to=f"{to}.scaled")
    return graph.add("Add", scaled, bias, to=to)


def rms_norm(graph: GraphWriter, x: str, scale: str, epsilon: float, to: str) -> str:
    """x / sqrt(mean(x²) + epsilon) · scale, over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    if graph.opset >= 23:
        return graph.add("RMSNormalization", x, scale, to=to, axis=-1, epsilon=epsilon)
    return graph.add("Mul", _over_root_mean_square(graph, x, epsilon, to), scale, to=to)


def _over_root_mean_square(graph: GraphWriter, x: str, epsilon: float, to: str) -> str:
    squares = graph.add("Mul", x, x, to=f"{to}.squares")
    shifted = graph.add("Add", _mean(graph, squares, to=f"{to}.mean_square"), graph.number(epsilon), to=f"{to}.shifted")
    return graph.add("Div", x, graph.add("Sqrt", shifted, to=f"{to}.root"), to=f"{to}.normal")


def _mean(graph: GraphWriter, x: str, to: str) -> str:
    if graph.opset >= 18:
        return graph.add("ReduceMean", x, graph.integers([-1]), to=to, keepdims=1)
    return graph.add("ReduceMean", x, to=to, keepdims=1, axes=[-1])


# ---------------------------------------------------------------------------------------------- activations


def gelu(graph: GraphWriter, x: str, to: str) -> str:
    """x · Φ(x) = x/2 · (1 + erf(x / sqrt(2))) (Hendrycks & Gimpel 2016, arXiv:1606.08415)"""
    if graph.opset >= 20:
        return graph.add("Gelu", x, to=to)
    error = graph.add("Erf", graph.add("Div", x, graph.number(sqrt(2)), to=f"{to}.scaled"), to=f"{to}.erf")
    return _half_of_one_plus(graph, x, error, to)


def gelu_tanh(graph: GraphWriter, x: str, to: str) -> str:
    """x/2 · (1 + tanh(sqrt(2/π) · (x + 0.044715 x³))), which is close to `gelu`."""
    if graph.opset >= 20:
        return graph.add("Gelu", x, to=to, approximate="tanh")
    square = graph.add("Mul", x, x, to=f"{to}.square")
    cube = graph.add("Mul", graph.add("Mul", square, x, to=f"{to}.cube"), graph.number(0.044715), to=f"{to}.small")
    inner = graph.add("Mul", graph.add("Add", x, cube, to=f"{to}.sum"), graph.number(sqrt(2 / np.pi)), to=f"{to}.scaled")
    return _half_of_one_plus(graph, x, graph.add("Tanh", inner, to=f"{to}.tanh"), to)


def _half_of_one_plus(graph: GraphWriter, x: str, y: str, to: str) -> str:
    """x/2 · (1 + y)"""
    both = graph.add("Mul", x, graph.add("Add", y, graph.number(1), to=f"{to}.one_plus"), to=f"{to}.twice")
    return graph.add("Mul", both, graph.number(0.5), to=to)


def swish(graph: GraphWriter, x: str, to: str) -> str:
    """x · sigmoid(x), also known as SiLU."""
    if graph.opset >= 24:
        return graph.add("Swish", x, to=to)
    return graph.add("Mul", x, graph.add("Sigmoid", x, to=f"{to}.sigmoid"), to=to)


def relu(graph: GraphWriter, x: str, to: str) -> str:
    """max(x, 0)"""
    return graph.add("Relu", x, to=to)


Activation = Callable[["GraphWriter", str, str], str]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "relu": relu,
    "silu": swish,
    "swish": swish,
}
"""By the names that `config.json` has for them."""


def activation(name: str) -> Activation:
    """ModelError for one that the graphs don't compute."""
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json asks for the activation {name!r}; the graphs compute {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def softcap(graph: GraphWriter, x: str, cap: float, to: str) -> str:
    """cap · tanh(x / cap): nearly x where it's small, never beyond ±cap."""
    bent = graph.add("Tanh", graph.add("Div", x, graph.number(cap), to=f"{to}.small"), to=f"{to}.tanh")
    return graph.add("Mul", bent, graph.number(cap), to=to)


# ------------------------------------------------------------------------------------------------ attention


def rotary_embedding(graph: GraphWriter, x: str, cosines: str, sines: str, heads: int, head_dim: int, rotated: int, to: str) -> str:
    """Turn element i and element i + R/2 of each head by an angle; of D elements the first R = `rotated`.

    (Su et al. 2021, arXiv:2104.09864.) x: [B, H, S, D]; cosines, sines: [B, S, R/2] -> [B, H, S, D]
    """
    if graph.opset >= 23:
        # num_heads says nothing new of x, but onnxruntime 1.23 wants it beside rotary_embedding_dim.
        partial: dict[str, Any] = {} if rotated == head_dim else {"rotary_embedding_dim": rotated, "num_heads": heads}
        return graph.add("RotaryEmbedding", x, cosines, sines, to=to, **partial)
    half = rotated // 2
    sizes = [half, half] if rotated == head_dim else [half, half, head_dim - rotated]
    a, b, *rest = split(graph, x, sizes, to=[f"{to}.part{index}" for index in range(len(sizes))])
    cos, sin = (_for_all_heads(graph, each) for each in (cosines, sines))  # [B, 1, S, R/2]
    first = graph.add("Sub", graph.add("Mul", a, cos, to=f"{to}.a_cos"), graph.add("Mul", b, sin, to=f"{to}.b_sin"), to=f"{to}.first")
    second = graph.add("Add", graph.add("Mul", b, cos, to=f"{to}.b_cos"), graph.add("Mul", a, sin, to=f"{to}.a_sin"), to=f"{to}.second")
    return graph.add("Concat", first, second, *rest, to=to, axis=-1)


def _for_all_heads(graph: GraphWriter, x: str) -> str:
    """[B, S, N] -> [B, 1, S, N], once however often it is asked for."""
    name = f"{x}.for_all_heads"
    return name if graph.is_written(name) else graph.add("Unsqueeze", x, graph.integers([1]), to=name)


def attention(
    graph: GraphWriter,
    query: str,
    key: str,
    value: str,
    mask: str,
    past: tuple[str, str] | None,
    present: tuple[str, str],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    cap: float | None,
    to: str,
) -> str:
    """softmax(scale · query · keyᵀ, masked) · value (Vaswani et al. 2017, arXiv:1706.03762); with a cap, scores are bent before the mask.

    query: [B, H, S, D]; key, value: [B, Hkv, S, D], each shared by H / Hkv heads; mask: [B, 1, S, T], true where a query may look
    past: keys and values that go before, [B, Hkv, P, D]. `present` names all of them together, [B, Hkv, T, D], and is written where there
    is a past; without one it's what `key` and `value` are called already.
    -> [B, H, S, D]
    """
    if graph.opset >= 23:
        capped: dict[str, Any] = {} if cap is None else {"softcap": float(cap)}
        options: dict[str, Any] = {"is_causal": 0, "scale": float(scale), **capped}
        if past is None:
            return graph.add("Attention", query, key, value, mask, to=to, **options)
        return graph.add("Attention", query, key, value, mask, *past, to=[to, *present], **options)

    if past is not None:
        key = graph.add("Concat", past[0], key, to=present[0], axis=2)
        value = graph.add("Concat", past[1], value, to=present[1], axis=2)
    if kv_heads != heads:
        key, value = (_repeat_heads(graph, each, heads, kv_heads, head_dim, to=f"{to}.{name}") for each, name in ((key, "k"), (value, "v")))
    transposed = graph.add("Transpose", key, to=f"{to}.k_transposed", perm=[0, 1, 3, 2])
    products = graph.add("MatMul", query, transposed, to=f"{to}.products")  # [B, H, S, T]
    scores = graph.add("Mul", products, graph.number(scale), to=f"{to}.scores")
    if cap is not None:
        scores = softcap(graph, scores, cap, to=f"{to}.capped")
    masked = graph.add("Add", scores, _bias_of_mask(graph, mask), to=f"{to}.masked")
    weights = graph.add("Softmax", masked, to=f"{to}.weights", axis=-1)
    return graph.add("MatMul", weights, value, to=to)


def _repeat_heads(graph: GraphWriter, x: str, heads: int, kv_heads: int, head_dim: int, to: str) -> str:
    """[B, Hkv, T, D] -> [B, H, T, D]: each head as often as there are queries that share it, one behind the other."""
    apart = graph.add("Unsqueeze", x, graph.integers([2]), to=f"{to}.apart")  # [B, Hkv, 1, T, D]
    copies = graph.add("Expand", apart, graph.integers([1, 1, heads // kv_heads, 1, 1]), to=f"{to}.copies")
    return graph.add("Reshape", copies, graph.integers([0, heads, -1, head_dim]), to=to)


def _bias_of_mask(graph: GraphWriter, mask: str) -> str:
    """0 where the mask is true, else MASKED: what is added to scores. Once for all layers."""
    name = f"{mask}.bias"
    return name if graph.is_written(name) else graph.add("Where", mask, graph.number(0), graph.number(MASKED), to=name)
