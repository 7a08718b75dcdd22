"""miniort: a mini ONNX Runtime in Python, made of plugins.

Names are imported when they are first used, so that `import miniort` costs nothing and pulls in none of onnx, onnx-ir and tokenizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniort.late_sympy import import_sympy_late
from miniort.lazy import lazy_exports

import_sympy_late()

if TYPE_CHECKING:
    from miniort.model.loading import load_model
    from miniort.model.weights import WeightStore
    from miniort.plugins import create_plugin_manager, hookimpl
    from miniort.runtime.session import InferenceSession, SessionOptions

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "InferenceSession": "miniort.runtime.session",
        "SessionOptions": "miniort.runtime.session",
        "WeightStore": "miniort.model.weights",
        "create_plugin_manager": "miniort.plugins",
        "hookimpl": "miniort.plugins",
        "load_model": "miniort.model.loading",
    },
)

__all__ = [
    "InferenceSession",
    "SessionOptions",
    "WeightStore",
    "__version__",
    "create_plugin_manager",
    "hookimpl",
    "load_model",
]
