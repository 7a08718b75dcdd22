"""The passes that every session runs, in their order."""

from __future__ import annotations

from miniort.graph.cleanup import CLEAN_UP
from miniort.graph.differentiation import DIFFERENTIATE
from miniort.graph.folding import FOLD_CONSTANTS, LIFT_CONSTANTS
from miniort.graph.functions import INLINE_FUNCTIONS
from miniort.graph.inference import INFER_TYPES
from miniort.graph.passes import GraphPass

STANDARD_PASSES: tuple[GraphPass, ...] = (
    INFER_TYPES,
    INLINE_FUNCTIONS,
    DIFFERENTIATE,
    LIFT_CONSTANTS,
    FOLD_CONSTANTS,
    CLEAN_UP,
    INFER_TYPES,
)
"""Plugins' passes run behind these; types are inferred again after them."""
