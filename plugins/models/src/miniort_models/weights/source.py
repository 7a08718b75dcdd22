"""What the builders of graphs ask of the weights of a decoder, whatever file they lie in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miniort.types import Array


@dataclass(frozen=True)
class BlockQuantised:
    """A matrix [rows, columns] that is kept as small integers: `weight = (code - zero_point) * scale`, a block of columns at a time.

    The form is that of onnxruntime's `MatMulNBits`, whose rows are output features.

    codes: [rows, blocks, block_size * bits / 8] uint8; where bits is 4, the lower half of a byte comes first.
    scales: [rows, blocks] float32.
    zero_points: [rows, blocks] float32, None where all are `2 ** (bits - 1)`.
    """

    codes: Array
    scales: Array
    zero_points: Array | None
    bits: int
    block_size: int


class WeightSource(Protocol):
    """Weights by the names that Hugging Face's `transformers` gives them, and the `config.json` that goes with them."""

    @property
    def name(self) -> str:
        """What messages call it: a path, or a name on a hub."""

    @property
    def config(self) -> Mapping[str, Any]:
        """A parsed `config.json`; a file of another form (GGUF) is put into its words."""

    def names(self) -> Sequence[str]:
        """Every weight there is."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A weight's shape, without reading it."""

    def read(self, name: str) -> Array:
        """A weight as float32, float16 or bfloat16 (that of ml_dtypes), mapped into memory where the file's form allows it.

        KeyError if there is none. Quantised weights come out as float32.
        """

    def read_blocks(self, name: str) -> BlockQuantised | None:
        """A weight as its file quantised it, None where it didn't."""
