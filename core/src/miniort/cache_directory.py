"""Where miniort keeps what it can make again: pulled and converted models, and optimised graphs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_directory() -> Path:
    """The folder that MINIORT_CACHE_DIR names, else `miniort` where the platform keeps such things. It needn't be there yet."""
    named = os.environ.get("MINIORT_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "miniort"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "miniort"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miniort"
