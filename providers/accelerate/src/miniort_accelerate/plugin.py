"""What the entry point names: the provider `accelerate`. The framework is loaded when it's checked for or opened, and not before."""

from __future__ import annotations

from miniort.plugins import hookimpl
from miniort.providers import Provider, ProviderInfo, ProviderOptions
from miniort_accelerate.availability import check


@hookimpl
def miniort_providers() -> list[ProviderInfo]:
    """The provider `accelerate`."""
    return [ProviderInfo("accelerate", priority=200, check=check, open=_open, summary="Apple's Accelerate framework, macOS only")]


def _open(options: ProviderOptions) -> Provider:
    from miniort_accelerate.provider import open_provider

    return open_provider(options)
