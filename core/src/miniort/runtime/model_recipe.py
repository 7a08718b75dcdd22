"""What a session makes its model of: a file, something in memory, or files of which somebody makes a graph first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from miniort.model.loading import ModelLike, load_model
from miniort.model.weights import WeightStore


@dataclass(frozen=True)
class ModelRecipe:
    """A model that's made when it's needed, which it isn't where the optimised graph is on disk already.

    make: gives the model, and what its maker wants to know of it afterwards, as JSON has it; the session hands that back as `notes`.
    files: the model files that it's made of; none for a model in memory, of which nothing is kept.
    folder: where the model's external data is looked for.
    what: tells what `make` makes of these files from anything else that's made of them.
    """

    make: Callable[[], tuple[ir.Model, Mapping[str, Any]]]
    files: tuple[Path, ...] = ()
    folder: Path | None = None
    what: str = ""


def recipe_of(model: ModelLike | ModelRecipe, base_dir: str | os.PathLike[str] | None, weights: WeightStore) -> ModelRecipe:
    """The recipe of a model that is only loaded; one that's given stays as it is."""
    if isinstance(model, ModelRecipe):
        return model

    def make() -> tuple[ir.Model, Mapping[str, Any]]:
        return load_model(model, base_dir, weights), {}

    if not isinstance(model, str | os.PathLike):
        return ModelRecipe(make)
    path = Path(model)
    return ModelRecipe(make, (path,), path.parent if base_dir is None else Path(base_dir))
