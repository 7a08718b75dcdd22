"""Decoders that were converted once, for later runs, in a folder of the user's cache.

<cache>/converted/NAME-<paths>/<content>/     the graphs; a new content takes the place of the old one
<cache>/converted/NAME-<paths>/source.json    what they were made of
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from miniort import __version__
from miniort.cache_directory import cache_directory
from miniort.errors import ModelError

SOURCE = "source.json"


@dataclass(frozen=True)
class ConvertedModel:
    """A folder of the cache. source: the folder or file that it was made of. size: in bytes. when: in UTC, as ISO 8601 has it."""

    place: Path
    source: Path
    size: int
    when: str


def converted_models() -> list[ConvertedModel]:
    """All that the cache holds, by source. What nothing is known of is left out."""
    found = []
    for note in sorted((cache_directory() / "converted").glob(f"*/{SOURCE}")):
        try:
            source = Path(json.loads(note.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            source = note.parent
        size = sum(path.lstat().st_size for path in note.parent.rglob("*") if not path.is_dir())
        when = datetime.fromtimestamp(note.stat().st_mtime, UTC).isoformat(timespec="seconds")
        found.append(ConvertedModel(note.parent, source, size, when))
    return sorted(found, key=lambda each: str(each.source))


def converted_folder(name: str, files: Sequence[Path], write: Callable[[Path], None]) -> Path:
    """The folder of the cache with what `write` makes of `files`, made now if it isn't there yet.

    The cache is the folder that MINIORT_CACHE_DIR names, else the platform's own place for such things. When a file has changed (size, time
    of its last change), or miniort has, it's made again and the old folder goes. Of two processes, one makes it and the other one waits.

    name: begins the folder's name, for people who look into the cache; something like the model's name.
    files: all that the result depends on: weights, configuration, tokenizer.
    write: `write(folder)` makes a folder that isn't there yet, whole or not at all, as `convert` does.
    """
    paths = sorted(path.resolve() for path in files)
    place = cache_directory() / "converted" / f"{_plain(name)}-{_digest([str(path) for path in paths])}"
    folder = place / _digest([__version__, *(f"{path} {_version(path)}" for path in paths)])
    if folder.is_dir():
        return folder

    from filelock import FileLock

    try:
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / "lock"):
            if not folder.is_dir():
                write(folder)
                (place / SOURCE).write_text(json.dumps(str(_source(files))), encoding="utf-8")
                for old in place.iterdir():
                    if old != folder and old.is_dir():
                        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{name} has to be converted to graphs first, and the cache {cache_directory()} can't be written ({error.strerror}); set "
            "MINIORT_CACHE_DIR to a folder that can, or use `miniort convert`"
        ) from None
    return folder


def _source(files: Sequence[Path]) -> Path:
    """What people would call it: the one file, or the folder with several."""
    return files[0].absolute() if len(files) == 1 else files[0].absolute().parent


def _version(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _plain(name: str) -> str:
    """A name with nothing in it that a file name can't have on some platform."""
    return "".join(character if character.isalnum() or character in "-._" else "_" for character in name).strip(".") or "model"


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]
