"""Test kits for plugins: what a third party runs on its own provider, kernel, sampler, logits processor or cache layout.

They need hypothesis, which miniort itself does not. Names are imported when they are first used, so that one kit doesn't need another's
libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as error:
    raise ImportError("miniort.testing needs hypothesis: pip install hypothesis") from error

if TYPE_CHECKING:
    from miniort.testing.cache_layouts import cache_layout_machine
    from miniort.testing.operators.conformance import ProviderConformance
    from miniort.testing.sampling import LogitsProcessorConformance, SamplerConformance

_EXPORTS = {
    "LogitsProcessorConformance": "miniort.testing.sampling",
    "ProviderConformance": "miniort.testing.operators.conformance",
    "SamplerConformance": "miniort.testing.sampling",
    "cache_layout_machine": "miniort.testing.cache_layouts",
}

__all__ = ["LogitsProcessorConformance", "ProviderConformance", "SamplerConformance", "cache_layout_machine"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'miniort.testing' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
