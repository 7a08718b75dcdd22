"""Whether a file of weights is still the one that it was, told without reading all of it."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 4096
_BLOCKS = 64

_FINE_TICK = 100_000_000
_COARSE_TICK = 2_000_000_000
"""Nanoseconds within which a file system may give two changes one time: on those that count in parts of a second, and on the others."""


@dataclass(frozen=True)
class FileStamp:
    """What the file system says of a file: size in bytes, times of its last change and of its entry's (in ns), and its number.

    `settled`: whether it hasn't just been written, so that another change would show in its times.
    """

    size: int
    changed: int
    entry_changed: int
    inode: int
    settled: bool

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """The stamp of a file as it is now. OSError if there is none."""
        status = os.stat(path)
        tick = _FINE_TICK if status.st_mtime_ns % 1_000_000 else _COARSE_TICK
        settled = time.time_ns() - status.st_mtime_ns > tick
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, settled)

    def same_file(self, other: FileStamp) -> bool:
        """Whether nothing has changed between the two."""
        mine, others = ((each.size, each.changed, each.entry_changed, each.inode) for each in (self, other))
        return mine == others


def digest_of_samples(path: Path) -> str:
    """A digest of 64 blocks of 4 KB, from the first to the last, for file systems whose times can't be trusted."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        last = max(0, os.fstat(file.fileno()).st_size - _BLOCK)
        for number in range(_BLOCKS):
            file.seek(last * number // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()
