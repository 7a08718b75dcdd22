"""Time of one step's append and attention, and bytes, for each cache layout as the context grows.

    uv run python benchmarks/cache_layouts.py [--contexts 128,1024,4096] [--batch 1] [--heads 12] [--kv-heads 12] [--dim 64] [--rounds 15]

One layer: new keys and values go into the cache, and attention reads all of them, as in a decoder. Layouts take turns within each round, in
one process; figures are medians over the rounds. `ratio` is the time of `concat_bhtd` divided by the layout's: above 1, it is faster.
"""

from __future__ import annotations

import os

# These pick an older, slower kernel of OpenBLAS where they're set; a benchmark wants the one for this processor.
for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(variable, None)

import argparse
import time
from statistics import median

import numpy as np
from onnx import TensorProto, helper

from miniort import InferenceSession
from miniort.generation import CacheLayoutInfo, CacheSpec, KVCache
from miniort.generation.join import CACHE_APPEND
from miniort.plugins import collect_mapping, create_plugin_manager
from miniort.types import FloatArray

FILL = 64  # tokens of a step while a cache is filled


def attention_step() -> InferenceSession:
    """The graph of one layer's step: cache, q, k, v -> y."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("q", "k", "v")]
    graph = helper.make_graph(
        [
            helper.make_node("CacheAppend", ["cache", "k", "v"], ["keys", "values"], domain="miniort", layer=0),
            helper.make_node("Attention", ["q", "keys", "values"], ["y"]),
        ],
        "step",
        [helper.make_tensor_value_info("cache", TensorProto.FLOAT, None), *values],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("miniort", 1)]
    return InferenceSession(helper.make_model(graph, opset_imports=opsets, ir_version=10), providers=["cpu"], kernels=[CACHE_APPEND])


def random(*shape: int) -> FloatArray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def time_step(session: InferenceSession, cache: KVCache, spec: CacheSpec, heads: int) -> float:
    """Seconds of one step, which is taken back afterwards."""
    feeds = {
        "cache": cache,
        "q": random(spec.batch, heads, 1, spec.head_dim),
        "k": random(spec.batch, spec.kv_heads, 1, spec.head_dim),
        "v": random(spec.batch, spec.kv_heads, 1, spec.value_head_dim),
    }
    start = time.perf_counter()
    session.execute(feeds)
    cache.commit(1)
    taken = time.perf_counter() - start
    cache.crop(cache.length - 1)
    return taken


def filled(info: CacheLayoutInfo, spec: CacheSpec, context: int) -> KVCache:
    cache: KVCache = info.create(spec)
    while cache.length < context:
        count = min(FILL, context - cache.length)
        cache.append(0, random(spec.batch, spec.kv_heads, count, spec.head_dim), random(spec.batch, spec.kv_heads, count, spec.head_dim))
        cache.commit(count)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--contexts", default="128,1024,4096")
    for option, default in (("batch", 1), ("heads", 12), ("kv-heads", 12), ("dim", 64), ("rounds", 15)):
        parser.add_argument(f"--{option}", type=int, default=default)
    arguments = parser.parse_args()
    infos = collect_mapping(create_plugin_manager(), "miniort_cache_layouts", CacheLayoutInfo)
    session = attention_step()
    spec = CacheSpec(1, arguments.batch, arguments.kv_heads, arguments.dim, arguments.dim, np.dtype(np.float32))
    print(f"{'context':>8} {'layout':<12} {'us/step':>9} {'ratio':>6} {'KiB':>9} {'bytes':>6}")
    for context in map(int, arguments.contexts.split(",")):
        caches = {name: filled(info, spec, context) for name, info in infos.items()}
        times: dict[str, list[float]] = {name: [] for name in caches}
        for number in range(arguments.rounds + 2):
            for name, cache in caches.items():
                taken = time_step(session, cache, spec, arguments.heads)
                if number >= 2:  # the first rounds warm caches and the pool
                    times[name].append(taken)
        base = median(times["concat_bhtd"])
        for name, cache in caches.items():
            taken = median(times[name])
            share = cache.nbytes / (context * spec.bytes_per_token())
            print(f"{context:>8} {name:<12} {taken * 1e6:>9.0f} {base / taken:>6.2f} {cache.nbytes / 1024:>9.0f} {share:>6.2f}")


if __name__ == "__main__":
    main()
