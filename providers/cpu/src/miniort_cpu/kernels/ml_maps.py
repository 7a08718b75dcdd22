"""Maps, which are Python dicts, of the domain ai.onnx.ml: CastMap, DictVectorizer, ZipMap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import STRING, Array, DType

kernels = KernelTable("cpu")

DOMAIN = "ai.onnx.ml"

CASTS: dict[str, DType] = {"TO_FLOAT": np.dtype(np.float32), "TO_INT64": np.dtype(np.int64), "TO_STRING": STRING}


@kernels.register("CastMap", versions=(1, None), domain=DOMAIN)
def cast_map(node: NodeContext) -> Run:
    """The values of a map in order of its keys (DENSE), or each at the place that its key says, between zeros or empty text (SPARSE).

    map from int64 -> [1, number of keys], or [1, max_map]
    """
    form, cast_to = node.attribute("map_form", "DENSE"), node.attribute("cast_to", "TO_FLOAT")
    length = node.attribute("max_map", 1)
    if form not in ("DENSE", "SPARSE") or cast_to not in CASTS:
        raise KernelError(f"node {node.name!r} (CastMap): map_form must be DENSE or SPARSE and cast_to TO_FLOAT, TO_INT64 or TO_STRING")
    dtype = CASTS[cast_to]

    def run(values: Mapping[int, Any]) -> Array:
        keys = sorted(values)
        places = keys if form == "SPARSE" else range(len(keys))
        out = np.full((1, length if form == "SPARSE" else len(keys)), "" if dtype == STRING else 0, dtype)
        for place, key in zip(places, keys, strict=True):
            if not 0 <= place < out.shape[1]:
                raise IndexError(f"CastMap's keys must lie in [0, {out.shape[1]}), its max_map; found {key}")
            out[0, place] = _as_text(values[key]) if dtype == STRING else dtype.type(float(values[key]))
        return out

    return run


def _as_text(value: Any) -> str:
    """A number in its shortest form that reads back as the same float32; text as it is."""
    return value if isinstance(value, str) else str(np.float32(value))


@kernels.register("DictVectorizer", versions=(1, None), domain=DOMAIN)
def dict_vectorizer(node: NodeContext) -> Run:
    """The value of each key of the vocabulary, zero or empty text for those that the map lacks. map -> [vocabulary].

    The type is the output's where the model says it, else that of the values: int64, text, or float32.
    """
    words, numbers = node.attribute("string_vocabulary", ()), node.attribute("int64_vocabulary", ())
    vocabulary = words or numbers
    known = frozenset(vocabulary)
    output = node.outputs[0]
    declared = None if output is None else output.dtype

    def run(values: Mapping[Any, Any]) -> Array:
        unknown = [key for key in values if key not in known]
        if unknown:
            raise KeyError(f"DictVectorizer's vocabulary lacks the key {unknown[0]!r}")
        dtype = declared or _dtype_of(values)
        nothing = "" if dtype == STRING else 0
        return np.array([values.get(key, nothing) for key in vocabulary], dtype)

    return run


def _dtype_of(values: Mapping[Any, Any]) -> DType:
    sample = next(iter(values.values()), 0.0)
    if isinstance(sample, str):
        return STRING
    if isinstance(sample, np.generic):
        return sample.dtype
    return np.dtype(np.int64 if isinstance(sample, int) else np.float32)


@kernels.register("ZipMap", versions=(1, None), domain=DOMAIN)
def zip_map(node: NodeContext) -> Run:
    """A map from labels to values for each row. x: [N, C], or [C] for one row, float32 -> a list of dicts from int or str to float."""
    labels = node.attribute("classlabels_strings", ()) or node.attribute("classlabels_int64s", ())

    def run(x: Array) -> list[dict[Any, float]]:
        rows = np.atleast_2d(x)
        if rows.shape[1] != len(labels):
            raise ValueError(f"ZipMap needs a column for each of its {len(labels)} labels, found {list(x.shape)}")
        return [dict(zip(labels, row, strict=True)) for row in rows.tolist()]

    return run
