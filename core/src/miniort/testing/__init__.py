"""Test kits for plugins: what a third party runs on its own provider, kernel, sampler, logits processor or cache layout.

They need hypothesis, which miniort itself does not. Names are imported when they are first used, so that one kit doesn't need another's
libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniort.lazy import lazy_exports

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as error:
    raise ImportError("miniort.testing needs hypothesis: pip install hypothesis") from error

if TYPE_CHECKING:
    from miniort.testing.cache_layouts import cache_layout_machine
    from miniort.testing.operators.conformance import ProviderConformance
    from miniort.testing.sampling import LogitsProcessorConformance, SamplerConformance

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LogitsProcessorConformance": "miniort.testing.sampling",
        "ProviderConformance": "miniort.testing.operators.conformance",
        "SamplerConformance": "miniort.testing.sampling",
        "cache_layout_machine": "miniort.testing.cache_layouts",
    },
)

__all__ = ["LogitsProcessorConformance", "ProviderConformance", "SamplerConformance", "cache_layout_machine"]
