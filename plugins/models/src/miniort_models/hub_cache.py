"""The cache of huggingface_hub on disk: where files lie in it, and how they are put there and taken out again.

    <cache>/models--OWNER--NAME/blobs/<digest>                 contents, by their hash
    <cache>/models--OWNER--NAME/snapshots/<commit>/<path>      links to them, as the repository names them
    <cache>/models--OWNER--NAME/refs/<revision>                the commit that a branch was at

The layout is documented by huggingface_hub; what other programs put there is found, and they find what is put there. It isn't filled by
`hf_hub_download`, because that begins a cut download from nothing (since 2.0) and doesn't compare hashes.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from miniort_models.hub import HubFile, Repository


@dataclass(frozen=True)
class CachedRepository:
    """The part of a hub cache that is about one repository."""

    cache: Path
    name: str

    @property
    def folder(self) -> Path:
        """Where all of it is."""
        return self.cache / ("models--" + self.name.replace("/", "--"))

    def snapshot(self, commit: str) -> Path:
        """The repository's folder at a commit, as far as it was fetched."""
        return self.folder / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        """The file with contents of this hash."""
        return self.folder / "blobs" / digest

    def partial(self, digest: str) -> Path:
        """The file with what has come of them so far."""
        return self.folder / "blobs" / f"{digest}.incomplete"

    def lock(self, digest: str) -> Path:
        """What huggingface_hub locks while it fetches them."""
        return self.cache / ".locks" / self.folder.name / f"{digest}.lock"

    def has(self, commit: str, file: HubFile) -> bool:
        """Whether a file is there, whole."""
        return _size(self.snapshot(commit) / file.path) == file.size

    def received(self, commit: str, file: HubFile) -> int:
        """How many of a file's bytes needn't be fetched any more."""
        if self.has(commit, file) or _size(self.blob(file.digest)) == file.size:
            return file.size
        return min(_size(self.partial(file.digest)) or 0, file.size)

    def link(self, commit: str, file: HubFile) -> None:
        """Make a blob that is there appear in a commit's folder, by a relative link; where there are no links, as the file itself."""
        blob, place = self.blob(file.digest), self.snapshot(commit) / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        try:
            place.symlink_to(os.path.relpath(blob, place.parent))
        except OSError:
            shutil.move(blob, place)

    def name_commit(self, repository: Repository) -> None:
        """Note which commit the revision is, for programs that look it up without the network."""
        if repository.revision == repository.commit:
            return
        place = self.folder / "refs" / repository.revision
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = place.with_name(f"{place.name}.{os.getpid()}.tmp")
        unfinished.write_text(repository.commit)
        os.replace(unfinished, place)

    def remove(self, commit: str, files: list[HubFile]) -> int:
        """Take files of a commit out, and their contents where no other commit has them. Returns how many bytes that freed."""
        freed = 0
        for file in files:
            place = self.snapshot(commit) / file.path
            freed += 0 if place.is_symlink() else _size(place) or 0
            place.unlink(missing_ok=True)
        still_used = {os.path.realpath(path) for path in (self.folder / "snapshots").rglob("*") if not path.is_dir()}
        for file in files:
            for path in (self.blob(file.digest), self.partial(file.digest)):
                if os.path.realpath(path) not in still_used:
                    freed += _size(path) or 0
                    path.unlink(missing_ok=True)
        self._remove_what_is_empty()
        return freed

    def _remove_what_is_empty(self) -> None:
        """Folders without a file, and names of commits that aren't there any more; all of it where there are no contents left."""
        for top in (self.folder / "snapshots", self.folder / "blobs"):
            for folder, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):  # not empty
                    os.rmdir(folder)
        for name in [path for path in (self.folder / "refs").rglob("*") if path.is_file()]:
            if not self.snapshot(name.read_text(encoding="utf-8", errors="replace").strip() or "-").exists():
                name.unlink()
        if not (self.folder / "snapshots").exists() and not (self.folder / "blobs").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.rmtree(self.lock("").parent, ignore_errors=True)


def hub_cache(name: str) -> CachedRepository:
    """A repository's part of the cache that huggingface_hub uses: HF_HUB_CACHE, else the folder `hub` in HF_HOME."""
    from huggingface_hub import constants

    return CachedRepository(Path(constants.HF_HUB_CACHE), name)


def _size(path: Path) -> int | None:
    """How many bytes a file has, through links; None if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None
