"""One file of a repository into the hub's cache. A download that was cut goes on where it stopped; what came is held against its hash."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miniort.errors import ModelError
from miniort_models.hub import HubFile, Repository, http_client_error, hub_errors
from miniort_models.hub_cache import CachedRepository

RETRY_WAITS = (1.0, 2.0, 4.0)
"""Seconds between attempts after the connection was cut. Each byte that came begins the row anew."""

_CHUNK = 2**20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def fetch(
    repository: Repository,
    file: HubFile,
    cache: CachedRepository,
    received: Callable[[int], None],
    *,
    retry_waits: Sequence[float] = RETRY_WAITS,
) -> bool:
    """Make a file be in the cache, whole and as the hub describes it. Returns whether anything was fetched or completed for that.

    received: told of bytes as they come, those that are there already included; of a negative number where some had to be dropped.
    retry_waits: see `RETRY_WAITS`.

    ModelError if it can't be had. What came before a cut connection stays, for the next time; what doesn't have the right hash is deleted.
    """
    if cache.has(repository.commit, file):
        received(file.size)
        return False
    from filelock import FileLock

    lock, blob = cache.lock(file.digest), cache.blob(file.digest)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            new = not blob.is_file() or blob.stat().st_size != file.size
            if new:
                _fetch_blob(repository, file, cache, received, retry_waits)
            else:
                received(file.size)
            cache.link(repository.commit, file)
    except OSError as error:
        way_out = "set HF_HOME to a folder that can be written"
        if error.errno in _NO_ROOM:
            way_out = "make room for it, or set HF_HOME to a folder where there is"
            cache.partial(file.digest).unlink(missing_ok=True)
        raise ModelError(
            f"{file.path} ({file.size:,} bytes) can't be written to {cache.folder}: {error.strerror or error}; {way_out}"
        ) from None
    return new


def _fetch_blob(
    repository: Repository, file: HubFile, cache: CachedRepository, received: Callable[[int], None], retry_waits: Sequence[float]
) -> None:
    path = cache.partial(file.digest)
    with _Partial(path, file, received) as partial:
        resumed = partial.size > 0
        _receive(repository, file, partial, retry_waits)
        if resumed and not partial.is_right():  # what lay there may have been wrong from the beginning
            partial.restart()
            _receive(repository, file, partial, retry_waits)
        right = partial.is_right()
    if not right:
        path.unlink()
        raise ModelError(
            f"{file.path} of {repository.name} is not what the hub says that it is: its hash should begin with {file.digest[:12]}, "
            f"and that of what came begins with {partial.digest()[:12]}. It was deleted; pull again, and if it happens again, tell the "
            "repository's owner"
        )
    os.replace(path, cache.blob(file.digest))


def _receive(repository: Repository, file: HubFile, partial: _Partial, retry_waits: Sequence[float]) -> None:
    """Fetch what is missing. ModelError if the connection is cut more often than there are waits, with no byte coming in between."""
    waits = iter(retry_waits)
    while partial.size < file.size:
        before = partial.size
        try:
            _receive_rest(repository, file, partial)
            reason = f"the connection was closed after {partial.size:,} of {file.size:,} bytes"
        except _ConnectionCutError as error:
            reason = str(error)
        if partial.size > before:
            waits = iter(retry_waits)
        if partial.size >= file.size:
            return
        wait = next(waits, None)
        if wait is None:
            raise ModelError(
                f"{file.path} of {repository.name} came only up to byte {partial.size:,} of {file.size:,} ({reason}); "
                "pull again to go on from there"
            )
        time.sleep(wait)


class _ConnectionCutError(Exception):
    """The network failed in the middle of a file."""


def _receive_rest(repository: Repository, file: HubFile, partial: _Partial) -> None:
    """One request for what is missing."""
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    url = hf_hub_url(repository.name, file.path, revision=repository.commit)
    # Compressed on the way, a file has no ranges.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if partial.size:
        headers["Range"] = f"bytes={partial.size}-"
    with hub_errors(repository.name, repository.revision, file.path):
        try:
            timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
            with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
                if response.status_code == 416:  # a range that starts at the end or behind it: what is there is none of this file
                    partial.restart()
                    return
                hf_raise_for_status(response)
                if partial.size and not _goes_on(response, partial.size):
                    partial.restart()
                for chunk in response.iter_bytes():  # as they come: with a size, what had come of a chunk would be lost in a cut
                    partial.write(chunk)
        except HfHubHTTPError:
            raise
        except http_client_error() as error:
            raise _ConnectionCutError(str(error) or type(error).__name__) from None


def _goes_on(response: Any, start: int) -> bool:
    """Whether an answer begins at the byte that was asked for. Servers may ignore that, and send all of it."""
    return response.status_code == 206 and str(response.headers.get("Content-Range", "")).startswith(f"bytes {start}-")


class _Partial:
    """A file while it comes: its bytes so far on disk, and their hash."""

    def __init__(self, path: Path, file: HubFile, received: Callable[[int], None]) -> None:
        self.path, self.file, self.received = path, file, received
        self.size = 0

    def __enter__(self) -> _Partial:
        self._stream = self.path.open("a+b")
        self._begin_hash()
        self._stream.seek(0)
        while chunk := self._stream.read(_CHUNK):
            self._count(chunk)
        if self.size > self.file.size:
            self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        if not self.size and self.file.size:
            self.path.unlink(missing_ok=True)

    def write(self, chunk: bytes) -> None:
        """Append bytes. What is more than the file should have is counted only, for its hash to be wrong."""
        if self.size + len(chunk) <= self.file.size:
            self._stream.write(chunk)
        self._count(chunk)

    def restart(self) -> None:
        """Drop all bytes."""
        self.received(-self.size)
        self._stream.truncate(0)
        self._begin_hash()

    def digest(self) -> str:
        """The hash of the bytes so far."""
        return self._hash.hexdigest()

    def is_right(self) -> bool:
        """Whether they are the file."""
        self._stream.flush()
        return self.size == self.file.size and self.digest() == self.file.digest

    def _begin_hash(self) -> None:
        """A large file's is its sha256. Another one is known by git's hash of a blob: of its size, then its contents."""
        self.size = 0
        self._hash = hashlib.sha256() if len(self.file.digest) == 64 else hashlib.sha1(b"blob %d\0" % self.file.size, usedforsecurity=False)

    def _count(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        self.size += len(chunk)
        self.received(len(chunk))
