"""The base of providers on the host, and how many threads a provider is asked to use."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.errors import ProviderError
from miniort.host_provider import HostProvider
from miniort.kernels import KernelTable
from miniort.providers import HOST, Provider, ProviderOptions, default_threads


def test_it_is_a_provider_whose_memory_is_a_pool_s() -> None:
    kernels = KernelTable("mine")
    provider = HostProvider(kernels)
    assert isinstance(provider, Provider)
    assert provider.device == HOST
    assert provider.kernels is kernels
    array = provider.allocate((256, 1024), np.dtype(np.float32))
    assert provider.upload(array) is provider.download(array) is array
    assert provider.memory().active == array.nbytes
    del array
    provider.synchronize()
    assert (provider.memory().active, provider.memory().reserved) == (0, 1 << 20)
    provider.close()
    assert provider.memory().reserved == 0


def test_threads_are_those_asked_for_or_the_cores() -> None:
    assert ProviderOptions(threads=3).thread_count() == 3
    assert ProviderOptions().thread_count() == ProviderOptions(threads=0).thread_count() == default_threads()
    with pytest.raises(ProviderError, match="must not be negative, found -1"):
        ProviderOptions(threads=-1).thread_count()
