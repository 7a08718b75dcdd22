"""Random inputs for a model, of the types and shapes that it declares."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from miniort.errors import InputError
from miniort.model.constants import shape_of
from miniort.types import STRING, Array, DType, dtype_from_onnx, format_shape


def random_feeds(graph: ir.Graph, sizes: Mapping[str, int], seed: int, given: Collection[str] = ()) -> dict[str, Array]:
    """An array for each input without a default. Floats are normal numbers. Integers are 0 or 1, which may be looked up in any table.

    sizes: those of symbolic axes by name; 1 for what isn't named, or has no name. given: inputs that nothing has to be made up for.
    InputError for an input that is no tensor, or of text, for a name in `sizes` that no input has, and for a negative size.
    """
    inputs = [value for value in graph.inputs if value.const_value is None and value.name not in given]
    known = {size for value in graph.inputs for size in shape_of(value) or () if isinstance(size, str)}
    for name, size in sizes.items():
        if name not in known:
            raise InputError(f"no input has a size named {name!r}; the sizes with names: {', '.join(sorted(known)) or 'none'}")
        if size < 0:
            raise InputError(f"the size {name!r} must not be negative, found {size}")
    rng = np.random.default_rng(seed)
    return {value.name or "": _random_input(value, sizes, rng) for value in inputs}


def _random_input(value: ir.Value, sizes: Mapping[str, int], rng: np.random.Generator) -> Array:
    is_tensor = isinstance(value.type, ir.TensorType) and value.dtype is not None
    dtype = dtype_from_onnx(int(value.dtype)) if is_tensor and value.dtype is not None else STRING
    shape = shape_of(value) if is_tensor else None
    if dtype == STRING or shape is None:
        kind = f"{value.type} of shape {format_shape(shape)}" if is_tensor else f"{value.type}"
        raise InputError(f"input {value.name!r} ({kind}) can't be made up; give it as a file")
    return random_array(dtype, tuple(size if isinstance(size, int) else sizes.get(size or "", 1) for size in shape), rng)


def random_array(dtype: DType, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Normal numbers, or 0 and 1 for a type without fractions."""
    if dtype.kind in "fVc":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def with_given(feeds: Mapping[str, Array], given: Mapping[str, Any], graph: ir.Graph) -> dict[str, Any]:
    """The feeds, with those that were given in place of the random ones. InputError for an input that the model doesn't have."""
    names = [value.name or "" for value in graph.inputs]
    for name in given:
        if name not in names:
            raise InputError(f"the model has no input {name!r}; its inputs: {', '.join(names) or 'none'}")
    return {**feeds, **given}
