"""Every kernel of the provider: one module per family of ops, each with a table of its own."""

from __future__ import annotations

from importlib import import_module

from miniort.kernels import Kernel, KernelTable, merge_tables

FAMILIES = (
    "activation",
    "attention",
    "bitcast",
    "bitwise",
    "block_quantized",
    "cast",
    "comparison",
    "concatenation",
    "contrib_activation",
    "contrib_aliases",
    "contrib_attention",
    "contrib_convolution",
    "contrib_generation",
    "contrib_integer_matrix",
    "contrib_matrix",
    "contrib_normalization",
    "contrib_pooling",
    "contrib_quantized",
    "contrib_recurrent",
    "control_flow",
    "convolution",
    "cumulative_product",
    "detection",
    "einsum",
    "elementwise",
    "filtering",
    "flex_attention",
    "fused_convolution",
    "generation",
    "image_decoder",
    "image_normalization",
    "indexing",
    "integer_matrix",
    "limited_broadcast",
    "linear_algebra",
    "linear_attention",
    "logical",
    "loss",
    "matrix",
    "ml_categories",
    "ml_features",
    "ml_linear",
    "ml_maps",
    "ml_support_vectors",
    "ml_trees",
    "ngrams",
    "normalization",
    "one_hot",
    "optional",
    "ordering",
    "padding",
    "pooling",
    "quantization",
    "random_numbers",
    "rectification",
    "recurrent",
    "reduction",
    "resize",
    "rotary_embedding",
    "rounding",
    "sampling",
    "scatter",
    "selection",
    "sequence",
    "sequence_reversal",
    "shape",
    "signal",
    "smooth_activation",
    "softmax",
    "spatial",
    "sum_reduction",
    "tensor_scatter",
    "text",
    "training",
    "trigonometry",
)
"""Modules of this package, by family."""


def all_kernels() -> KernelTable:
    """One table with the kernels of all families. KernelError if two of them claim the same op, version and types."""
    return merge_tables("cpu", *(family_kernels(family) for family in FAMILIES))


def family_kernels(family: str) -> list[Kernel]:
    """The kernels of one family."""
    return list(import_module(f"miniort_cpu.kernels.{family}").kernels)
