"""Weights in a GGUF file, by Hugging Face's names and in its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miniort.errors import ModelError
from miniort.types import Array
from miniort_models.weights.gguf_architectures import ARCHITECTURES, CONFIGURING
from miniort_models.weights.gguf_blocks import KEPT_TYPES, to_block_quantised
from miniort_models.weights.gguf_header import GgufHeader, GgufTensor, read_header
from miniort_models.weights.source import BlockQuantised

if TYPE_CHECKING:
    import gguf

_FLOAT32, _FLOAT16, _BFLOAT16 = 0, 1, 30
"""ggml's numbers of the types that aren't quantised."""


def open_gguf(path: Path) -> GgufFile:
    """A GGUF file, mapped into memory. ModelError if it's damaged, or of an architecture or with a tensor that isn't known."""
    return GgufFile(read_header(path))


class GgufFile:
    """A `WeightSource` over a GGUF file; see `open_gguf`.

    What llama.cpp's converter did is undone: names, the order of the rows of queries and keys (llama), Gemma's norms with 1 added, weights
    that GPT-2 has as [in, out]. Nothing is read before it's asked for.
    """

    def __init__(self, header: GgufHeader) -> None:
        known = ARCHITECTURES.get(header.architecture)
        if known is None:
            raise ModelError(
                f"{header.path} is a GGUF file of the architecture {header.architecture!r}; known are {', '.join(sorted(ARCHITECTURES))}"
            )
        self.header = header
        self._architecture = known
        self._config = known.config(header)
        self._tensors = self._by_hugging_face_names()
        self._check_sizes()

    @property
    def name(self) -> str:
        """The path."""
        return str(self.header.path)

    @property
    def config(self) -> Mapping[str, Any]:
        """The metadata in the words of a `config.json`."""
        return self._config

    def names(self) -> Sequence[str]:
        """Hugging Face's name of every weight."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A weight's shape; KeyError if there is none."""
        shape = self._tensors[name].shape
        return shape[::-1] if name.endswith(self._architecture.transposed or ("\0",)) else shape

    def read(self, name: str) -> Array:
        """A weight as float32, float16 or bfloat16; quantised ones as float32. Views of the mapped file, where nothing has to be undone.

        KeyError if there is none, ModelError for a type of quantisation that the gguf package doesn't know either.
        """
        tensor = self._tensors[name]
        weight = self._unquantised(tensor)
        rows = self._architecture.rows(name, self._config)
        if rows is not None:
            weight = weight[rows]
        shift = self._architecture.shifted(name)
        if shift:
            weight = weight - weight.dtype.type(shift)
        return weight.T if name.endswith(self._architecture.transposed or ("\0",)) else weight

    def read_blocks(self, name: str) -> BlockQuantised | None:
        """A quantised matrix as the file has it; None for one that isn't, and for types that `MatMulNBits` can't say.

        Its rows are output features, whatever the shape of the weight is for Hugging Face.
        """
        tensor = self._tensors[name]
        if tensor.type not in KEPT_TYPES or len(tensor.shape) != 2:
            return None
        blocks = self._bytes(tensor).reshape(tensor.shape[0], -1, self._sizes_of(tensor)[1])
        rows = self._architecture.rows(name, self._config)
        return to_block_quantised(blocks if rows is None else blocks[rows], tensor.type)

    def _by_hugging_face_names(self) -> dict[str, GgufTensor]:
        layers = range(int(self._config.get("num_hidden_layers") or self._config["n_layer"]))
        ours: dict[str, str] = {}
        for name, said in self._architecture.names.items():
            for layer in layers if "{}" in name else (0,):
                ours |= {f"{said.format(layer)}.{part}": f"{name.format(layer)}.{part}" for part in ("weight", "bias")}
        unknown = sorted(self.header.tensors.keys() - ours.keys() - CONFIGURING)
        if unknown:
            listed = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
            raise ModelError(f"{self.name}: a decoder of the architecture {self.header.architecture!r} has no tensor {listed}")
        return {ours[name]: tensor for name, tensor in self.header.tensors.items() if name not in CONFIGURING}

    def _check_sizes(self) -> None:
        end = self.header.path.stat().st_size
        for name, tensor in self.header.tensors.items():
            block, size = self._sizes_of(tensor)
            if not tensor.shape or tensor.shape[-1] % block:
                raise ModelError(f"{self.name}: {name} has the shape {list(tensor.shape)}, which isn't whole blocks of {block}")
            if tensor.offset + tensor.size // block * size > end:
                raise ModelError(f"{self.name} is cut short: {name} lies beyond its end; get it again")

    @cached_property
    def _file(self) -> np.memmap[Any, np.dtype[np.uint8]]:
        return np.memmap(self.header.path, np.uint8, mode="r")

    def _bytes(self, tensor: GgufTensor) -> Array:
        block, size = self._sizes_of(tensor)
        data: Array = self._file[tensor.offset : tensor.offset + tensor.size // block * size].view(np.ndarray)
        return data

    def _unquantised(self, tensor: GgufTensor) -> Array:
        data = self._bytes(tensor)
        if tensor.type in (_FLOAT32, _FLOAT16):
            return data.view(np.float32 if tensor.type == _FLOAT32 else np.float16).reshape(tensor.shape)
        if tensor.type == _BFLOAT16:
            from ml_dtypes import bfloat16

            half: Array = data.view(bfloat16).reshape(tensor.shape)
            return half
        from gguf.quants import dequantize

        kind = _ggml_type(tensor, self.name)
        try:
            return dequantize(data.reshape(*tensor.shape[:-1], -1), kind).reshape(tensor.shape).astype(np.float32, copy=False)
        except NotImplementedError:
            raise ModelError(
                f"{self.name} has weights of the type {kind.name}, which nothing here can dequantise; get another file"
            ) from None

    def _sizes_of(self, tensor: GgufTensor) -> tuple[int, int]:
        """How many elements a block has, and how many bytes."""
        if tensor.type in _BLOCKS:
            return _BLOCKS[tensor.type]
        from gguf.constants import GGML_QUANT_SIZES

        return GGML_QUANT_SIZES[_ggml_type(tensor, self.name)]


_BLOCKS = {0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 12: (256, 144), 13: (256, 176), 14: (256, 210)}
"""Elements and bytes of a block of the common types, so that a model that is converted already needs no import of gguf."""


def _ggml_type(tensor: GgufTensor, path: str) -> gguf.GGMLQuantizationType:
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(tensor.type)
    except ValueError:
        raise ModelError(f"{path} has tensors of ggml's type {tensor.type}, which is unknown here; update the gguf package") from None
