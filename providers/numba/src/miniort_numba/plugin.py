"""The entry point: says that there is a provider `numba`, and imports Numba only when it's opened."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from miniort.graph.passes import GraphPass, Level
from miniort.plugins.hookspecs import hookimpl
from miniort.providers import Availability, ProviderInfo, ProviderOptions

if TYPE_CHECKING:
    import onnx_ir as ir

    from miniort.graph.passes import PassContext
    from miniort_numba.provider import NumbaProvider


@hookimpl
def miniort_providers() -> list[ProviderInfo]:
    """The provider `numba`, only for who asks for it by name: to load it takes a second, and at the first time it's compiled."""
    return [ProviderInfo("numba", priority=-1, check=check, open=open_provider, summary="Python compiled for this processor")]


@hookimpl
def miniort_graph_passes() -> list[GraphPass]:
    """Fusing what this provider gets; sessions without it stay as they are."""
    return [GraphPass("fuse-decoder-blocks", Level.ALL, fuse)]


def fuse(model: ir.Model, context: PassContext) -> None:
    """See `miniort_numba.fusion`, which is imported only when a graph is there."""
    from miniort_numba.fusion import fuse_decoder_blocks

    fuse_decoder_blocks(model, context)


def check() -> Availability:
    """Whether Numba is installed; it's a dependency of this package, so it's missing only where somebody took it away."""
    try:
        return Availability(True, f"Numba {version('numba')}")
    except PackageNotFoundError:
        return Availability(False, "Numba is missing: pip install numba")


def open_provider(options: ProviderOptions) -> NumbaProvider:
    """A new provider. ProviderError if an option is given: it has none."""
    from miniort_numba.provider import NumbaProvider

    return NumbaProvider(options)
