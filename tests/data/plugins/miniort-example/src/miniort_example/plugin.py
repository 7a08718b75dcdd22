"""What the entry point names: the hooks of this package. What they return is imported when they're called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniort.plugins import hookimpl
from miniort.providers import Availability, ProviderInfo, ProviderOptions

if TYPE_CHECKING:
    import click

    from miniort.generation.cache import CacheLayoutInfo
    from miniort.generation.sampling import LogitsProcessorInfo, SamplerInfo
    from miniort.providers import Provider


@hookimpl
def miniort_providers() -> list[ProviderInfo]:
    """The provider `example`; its priority is below the CPU's, so it runs nothing unless it's asked for first."""

    def check() -> Availability:
        return Availability(True, "it needs nothing but NumPy")

    def open_provider(options: ProviderOptions) -> Provider:
        from miniort_example.provider import ExampleProvider

        return ExampleProvider(options)

    return [ProviderInfo("example", priority=10, check=check, open=open_provider, summary="two kernels, as an example")]


@hookimpl
def miniort_samplers() -> list[SamplerInfo]:
    """The sampler `second_best`."""
    from miniort.generation.sampling import SamplerInfo
    from miniort_example.second_best import second_best

    return [SamplerInfo("second_best", create=second_best, summary="the second likeliest token, always")]


@hookimpl
def miniort_logits_processors() -> list[LogitsProcessorInfo]:
    """The logits processor `bias`."""
    from miniort.generation.sampling import LogitsProcessorInfo
    from miniort_example.bias import bias

    return [LogitsProcessorInfo("bias", create=bias, summary="makes tokens likelier or less likely")]


@hookimpl
def miniort_cache_layouts() -> list[CacheLayoutInfo]:
    """The cache layout `example_list`."""
    from miniort.generation.cache import CacheLayoutInfo
    from miniort_example.list_cache import ListCache

    return [CacheLayoutInfo("example_list", create=ListCache, summary="every token by itself, in a list")]


@hookimpl
def miniort_commands(cli: click.Group) -> None:
    """The command `count-nodes`."""
    from miniort_example.count_nodes import count_nodes

    cli.add_command(count_nodes)
