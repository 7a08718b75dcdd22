"""Categories by name and by number, of the domain ai.onnx.ml: CategoryMapper, LabelEncoder, OneHotEncoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import STRING, Array, IntArray

kernels = KernelTable("cpu")

DOMAIN = "ai.onnx.ml"

Find: TypeAlias = Callable[[Array], IntArray]
"""f(x [...]) -> the place of each element among the keys, -1 if it isn't one; the last place of a repeated key."""


def finder(keys: Array) -> Find:
    """How to find the elements of a tensor among keys [K]. NaN is found as NaN."""
    if keys.dtype == STRING:
        places = {key: place for place, key in enumerate(keys.tolist())}
        return lambda x: np.array([places.get(item, -1) for item in x.ravel().tolist()], np.int64).reshape(x.shape)
    known, last = np.unique(keys[::-1], return_index=True)
    last = keys.size - 1 - last

    def find(x: Array) -> IntArray:
        if not keys.size:
            return np.full(x.shape, -1)
        place = np.minimum(np.searchsorted(known, x), known.size - 1)
        equal = (known[place] == x) | ((known[place] != known[place]) & (x != x))
        return np.where(equal, last[place], -1)

    return find


def _mapping(keys: Array, values: Array, default: Any) -> Run:
    """A kernel for the value of each element's key. keys, values: [K] of any types; x: [...] -> same shape, of the values' type."""
    if keys.size != values.size:
        raise KernelError(f"a mapping needs as many values as keys, found {values.size} and {keys.size}")
    find = finder(keys)
    with_default = np.append(values, np.array([default], values.dtype))  # place -1 is the default

    def run(x: Array) -> Array:
        return np.asarray(with_default[find(x)], values.dtype)  # which of a scalar x would be the value itself

    return run


def _both_ways(node: NodeContext, numbers: Array, words: Array) -> Run:
    """A kernel for words to numbers, or numbers to words, whichever x holds."""
    to_numbers = _mapping(words, numbers, node.attribute("default_int64", -1))
    to_words = _mapping(numbers, words, node.attribute("default_string", "_Unused"))
    return lambda x: (to_numbers if x.dtype == STRING else to_words)(x)


@kernels.register("CategoryMapper", versions=(1, None), domain=DOMAIN)
def category_mapper(node: NodeContext) -> Run:
    """Words to the numbers at the same places, or back; a default for those that aren't listed. x: [...] text or int64 -> same shape."""
    numbers, words = np.array(node.attribute("cats_int64s", ()), np.int64), np.array(node.attribute("cats_strings", ()), STRING)
    return _both_ways(node, numbers, words)


@kernels.register("LabelEncoder", versions=(1, 1), domain=DOMAIN)
def label_encoder_of_classes(node: NodeContext) -> Run:
    """Words to their places in `classes_strings`, or places to words. x: [...] text or int64 -> same shape."""
    words = np.array(node.attribute("classes_strings", ()), STRING)
    return _both_ways(node, np.arange(words.size), words)


KINDS = {"strings": STRING, "int64s": np.dtype(np.int64), "floats": np.dtype(np.float32)}
DEFAULTS: dict[str, tuple[str, Any]] = {
    "strings": ("default_string", "_Unused"),
    "int64s": ("default_int64", -1),
    "floats": ("default_float", -0.0),
}


def _listed(node: NodeView, prefix: str) -> tuple[str, Array]:
    """The one list that the node has of `prefix`_strings, _int64s, _floats and _tensor, and what kind it is."""
    tensor: Array | None = node.attribute(f"{prefix}_tensor", None)
    if tensor is not None:
        return "tensor", tensor.reshape(-1)
    for kind, dtype in KINDS.items():
        values = node.attribute(f"{prefix}_{kind}", None)
        if values is not None:
            return kind, np.array(values, dtype)
    raise KernelError(f"node {node.name!r} (LabelEncoder) has none of {prefix}_strings, {prefix}_int64s, {prefix}_floats, {prefix}_tensor")


@kernels.register("LabelEncoder", versions=(2, None), domain=DOMAIN)
def label_encoder(node: NodeContext) -> Run:
    """For each element the value of its key, or a default; of a repeated key the last one's. x: [...] -> same shape, the values' type."""
    _, keys = _listed(node, "keys")
    kind, values = _listed(node, "values")
    if kind == "tensor":
        default = "_Unused" if values.dtype == STRING else -1 if values.dtype.kind in "iu" else -0.0
        given: Array | None = node.attribute("default_tensor", None)
        return _mapping(keys, values, default if given is None else given.reshape(-1)[0])
    return _mapping(keys, values, node.attribute(*DEFAULTS[kind]))


@kernels.register("OneHotEncoder", versions=(1, None), domain=DOMAIN)
def one_hot_encoder(node: NodeContext) -> Run:
    """A new last axis with a 1 at the place of each element's category; all zeros for an unknown one, an error if not `zeros`.

    x: [...] text or number (its integer part counts) -> [..., categories] float32
    """
    words, numbers = node.attribute("cats_strings", ()), node.attribute("cats_int64s", ())
    categories = np.array(words, STRING) if words else np.array(numbers, np.int64)
    find, allow_unknown = finder(categories), bool(node.attribute("zeros", 1))

    def run(x: Array) -> Array:
        places = find(x if x.dtype == STRING else x.astype(np.int64))
        if not allow_unknown and (places < 0).any():
            raise ValueError(
                f"OneHotEncoder found {x[places < 0][0]!r}, which is none of its {categories.size} categories; zeros=1 allows it"
            )
        return np.equal(places[..., None], np.arange(categories.size)).astype(np.float32)

    return run
