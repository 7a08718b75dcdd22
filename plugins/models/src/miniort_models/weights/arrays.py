"""Weights that are in memory already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miniort.types import Array
from miniort_models.weights.source import BlockQuantised


@dataclass(frozen=True)
class WeightArrays:
    """A `WeightSource` of arrays, by the names that Hugging Face gives them. `name` is what messages call it."""

    name: str
    config: Mapping[str, Any]
    arrays: Mapping[str, Array]

    def names(self) -> Sequence[str]:
        """Every weight there is."""
        return list(self.arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        """A weight's shape."""
        return self.arrays[name].shape

    def read(self, name: str) -> Array:
        """A weight as it is."""
        return self.arrays[name]

    def read_blocks(self, name: str) -> BlockQuantised | None:
        """None: arrays are floats."""
        return None
