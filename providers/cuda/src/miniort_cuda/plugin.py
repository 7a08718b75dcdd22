"""What the entry point names: the provider `cuda`. CuPy is imported when the provider is opened, and not before."""

from __future__ import annotations

from miniort.plugins import hookimpl
from miniort.providers import Provider, ProviderInfo, ProviderOptions
from miniort_cuda.availability import check


@hookimpl
def miniort_providers() -> list[ProviderInfo]:
    """The provider `cuda`."""
    return [ProviderInfo("cuda", priority=300, check=check, open=_open, summary="NVIDIA GPUs, through CuPy")]


def _open(options: ProviderOptions) -> Provider:
    from miniort_cuda.provider import open_provider

    return open_provider(options)
