"""How functions are compiled: without Python's lock, kept on disk beside their source, a division by zero giving what NumPy gives.

Numba compiles again when the file of a function changes, but not when a file that it calls into does: after such a change, delete
`*.nbi` in `__pycache__`.
"""

from __future__ import annotations

from typing import Any

PLAIN: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}
"""For functions that prepare work."""

LOOP: dict[str, Any] = {**PLAIN, "fastmath": {"contract", "reassoc", "nsz"}}
"""For loops over elements: sums may be added up in another order, so that they use vectors. Infinity and NaN stay what they are."""

EACH: dict[str, Any] = {**PLAIN, "fastmath": {"contract", "nsz"}}
"""For formulas of single elements, whose order matters."""
