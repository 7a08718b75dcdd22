"""What an optimised graph depends on, as a digest: what it was made of, by whom, and for whom."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from miniort.graph.passes import GraphPass, Level
from miniort.kernels import Kernel
from miniort.plugins import PluginManager
from miniort.runtime.assignment import OpenProvider
from miniort.runtime.model_recipe import ModelRecipe

FORMAT = 1
"""To be raised where an entry's format changes."""

_DECIDING_HOOKS = frozenset({"miniort_providers", "miniort_kernels", "miniort_graph_passes", "miniort_select_kernel"})


def graph_identity(
    recipe: ModelRecipe,
    digests: Sequence[str],
    level: Level,
    passes: Sequence[GraphPass],
    providers: Sequence[OpenProvider],
    plugins: PluginManager,
    kernels: Sequence[Kernel],
) -> str | None:
    """A digest that differs where the optimised graph may. None where that can't be told: somebody's code comes from no package.

    digests: of the recipe's files. passes: those that plugins add. kernels: those that were given to the session itself.

    Code is told by the versions of distributions, and by size and time of the source files of every package that has a plugin, a
    kernel or a pass, so that who changes a pass in place sees what it does.
    """
    packages = _packages(plugins, passes, providers, kernels)
    stamps = None if packages is None else [_source_stamps(package) for package in sorted(packages)]
    if stamps is None or None in stamps:
        return None
    parts = [
        FORMAT,
        [platform.machine(), sys.platform, sys.version],
        [(module.__name__, module.__version__) for module in (np, ml_dtypes, onnx, ir)],
        sorted((record.name, record.distribution, record.version) for record in plugins.records.values() if record.status == "loaded"),
        stamps,
        [(each.name, each.level, each.priority) for each in passes],
        [(each.name, each.provider.device, sorted(each.options.items()), list(map(_signature, each.kernels))) for each in providers],
        level,
        recipe.what,
        os.path.abspath(recipe.folder or ""),
        list(zip(map(os.path.abspath, recipe.files), digests, strict=True)),
    ]
    return hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _signature(kernel: Kernel) -> Any:
    """All that decides which nodes a kernel takes, and which function computes them."""
    return (
        (kernel.domain, kernel.op, kernel.since, kernel.until, kernel.refuse is not None),
        sorted((str(key), sorted(dtype.name for dtype in dtypes)) for key, dtypes in kernel.types.items()),
        (getattr(kernel.compile, "__module__", ""), getattr(kernel.compile, "__qualname__", "")),
    )


def _packages(
    plugins: PluginManager, passes: Sequence[GraphPass], providers: Sequence[OpenProvider], kernels: Sequence[Kernel]
) -> set[str] | None:
    """The packages whose code decides about graphs; None where some was registered or given by hand, of which nobody knows a version."""
    modules = {"miniort"}
    for name, plugin in plugins.list_name_plugin():
        if plugin is None or _DECIDING_HOOKS.isdisjoint(each.name for each in plugins.get_hookcallers(plugin) or ()):
            continue
        if name not in plugins.records or plugins.records[name].status != "loaded":
            return None
        modules.add(plugins.records[name].module.partition(":")[0])
    if any(not str(getattr(kernel.compile, "__module__", "")).startswith("miniort.") for kernel in kernels):
        return None
    functions: Iterable[Any] = (
        *(each.run for each in passes),
        *(kernel.compile for provider in providers for kernel in provider.kernels),
    )
    modules.update(module for function in functions if (module := getattr(function, "__module__", None)))
    return {package for module in modules if (package := _package(module)) is not None}


def _package(module: str) -> str | None:
    """The outermost package around a module that isn't a namespace, which several distributions may share."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if getattr(sys.modules.get(name), "__file__", None):
            return name
    return None


def _source_stamps(package: str) -> list[Any] | None:
    """Path, size and time of change of all files of a package that hold code; None where they can't be read."""
    file = Path(str(sys.modules[package].__file__))
    try:
        files = sorted(_code_files(file.parent)) if file.stem == "__init__" else [os.fspath(file)]
        return [(path, (status := os.stat(path)).st_size, status.st_mtime_ns) for path in files]
    except OSError:
        return None


def _code_files(folder: str | os.PathLike[str]) -> Iterable[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _code_files(entry.path)
            elif entry.name.endswith((".py", ".so", ".pyd")):
                yield entry.path
