"""Sizes of files, for people."""

from __future__ import annotations


def describe_size(size: int) -> str:
    """`1234567` -> `1.2 MB`, as the hub's pages have it: thousands, not 1024."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "bytes" or value >= 99.5 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
