"""Random draws: RandomNormal, RandomUniform, their Like forms, Multinomial, Bernoulli, Dropout.

A node with the attribute `seed` draws the same numbers in every run, on every machine and in every release: those of NumPy's
`RandomState(seed)`, a Mersenne Twister (MT19937) whose streams NumPy keeps as they are. The numbers are drawn in float64, in
row-major order, and converted once. ONNX gives most seeds as floats; their integer part counts, modulo 2³². Without a seed each run draws
other numbers, from the system's entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from miniort.kernels import CompileKernel, KernelTable, NodeContext, Run
from miniort.types import Array, DType, dtype_from_onnx
from miniort_cpu.floating_point import FLOAT64, as_dtype, widen

kernels = KernelTable("cpu")

Draw: TypeAlias = Callable[[Sequence[int]], Array]
"""f(shape) -> that many draws, float64."""


def _generator(node: NodeContext) -> Callable[[], np.random.RandomState]:
    """A function that makes the generator for one run of a node."""
    seed = node.attribute("seed", None)
    if seed is None or seed != seed:
        return np.random.RandomState
    number = int(seed) % 2**32
    return lambda: np.random.RandomState(number)


def _normal(node: NodeContext) -> Draw:
    """Draws from the normal distribution of mean `mean` and standard deviation `scale`."""
    mean, scale, generator = node.attribute("mean", 0.0), node.attribute("scale", 1.0), _generator(node)
    return lambda shape: generator().standard_normal(tuple(shape)) * scale + mean


def _uniform(node: NodeContext) -> Draw:
    """Draws from [low, high), all equally likely."""
    low, high, generator = node.attribute("low", 0.0), node.attribute("high", 1.0), _generator(node)
    return lambda shape: generator().random_sample(tuple(shape)) * (high - low) + low


def _of_shape(distribution: Callable[[NodeContext], Draw]) -> CompileKernel:
    """A kernel for draws in the shape of an attribute. No input -> [*shape], of type `dtype`, float32 without it."""

    def compile_of_shape(node: NodeContext) -> Run:
        shape, dtype, draw = node.attribute("shape"), dtype_from_onnx(node.attribute("dtype", 1)), distribution(node)
        return lambda: np.asarray(draw(shape), dtype)

    return compile_of_shape


def _like(distribution: Callable[[NodeContext], Draw]) -> CompileKernel:
    """A kernel for draws in the shape of an input. x: [...] -> same shape, of type `dtype`, without it of x's own."""

    def compile_like(node: NodeContext) -> Run:
        wanted, draw = _wanted_dtype(node), distribution(node)
        return lambda x: np.asarray(draw(x.shape), wanted or x.dtype)

    return compile_like


def _wanted_dtype(node: NodeContext) -> DType | None:
    number = node.attribute("dtype", None)
    return None if number is None else dtype_from_onnx(number)


kernels.register("RandomNormal", versions=(1, None))(_of_shape(_normal))
kernels.register("RandomUniform", versions=(1, None))(_of_shape(_uniform))
kernels.register("RandomNormalLike", versions=(1, None), metadata_inputs=(0,))(_like(_normal))
kernels.register("RandomUniformLike", versions=(1, None), metadata_inputs=(0,))(_like(_uniform))


@kernels.register("Bernoulli", versions=(15, None))
def bernoulli(node: NodeContext) -> Run:
    """1 where a draw from [0, 1) lies below x, else 0. x: [...] probabilities -> same shape, of type `dtype`, without it of x's own."""
    wanted, generator = _wanted_dtype(node), _generator(node)
    return lambda x: np.asarray(generator().random_sample(x.shape) < x.astype(FLOAT64)).astype(wanted or x.dtype)


@kernels.register("Multinomial", versions=(7, None))
def multinomial(node: NodeContext) -> Run:
    """Classes drawn by their probabilities, where their distribution function passes a draw from [0, 1).

    x: [batch, classes] log probabilities, up to a constant -> [batch, sample_size] of type `dtype`, int32 without it
    """
    count, dtype, generator = node.attribute("sample_size", 1), dtype_from_onnx(node.attribute("dtype", 6)), _generator(node)

    def run(x: Array) -> Array:
        batch, classes = x.shape
        wide = x.astype(FLOAT64)
        distribution = np.cumsum(np.exp(wide - wide.max(1, keepdims=True)), 1)
        distribution /= distribution[:, -1:]
        draws = generator().random_sample((batch, count))
        rows = np.arange(batch)[:, None]  # row r of the distribution is moved to [r, r + 1], so that one search serves all rows
        found = np.searchsorted((distribution + rows).ravel(), (draws + rows).ravel(), side="right").reshape(batch, count)
        return np.asarray(np.minimum(found - rows * classes, classes - 1), dtype)

    return run


@kernels.register("Dropout", versions=(12, None), view_of=0)
def dropout(node: NodeContext) -> Run:
    """`x` · mask / (1 - ratio), where a mask of ones loses each element with probability `ratio`; x itself unless in training.

    x: [...] float; ratio: [], 0.5 if absent; training: [] bool, False if absent -> y: same shape as x; mask: same shape, bool
    """
    generator, wants_mask = _generator(node), _wants_mask(node)

    def run(x: Array, ratio: Array | None = None, training: Array | None = None) -> Array | tuple[Array, Array]:
        probability = 0.5 if ratio is None else float(ratio.item())
        if training is None or not training.item() or probability == 0:
            return (x, np.ones(x.shape, np.bool_)) if wants_mask else x
        mask = np.asarray(generator().random_sample(x.shape) >= probability)
        wide = widen(x)
        y = np.multiply(wide, wide.dtype.type(1 / (1 - probability)), out=...)
        return as_dtype(np.multiply(y, mask, out=y), x.dtype), mask

    return run


@kernels.register("Dropout", versions=(7, 11), view_of=0)
def dropout_inference(node: NodeContext) -> Run:
    """`x` itself, and a mask of ones: these versions are for inference alone. x: [...] float -> x; mask: same shape.

    The mask is of x's type in version 7, and bool from version 10.
    """
    in_type_of_x = node.version < 10
    if not _wants_mask(node):
        return lambda x: x
    return lambda x: (x, np.ones(x.shape, x.dtype if in_type_of_x else np.bool_))


def _wants_mask(node: NodeContext) -> bool:
    return len(node.outputs) > 1 and node.outputs[1] is not None
