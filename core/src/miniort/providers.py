"""What an execution provider is: a table of kernels, and a memory that their arrays live in.

A provider's package implements `miniort_providers()` and returns a `ProviderInfo` for each. Nothing of the provider is imported or
opened until `check` or `open` is called, so `ProviderInfo` costs nothing to list.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from miniort.errors import ProviderError
from miniort.plugins import collect_mapping

if TYPE_CHECKING:
    import numpy as np

    from miniort.kernels import KernelTable
    from miniort.plugins import PluginManager
    from miniort.types import Array, DType

HOST = "host"
"""The device of providers whose arrays are NumPy arrays. Two providers of one device hand values to each other as they are."""

DeviceArray: TypeAlias = Any
"""An array of a provider's own kind. The runtime reads `.shape` and `.dtype` and otherwise only hands it on."""

DeviceProcessor: TypeAlias = Callable[[DeviceArray], DeviceArray]
"""A logits processor that needs no history, on a device: logits [batch, vocabulary] float32 -> the same."""

DeviceSampler: TypeAlias = "Callable[[DeviceArray, Sequence[np.random.Generator]], Array | None]"
"""A sampler on a device: logits [batch, vocabulary] float32, a stream of random numbers per row -> ids [batch] on the host.

None where no token of a row can be chosen: the host's sampler is then given the logits, and has the error for it.
"""


_LIMITS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which users bound the threads of numeric libraries; they bound those of providers too."""


@dataclass(frozen=True)
class Availability:
    """Whether a provider can be used on this machine, and why not (or what was found)."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class ProviderOptions:
    """What a session asks of a provider.

    `threads` is the number of threads that its kernels may use, None for the provider's own default.
    `options` is what the user gave for this provider; a key that the provider doesn't know must be an error.
    """

    threads: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def reject_unknown(self, provider: str, known: Sequence[str] = ()) -> None:
        """Raise ProviderError if an option was given that isn't among `known`."""
        for key in self.options:
            if key not in known:
                have = ", ".join(sorted(known)) or "none"
                raise ProviderError(f"provider {provider!r} has no option {key!r}; its options: {have}")

    def switch(self, provider: str, key: str, default: bool) -> bool:
        """Whether an option is on; `default` where it isn't given. ProviderError if it's neither 0 nor 1, false nor true."""
        text = str(self.options.get(key, int(default))).lower()
        if text not in ("0", "1", "false", "true"):
            raise ProviderError(f"provider {provider!r}: {key} must be 0 or 1, found {text!r}")
        return text in ("1", "true")

    def thread_count(self) -> int:
        """How many threads a provider should use: those asked for, else `default_threads()`. ProviderError for a negative number."""
        if self.threads is not None and self.threads < 0:
            raise ProviderError(f"the number of threads (intra_op_num_threads) must not be negative, found {self.threads}")
        return self.threads or default_threads()


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of a provider's memory: in use by live arrays, held from the system, and the most that was ever in use."""

    active: int
    reserved: int
    peak: int


@runtime_checkable
class Provider(Protocol):
    """An open provider. One session owns it and closes it; its methods may be called from several threads at once."""

    device: str
    """Where its arrays live: `"host"` for NumPy arrays, else a name such as `"cuda:0"`."""

    kernels: KernelTable
    """Every kernel that the provider has. Kernels of other plugins (`miniort_kernels`) are added by the session."""

    def allocate(self, shape: Sequence[int], dtype: DType) -> DeviceArray:
        """A new array with undefined contents, C-contiguous, from the provider's pool. It returns there when its last reference dies."""

    def upload(self, array: Array) -> DeviceArray:
        """A copy of a host array on the device. On a host provider, the array itself."""

    def download(self, array: DeviceArray) -> Array:
        """A copy of a device array as a NumPy array. On a host provider, the array itself."""

    def synchronize(self) -> None:
        """Wait until all work that was handed to the device is done."""

    def memory(self) -> MemoryStats:
        """Bytes of this provider's memory right now."""

    def close(self) -> None:
        """Give everything back. No method is called afterwards."""


@runtime_checkable
class SurroundsRuns(Protocol):
    """What a provider offers besides where something has to hold while its kernels run, such as a setting of the whole process."""

    def running(self) -> AbstractContextManager[object]:
        """Asked for once, when a session is built, and entered around each of its runs: in several threads at once, and one in another."""


@runtime_checkable
class UploadsTogether(Protocol):
    """What a provider offers besides where several host arrays are cheaper to upload in one transfer than one by one."""

    def upload_together(self, *arrays: Array) -> tuple[DeviceArray, ...]:
        """Copies of host arrays on the device, in their order; None for None."""


@runtime_checkable
class KeepsCaches(Protocol):
    """What a provider offers besides where its device can hold a KV cache."""

    def cache_layout(self, name: str) -> Callable[..., Any] | None:
        """What makes an empty cache of the layout of that name on the device, `create(spec, **options)`; None for one that it lacks."""


@runtime_checkable
class ChoosesTokens(Protocol):
    """What a provider offers besides where tokens can be chosen on its device, so that a step brings ids to the host and not logits."""

    def last_logits(self, logits: DeviceArray) -> DeviceArray:
        """Logits of the last position, [batch, vocabulary] float32, of [batch, n, vocabulary] or [batch, vocabulary] of any float type."""

    def token_sampler(self, name: str) -> Callable[..., DeviceSampler] | None:
        """What makes the sampler of that name for the device, `create(**options)`; None for one that it lacks."""

    def logits_processor(self, name: str) -> Callable[..., DeviceProcessor] | None:
        """What makes the logits processor of that name for the device, `create(**options)`; None for one that it lacks."""


class Recording(Protocol):
    """A run that a device has noted down, to be done again with other contents of what was uploaded for it."""

    def replay(self, *arrays: Array) -> tuple[DeviceArray, ...]:
        """Upload arrays of the shapes and types that it was recorded with and do all of its work: its results, in memory of their own."""


@runtime_checkable
class RecordsRuns(Protocol):
    """What a provider offers besides where a run of always the same work can be noted down once and handed to the device as a whole."""

    records_runs: bool
    """Whether the user asked for it."""

    def record(self, run: Callable[..., Sequence[DeviceArray]], *arrays: Array) -> tuple[Recording, tuple[DeviceArray, ...]]:
        """Upload arrays to a place of their own and call `run` with them twice: once for a rehearsal, then to note down what it does.

        Returns the recording, and what the rehearsal gave. All that the run computes on the host is done here and never again. Its own
        exception if it does something that can't be noted down, such as to wait for the device.
        """


@dataclass(frozen=True)
class ProviderInfo:
    """A provider that a package offers.

    `check` says whether it can be used here: cheap, and it never raises. `open` makes one; it's called only after `check` said yes.
    Providers with a higher `priority` come first where the user asks for no order (cuda 300, accelerate 200, cpu 100); one with a
    negative priority takes part only where it's asked for by name (numba).
    """

    name: str
    priority: int
    check: Callable[[], Availability]
    open: Callable[[ProviderOptions], Provider]
    summary: str = ""


def default_threads() -> int:
    """The cores that this process may use, or fewer if a variable such as OPENBLAS_NUM_THREADS says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [int(text) for name in _LIMITS if (text := os.environ.get(name, "")).isdecimal() and int(text) > 0]
    return min([cores, *limits])


def canonical_provider_name(name: str) -> str:
    """Miniort's name of a provider: `"CPUExecutionProvider"`, onnxruntime's spelling, is `"cpu"`."""
    suffix = "ExecutionProvider"
    return name[: -len(suffix)].lower() if name.endswith(suffix) and name != suffix else name.lower()


def list_providers(plugins: PluginManager) -> dict[str, ProviderInfo]:
    """Every provider that a plugin offers, available or not, by priority."""
    return collect_mapping(plugins, "miniort_providers", ProviderInfo)


def check_provider(info: ProviderInfo) -> Availability:
    """Whether a provider can be used here; one whose check breaks the promise not to raise can't."""
    try:
        return info.check()
    except Exception as error:
        # A plugin may raise anything; the others must still be usable.
        return Availability(False, f"its check failed: {type(error).__name__}: {error}")
