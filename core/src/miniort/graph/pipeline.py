"""The passes that every session runs, in their order."""

from __future__ import annotations

from miniort.graph.attention import RAISE_ATTENTION
from miniort.graph.channel_scales import MERGE_CHANNEL_SCALES
from miniort.graph.cleanup import CLEAN_UP, CLEAN_UP_AGAIN
from miniort.graph.convolution_fusion import FUSE_CONVOLUTIONS
from miniort.graph.convolution_weights import FOLD_INTO_CONVOLUTIONS, FOLD_INTO_NEXT_CONVOLUTIONS
from miniort.graph.differentiation import DIFFERENTIATE
from miniort.graph.einsum import RAISE_EINSUM
from miniort.graph.elementwise_fusion import FUSE_ELEMENTWISE
from miniort.graph.folding import FOLD_CONSTANTS, FOLD_CONSTANTS_AGAIN, LIFT_CONSTANTS
from miniort.graph.functions import INLINE_FUNCTIONS
from miniort.graph.gelu import RAISE_GELU
from miniort.graph.hard_activation import RAISE_HARD_ACTIVATIONS
from miniort.graph.inference import INFER_TYPES
from miniort.graph.layer_normalization import RAISE_LAYER_NORMALIZATION
from miniort.graph.linear import RAISE_LINEAR
from miniort.graph.merged_products import MERGE_PRODUCTS
from miniort.graph.narrowing import NARROW
from miniort.graph.opset_conversion import BOUND_OPSET, UNIFY_OPSETS
from miniort.graph.passes import GraphPass
from miniort.graph.rms_normalization import RAISE_RMS_NORMALIZATION
from miniort.graph.rotary_embedding import RAISE_ROTARY_EMBEDDING
from miniort.graph.shape_arithmetic import REMOVE_SHAPE_ARITHMETIC
from miniort.graph.swish import RAISE_SWISH
from miniort.graph.tied_weights import TIE_WEIGHTS
from miniort.graph.unique_names import UNIQUE_NAMES

STANDARD_PASSES: tuple[GraphPass, ...] = (
    INFER_TYPES,
    INLINE_FUNCTIONS,
    DIFFERENTIATE,
    LIFT_CONSTANTS,
    FOLD_CONSTANTS,
    CLEAN_UP,
    INFER_TYPES,
    REMOVE_SHAPE_ARITHMETIC,
    FOLD_CONSTANTS_AGAIN,
    CLEAN_UP_AGAIN,
    FOLD_INTO_CONVOLUTIONS,
    BOUND_OPSET,
    RAISE_EINSUM,
    RAISE_LINEAR,
    RAISE_LAYER_NORMALIZATION,
    RAISE_RMS_NORMALIZATION,
    RAISE_GELU,
    RAISE_SWISH,
    RAISE_HARD_ACTIVATIONS,
    RAISE_ROTARY_EMBEDDING,
    RAISE_ATTENTION,
    REMOVE_SHAPE_ARITHMETIC,  # an Attention's shape is known where that of its long form depended on the mask's
    CLEAN_UP_AGAIN,
    NARROW,  # before products are merged: what's cut off one of them alone isn't computed
    MERGE_PRODUCTS,
    TIE_WEIGHTS,
    FOLD_INTO_NEXT_CONVOLUTIONS,
    MERGE_CHANNEL_SCALES,
    UNIFY_OPSETS,
    FUSE_CONVOLUTIONS,
    UNIQUE_NAMES,
)
"""Plugins' passes run behind these; types are inferred again after them."""

LAST_PASSES: tuple[GraphPass, ...] = (FUSE_ELEMENTWISE,)
"""These run when everybody has looked for what they know: they hide ops that others search for."""
