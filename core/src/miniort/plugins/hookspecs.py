"""Every hook of miniort. All run while a session or a generator is built, and never after.

An implementation may take fewer arguments than its spec. Results are lists of small frozen dataclasses, so an implementation can be
tested by calling it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from miniort.generation.cache import CacheLayoutInfo
    from miniort.generation.sampling import LogitsProcessorInfo, SamplerInfo
    from miniort.generation.sources import Architecture, ModelFormat
    from miniort.graph.passes import GraphPass
    from miniort.kernels import Kernel, NodeView
    from miniort.providers import ProviderInfo
    from miniort.runtime.observers import Observer
    from miniort.runtime.session import InferenceSession

hookspec = pluggy.HookspecMarker("miniort")
hookimpl = pluggy.HookimplMarker("miniort")


@hookspec
def miniort_providers() -> list[ProviderInfo]:  # type: ignore[empty-body]
    """Execution providers that this plugin offers."""


@hookspec
def miniort_kernels(provider: str) -> list[Kernel]:  # type: ignore[empty-body]
    """Further kernels for the provider of that name, which may belong to another plugin."""


@hookspec
def miniort_graph_passes() -> list[GraphPass]:  # type: ignore[empty-body]
    """Graph passes, run after miniort's own of the same level."""


@hookspec(firstresult=True)
def miniort_select_kernel(node: NodeView, candidates: list[Kernel]) -> Kernel | None:
    """The kernel of `candidates` that shall run the node, or None to leave the choice to others."""


@hookspec
def miniort_logits_processors() -> list[LogitsProcessorInfo]:  # type: ignore[empty-body]
    """Logits processors that this plugin offers."""


@hookspec
def miniort_samplers() -> list[SamplerInfo]:  # type: ignore[empty-body]
    """Samplers that this plugin offers."""


@hookspec
def miniort_cache_layouts() -> list[CacheLayoutInfo]:  # type: ignore[empty-body]
    """KV-cache layouts that this plugin offers."""


@hookspec
def miniort_model_formats() -> list[ModelFormat]:  # type: ignore[empty-body]
    """Kinds of model, on disk or on a hub, that this plugin recognises and opens."""


@hookspec
def miniort_architectures() -> list[Architecture]:  # type: ignore[empty-body]
    """Kinds of decoder whose graphs this plugin can write from their weights."""


@hookspec
def miniort_observers(session: InferenceSession) -> list[Observer]:  # type: ignore[empty-body]
    """Observers of a session that is being built; none leaves it with the plain loop."""


@hookspec
def miniort_commands(cli: click.Group) -> None:
    """Add commands to the `miniort` command. Called only when a command that isn't built in is asked for."""
