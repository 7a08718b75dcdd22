"""The entry point of miniort-models. Nothing that costs start-up time is imported before a hook is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniort.plugins import hookimpl

if TYPE_CHECKING:
    from miniort.generation.sources import Architecture, ModelFormat


@hookimpl
def miniort_model_formats() -> list[ModelFormat]:
    """The model formats of this package."""
    from miniort_models.formats import MODEL_FORMATS

    return list(MODEL_FORMATS)


@hookimpl
def miniort_architectures() -> list[Architecture]:
    """The architectures of this package."""
    from miniort_models.architectures import ARCHITECTURES

    return list(ARCHITECTURES)
