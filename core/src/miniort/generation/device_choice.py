"""Tokens chosen on the device that made the logits: ids come to the host, and the logits only if somebody reads them.

A sampler or a processor that has a device version is a pair of both; called, it's the host's. So whoever knows nothing of devices uses it
as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from miniort.generation.sampling import LogitsProcessor, Sampler, Search, TokenHistory
from miniort.providers import ChoosesTokens, DeviceArray, DeviceProcessor, DeviceSampler, Provider
from miniort.types import FloatArray, IntArray


class TokenChooser(Provider, ChoosesTokens, Protocol):
    """A provider on whose device tokens can be chosen."""


@dataclass(frozen=True, eq=False)
class SamplerOnDevice:
    """A sampler with its version for the device of `provider`."""

    provider: TokenChooser
    on_host: Sampler
    on_device: DeviceSampler

    def __call__(self, logits: FloatArray, rngs: Sequence[np.random.Generator]) -> IntArray:
        """The host's choice: logits [batch, vocabulary] -> ids [batch]."""
        return self.on_host(logits, rngs)


@dataclass(frozen=True, eq=False)
class ProcessorOnDevice:
    """A logits processor with its version for the device of `provider`, which needs no history."""

    provider: TokenChooser
    on_host: LogitsProcessor
    on_device: DeviceProcessor

    def __call__(self, history: TokenHistory, logits: FloatArray) -> FloatArray:
        """The host's version: logits [batch, vocabulary] -> the same shape."""
        return self.on_host(history, logits)


@dataclass(frozen=True, eq=False)
class DeviceLogits:
    """Logits as a run left them on the device: [batch, n, vocabulary] or [batch, vocabulary]; those of the last position count."""

    array: DeviceArray
    provider: TokenChooser

    @cached_property
    def host(self) -> FloatArray:
        """The last position's, [batch, vocabulary] float32, on the host; carried over when they're first asked for."""
        return np.ascontiguousarray(self.provider.download(self.provider.last_logits(self.array)), np.float32)


def chooser_of(sampler: Sampler | Search, processors: Sequence[LogitsProcessor]) -> TokenChooser | None:
    """The provider on whose device all of these work; None where one of them has no version for it."""
    if not isinstance(sampler, SamplerOnDevice):
        return None
    on_device = all(isinstance(each, ProcessorOnDevice) and each.provider is sampler.provider for each in processors)
    return sampler.provider if on_device else None


def choose_on_device(
    processors: Sequence[LogitsProcessor], sampler: Sampler, logits: DeviceLogits, rngs: Sequence[np.random.Generator]
) -> IntArray | None:
    """Ids [batch] on the host; None where the host has to look at the logits, because no token of a row can be chosen."""
    assert isinstance(sampler, SamplerOnDevice)
    scores = logits.provider.last_logits(logits.array)
    for processor in processors:
        assert isinstance(processor, ProcessorOnDevice)
        scores = processor.on_device(scores)
    ids = sampler.on_device(scores, rngs)
    return None if ids is None else ids.astype(np.int64, copy=False)
