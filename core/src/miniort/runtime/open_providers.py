"""From what the user asked for to open providers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miniort.errors import MiniortError, ProviderError
from miniort.kernels import ANY_PROVIDER, Kernel, KernelTable
from miniort.plugins import PluginManager, collect
from miniort.plugins.collect import failed_plugins, unknown_name_message
from miniort.plugins.manager import describe_exception
from miniort.providers import (
    HOST,
    ProviderInfo,
    ProviderOptions,
    canonical_provider_name,
    check_provider,
    list_providers,
)
from miniort.runtime.assignment import OpenProvider

AUTO = "auto"


def open_providers(
    plugins: PluginManager,
    wanted: str | Sequence[str | tuple[str, Mapping[str, Any]]] | None,
    options: Sequence[Mapping[str, Any]] | None,
    kernels: Sequence[Kernel],
    threads: int | None,
) -> list[OpenProvider]:
    """The session's providers, opened, in the order in which they'll be asked.

    ProviderError if one that was asked for by name is unknown or can't be used, or if none is left.
    """
    known = list_providers(plugins)
    chosen: list[tuple[ProviderInfo, dict[str, Any]]]
    if wanted is None or wanted == AUTO:
        if options:
            raise ProviderError("provider_options need providers that are named; found none")
        chosen = [(info, {}) for info in known.values() if info.priority >= 0 and check_provider(info).ok]
        if not chosen:
            reasons = "; ".join(f"{name}: {check_provider(info).reason}" for name, info in known.items())
            failures = "; ".join(f"plugin {name!r}: {reason}" for name, reason in failed_plugins(plugins).items())
            nothing = "none is installed: pip install miniort-cpu"
            raise ProviderError(f"no provider can be used here ({'; '.join(filter(None, (reasons, failures))) or nothing})")
    else:
        chosen = [(_usable(plugins, known, name), dict(given)) for name, given in _requests(wanted, options)]
    seen: set[str] = set()
    for info, _ in chosen:
        if info.name in seen:
            raise ProviderError(f"provider {info.name!r} is asked for twice")
        seen.add(info.name)
    for kernel in kernels:
        if kernel.provider not in (ANY_PROVIDER, *seen):
            raise ProviderError(f"a kernel for {kernel.op} names the provider {kernel.provider!r}; the session has {', '.join(seen)}")
    opened = [_open(plugins, info, given, threads) for info, given in chosen]
    anywhere = next((each for each in opened if each.provider.device == HOST), opened[0])
    for kernel in kernels:
        next((each for each in opened if each.name == kernel.provider), anywhere).kernels.add(kernel, first=True)
    return opened


def _requests(
    wanted: str | Sequence[str | tuple[str, Mapping[str, Any]]], options: Sequence[Mapping[str, Any]] | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    requests = [wanted] if isinstance(wanted, str) else list(wanted)
    if not requests:
        raise ProviderError("providers is empty; leave it out for every available one")
    if options is not None and len(options) != len(requests):
        raise ProviderError(f"provider_options must be as many as providers ({len(requests)}), found {len(options)}")
    for index, request in enumerate(requests):
        name, own = (request, {}) if isinstance(request, str) else request if _is_pair(request) else (None, None)
        more = options[index] if options else {}
        if not isinstance(name, str) or not isinstance(own, Mapping) or not isinstance(more, Mapping):
            raise ProviderError(
                f"a provider is asked for by name or as (name, options), with options by name; found {request!r} and {more!r}"
            )
        yield canonical_provider_name(name), {**own, **more}


def _is_pair(request: object) -> bool:
    return isinstance(request, tuple | list) and len(request) == 2


def _usable(plugins: PluginManager, known: Mapping[str, ProviderInfo], name: str) -> ProviderInfo:
    if name not in known:
        raise ProviderError(unknown_name_message(plugins, "provider", name, list(known)))
    availability = check_provider(known[name])
    if not availability.ok:
        raise ProviderError(f"provider {name!r} can't be used here: {availability.reason}")
    return known[name]


def _open(plugins: PluginManager, info: ProviderInfo, options: Mapping[str, Any], threads: int | None) -> OpenProvider:
    given = ProviderOptions(threads=threads, options={key: str(value) for key, value in options.items()})
    try:
        provider = info.open(given)
    except MiniortError:
        raise
    except Exception as error:
        # A provider may raise anything while it's opened.
        raise ProviderError(f"provider {info.name!r} can't be opened: {describe_exception(error)}") from error
    kernels = KernelTable(info.name, provider.kernels)
    for plugin_name, kernel in collect(plugins, "miniort_kernels", Kernel, provider=info.name):
        if kernel.provider != info.name:
            raise ProviderError(f"plugin {plugin_name!r} was asked for kernels of {info.name!r} and gave one of {kernel.provider!r}")
        kernels.add(kernel)
    return OpenProvider(info.name, provider, kernels, given.options)
