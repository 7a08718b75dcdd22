"""CacheAppend and CacheStore of the domain miniort: the KV cache's own step, on the device where the cache is."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort_cuda.caches.memory import DeviceCache
from miniort_cuda.caches.reserved import ReservedBuffers

kernels = KernelTable("cuda")


@kernels.register("CacheAppend", (1, 1), domain="miniort", metadata_inputs=(0,))
def cache_append(node: NodeContext) -> Run:
    """CacheAppend(cache, key, value) -> all keys, all values of layer `layer`, [batch, kv heads, kept + new, dim], on the device.

    A layout that has no device version keeps its tokens on the host: new ones are downloaded, and all are uploaded, in every step.
    """
    layer, provider = node.attribute("layer"), node.provider

    def run(cache: Any, key: Any, value: Any) -> tuple[Any, Any]:
        if isinstance(cache, DeviceCache | ReservedBuffers):
            return cache.append(layer, key, value)
        keys, values = cache.append(layer, provider.download(key), provider.download(value))
        return provider.upload(np.asarray(keys)), provider.upload(np.asarray(values))

    return run


@kernels.register("CacheStore", (1, 1), domain="miniort", metadata_inputs=(0,), host_outputs=(0,))
def cache_store(node: NodeContext) -> Run:
    """CacheStore(cache, key, value) -> how many tokens were appended to layer `layer`, [] int64, on the host.

    For a layout that has no device version they're downloaded.
    """
    layer, provider = node.attribute("layer"), node.provider

    def run(cache: Any, key: Any, value: Any) -> Any:
        if isinstance(cache, DeviceCache):
            cache.append(layer, key, value)
        else:
            cache.append(layer, provider.download(key), provider.download(value))
        return np.array(key.shape[2], np.int64)

    return run
