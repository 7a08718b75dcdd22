"""A cache on disk, so that a long prompt is paid for once: its tokens, its keys and values by layer, and which model made them.

It's a safetensors file with `tokens` and `mask` [batch, time], `positions` [kept], and for each layer `layers.N.key` and `layers.N.value`
[batch, kv heads, kept, dim], whatever layout they came from. Its metadata name the format, the model, and the model's fingerprint.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, cast

import numpy as np

from miniort.errors import CacheError, GenerationError
from miniort.generation.cache import KVCache, layer_contents
from miniort.generation.decoder import Decoder
from miniort.generation.generator import Generator
from miniort.model.loading import load_model
from miniort.types import Array, DType, IntArray

FORMAT = "miniort cache 1"


def fingerprint(decoder: Decoder) -> str:
    """What tells models apart: a hash of a decoder's graph files and of all weights, wherever these lie."""
    digest = hashlib.blake2b(digest_size=16)
    for path in decoder.source.graphs:
        digest.update(Path(path).read_bytes())
        for graph in load_model(path, weights=decoder.weights).graphs():
            for name, value in sorted(graph.initializers.items()):
                if value.const_value is not None:
                    weight = np.ascontiguousarray(value.const_value.numpy())
                    digest.update(f"{name} {weight.dtype} {weight.shape}".encode())
                    # NumPy's text has no buffer of bytes; it's no weight of any size either.
                    data = repr(weight.tolist()).encode() if weight.dtype.hasobject else cast(Any, weight.reshape(-1).view(np.uint8))
                    digest.update(data)
    return digest.hexdigest()


def save_cache(generator: Generator, path: str | os.PathLike[str]) -> None:
    """Write a generator's tokens and cache to a file, for `load_cache`. A file of that name is replaced only when all is written.

    GenerationError if the generator has no cache, or nothing was given to it yet. CacheError if the file can't be written.
    """
    from safetensors.numpy import save_file

    cache = generator.cache
    if cache is None:
        raise GenerationError("there is no cache to save: the generator computes the whole history in every step")
    if cache.length == 0:
        raise GenerationError("there is nothing to save yet: the cache holds no tokens")
    if cache.length == generator.tokens.shape[1]:  # a loaded generator has to run a token, to have logits
        cache = cache.fork()
        cache.crop(cache.length - 1)
    decoder = generator.decoder
    spec = decoder.cache_spec(len(generator.tokens))
    tensors: dict[str, Array] = {"tokens": generator.tokens, "mask": generator.mask, "positions": cache.positions()}
    for layer in range(spec.layers):
        for kind, view in zip(("key", "value"), layer_contents(cache, spec, layer), strict=True):
            tensors[f"layers.{layer}.{kind}"] = _as_bytes(np.asarray(view))
    metadata = {
        "format": FORMAT,
        "model": decoder.source.name,
        "fingerprint": fingerprint(decoder),
        "length": str(cache.length),
        "prompt_length": str(generator.prompt_length),
        "dtype": str(spec.dtype),
    }
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        try:
            save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, part, metadata)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"{target}: the cache can't be written: {error.strerror or error}") from error
    except Exception as error:  # safetensors wraps what the system says in an exception of its own
        raise CacheError(f"{target}: the cache can't be written: {error}") from error


def load_cache(generator: Generator, path: str | os.PathLike[str]) -> None:
    """Give a generator without tokens the tokens and the cache of a file. Its layout needn't be the one that the file was saved from.

    From a layout that lets go of tokens only one that keeps no others can take over; it can then be rewound no further than where it was.
    CacheError if the file is missing, damaged or no such file, or of another model, which it names.
    """
    from safetensors import SafetensorError, safe_open

    if generator.cache is None:
        raise GenerationError("there is no cache to load into: the generator computes the whole history in every step")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CacheError(
                    f"{os.fspath(path)}: no cache that this version of miniort saved; its format is {metadata.get('format')!r}"
                )
            _check_model(generator.decoder, metadata, path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it's no dict
    except (OSError, SafetensorError) as error:
        raise CacheError(f"{os.fspath(path)}: can't be read as a saved cache: {error}") from None
    try:
        length, prompt_length = int(metadata["length"]), int(metadata["prompt_length"])
        tokens, mask, positions = (tensors[name] for name in ("tokens", "mask", "positions"))
        _fill(generator, tensors, tokens, mask, positions, length, prompt_length)
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise CacheError(f"{os.fspath(path)}: the saved cache is incomplete: {error}") from None


def _check_model(decoder: Decoder, metadata: dict[str, str], path: str | os.PathLike[str]) -> None:
    own = fingerprint(decoder)
    if metadata.get("fingerprint") != own:
        raise CacheError(
            f"{os.fspath(path)}: a cache of another model, {metadata.get('model')!r} ({metadata.get('fingerprint')}); "
            f"this is {decoder.source.name!r} ({own})"
        )


def _fill(
    generator: Generator, tensors: dict[str, Array], tokens: IntArray, mask: IntArray, positions: IntArray, length: int, prompt_length: int
) -> None:
    """Put the layers into an empty cache. Where tokens are missing, NaN stands for them: a layout that kept one would show it."""
    decoder, empty = generator.decoder, generator.cache
    assert empty is not None
    if empty.length:
        raise GenerationError(f"the cache holds {empty.length} tokens already; load into an empty one")
    cache: KVCache = empty.fork()  # what fails leaves the generator as it was
    spec = decoder.cache_spec(len(tokens))
    for layer in range(spec.layers):
        whole = []
        for kind, dim in (("key", spec.head_dim), ("value", spec.value_head_dim)):
            part = _from_bytes(tensors[f"layers.{layer}.{kind}"], spec.dtype)
            array = np.full((spec.batch, spec.kv_heads, length, dim), np.nan, spec.dtype)
            array[:, :, positions] = part
            whole.append(array)
        cache.append(layer, *whole)
    cache.commit(length)
    missing = np.setdiff1d(cache.positions(), positions)
    if missing.size:
        raise CacheError(
            f"the saved cache had let go of tokens that this layout keeps, the first at position {missing[0]}; "
            "use the layout that it was saved from, with the same options"
        )
    generator.adopt(cache, tokens, mask, prompt_length, shortest=length if len(positions) < length else 0)


def _as_bytes(array: Array) -> Array:
    """Element types that safetensors doesn't know from NumPy, such as bfloat16, as unsigned integers of their size."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _from_bytes(array: Array, dtype: DType) -> Array:
    return array if dtype.isbuiltin == 1 else array.view(dtype)
