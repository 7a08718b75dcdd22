"""The entry point: says that there is a provider `cpu`, and imports its kernels only when one is opened."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from miniort.plugins.hookspecs import hookimpl
from miniort.providers import Availability, ProviderInfo, ProviderOptions

if TYPE_CHECKING:
    from miniort_cpu.provider import CPUProvider


@hookimpl
def miniort_providers() -> list[ProviderInfo]:
    """The provider `cpu`."""
    return [ProviderInfo("cpu", priority=100, check=check, open=open_provider, summary="NumPy kernels for ONNX's ops")]


def check() -> Availability:
    """NumPy is a dependency of this package, so the provider can always be used."""
    return Availability(True, f"NumPy {version('numpy')}")


def open_provider(options: ProviderOptions) -> CPUProvider:
    """A new CPU provider. ProviderError if an option is given: it has none."""
    from miniort_cpu.provider import CPUProvider

    return CPUProvider(options)
