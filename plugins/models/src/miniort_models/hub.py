"""The Hugging Face hub: what a repository holds at a revision, and what the hub's refusals mean.

huggingface_hub does the talking: its endpoint (HF_ENDPOINT), its token (HF_TOKEN, or its own login), its session, its offline switch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from miniort.errors import ModelError

DEFAULT_REVISION = "main"

_NAME = re.compile(r"\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
_LONGEST_PART = 96
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. digest: the sha256 of a large file (64 hex digits), git's sha1 of another one (40)."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True)
class Repository:
    """What a repository holds at one commit. revision: the branch, tag or commit that was asked for."""

    name: str
    endpoint: str
    revision: str
    commit: str
    files: tuple[HubFile, ...]

    def file(self, path: str) -> HubFile | None:
        """The file at a path, None if there is none."""
        return next((file for file in self.files if file.path == path), None)


def is_hub_name(name: str) -> bool:
    """Whether it has the form of a repository's name, OWNER/NAME. Nothing is asked of the hub."""
    well_formed = _NAME.fullmatch(name) is not None and "--" not in name and ".." not in name and not name.endswith(".git")
    return well_formed and max(map(len, name.split("/"))) <= _LONGEST_PART


def check_hub_name(name: str) -> None:
    """ModelError for what can't be a repository's name."""
    if not is_hub_name(name):
        raise ModelError(f"{name!r} is no name on the hub: wanted OWNER/NAME, such as openai-community/gpt2")


def look_up(name: str, revision: str = DEFAULT_REVISION) -> Repository:
    """Ask the hub for a repository's files. ModelError if it isn't there, may not be seen, or can't be asked."""
    check_hub_name(name)
    _check_revision(revision)
    from huggingface_hub import HfApi, constants

    with hub_errors(name, revision):
        try:
            found = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, OSError):  # some of the hub's refusals are a ValueError too
                raise
            raise ModelError(f"{constants.ENDPOINT} answered with something that describes no repository; is HF_ENDPOINT right?") from None
    files = tuple(_file(constants.ENDPOINT, sibling) for sibling in found.siblings or ())
    if not _COMMIT.fullmatch(found.sha or ""):
        raise ModelError(f"{constants.ENDPOINT} gave {found.sha!r} as the commit of {name}; wanted 40 hex digits. Is HF_ENDPOINT right?")
    return Repository(name, constants.ENDPOINT, revision, str(found.sha), files)


def _check_revision(revision: str) -> None:
    """ModelError for what no branch or tag can be called. It names a file of the cache too, which must stay in the cache."""
    parts = revision.split("/")
    if not all(parts) or {".", ".."} & set(parts) or re.search(r"[\s\\:\x00-\x1f\x7f]", revision):
        raise ModelError(f"{revision!r} is no revision: wanted a branch, a tag or a commit")


def _file(endpoint: str, sibling: Any) -> HubFile:
    """One line of a repository's listing. What a server says goes into paths, so it's checked here, once."""
    path = sibling.rfilename
    windows = PureWindowsPath(path)
    parts = PurePosixPath(path).parts
    if not parts or ".." in (*parts, *windows.parts) or PurePosixPath(path).is_absolute() or windows.drive or windows.root or "\0" in path:
        raise ModelError(f"{endpoint} lists a file {path!r}, which would lie outside of the model's folder: refused")
    digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
    size = sibling.size if sibling.lfs is None else sibling.lfs.size
    if not isinstance(size, int) or size < 0 or not _DIGEST.fullmatch(digest or ""):
        raise ModelError(f"{endpoint} lists {path!r} without its size and hash, so it can't be checked; is HF_ENDPOINT right?")
    return HubFile(path, size, digest)


def http_client_error() -> type[Exception]:
    """What the HTTP client raises that huggingface_hub uses: httpx in its versions 1, httpx2 since 2."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return HTTPError


@contextmanager
def hub_errors(name: str, revision: str, path: str | None = None) -> Iterator[None]:
    """What huggingface_hub and its HTTP client raise becomes a ModelError that says what to do. path: the file that is asked for."""
    from huggingface_hub import constants, errors, get_token

    hub = constants.ENDPOINT
    what = name if path is None else f"{path} of {name}"
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise ModelError(f"{name} can't be fetched: HF_HUB_OFFLINE is set; unset it") from None
    except errors.GatedRepoError:
        if get_token() is None:
            way_out = f"ask for access at {hub}/{name}, then log in with `hf auth login` or set HF_TOKEN"
        else:
            way_out = f"your token has no access; ask for it at {hub}/{name}, with the account that the token is of"
        raise ModelError(f"{name} is gated: {way_out}") from None
    except errors.DisabledRepoError:
        raise ModelError(f"{name} was disabled on {hub}; see {hub}/{name}") from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name} has no revision {revision!r}; its branches and tags are at {hub}/{name}/tree/main") from None
    except errors.EntryNotFoundError:
        raise ModelError(f"{hub} has no file {path} in {name} at {revision}, though it lists it; try again later") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no model {name} on {hub}, or it's private: check its spelling; for a private one, log in with `hf auth login` "
            "or set HF_TOKEN"
        ) from None
    except errors.HfHubHTTPError as error:
        raise ModelError(_refusal(hub, what, error)) from None
    except http_client_error() as error:  # no connection, a connection that was cut, no answer in time
        raise ModelError(f"{hub} can't be reached ({_reason(error)}): check the network, HF_ENDPOINT and proxy settings") from None


def _refusal(hub: str, what: str, error: Any) -> str:
    status = error.response.status_code
    said = f" ({error.server_message.splitlines()[0]})" if error.server_message else ""
    if status == 401:
        return f"{hub} doesn't accept your token{said}: log in again with `hf auth login`, or set another HF_TOKEN"
    if status == 403:
        return f"{hub} forbids {what}{said}: your token may lack a permission; see {hub}/settings/tokens"
    if status == 429:
        return f"{hub} gets too many requests from here{said}: wait some minutes, and log in with `hf auth login` for a higher limit"
    if status >= 500:
        return f"{hub} failed with status {status} when asked for {what}{said}: try again later"
    return f"{hub} answered with status {status} when asked for {what}{said}"


def _reason(error: Exception) -> str:
    text = str(error)
    return text.splitlines()[0] if text else type(error).__name__
