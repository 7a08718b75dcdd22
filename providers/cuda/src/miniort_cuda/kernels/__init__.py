"""All kernels of the provider, by families of ops. Each is written with the functions that its node's provider names."""

from __future__ import annotations

from miniort.kernels import KernelTable, merge_tables
from miniort_cuda.kernels import (
    activation,
    attention,
    block_quantized,
    cache,
    contrib_attention,
    convolution,
    elementwise,
    filling,
    fused_convolution,
    fused_elementwise,
    indexing,
    matrix,
    normalization,
    pooling,
    quantization,
    reduction,
    resize,
    rotary_embedding,
    shape,
)

FAMILIES = {
    "activation": activation.kernels,
    "attention": merge_tables("cuda", attention.kernels, cache.kernels, contrib_attention.kernels, rotary_embedding.kernels),
    "convolution": merge_tables("cuda", convolution.kernels, fused_convolution.kernels, pooling.kernels, resize.kernels),
    "elementwise": merge_tables("cuda", elementwise.kernels, fused_elementwise.kernels),
    "matrix": matrix.kernels,
    "normalization": normalization.kernels,
    "quantization": merge_tables("cuda", quantization.kernels, block_quantized.kernels),
    "reduction": reduction.kernels,
    "shape": merge_tables("cuda", shape.kernels, indexing.kernels, filling.kernels),
}
"""Kernels by what they do."""

KERNELS: KernelTable = merge_tables("cuda", *FAMILIES.values())
