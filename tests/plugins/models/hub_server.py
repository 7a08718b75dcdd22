"""A small server that speaks the hub's protocol, as far as huggingface_hub and `miniort pull` use it.

Repositories are dictionaries of contents. Large files (by their endings) are redirected to a second server of another origin, as the hub
redirects to its storage. Every request is noted, and faults can be asked for.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".onnx", ".onnx_data", ".data", ".bin")


@dataclass(frozen=True)
class Request:
    """One request, and how many bytes of a file were sent for it."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    status: int
    sent: int


@dataclass
class Revision:
    """A commit, and its files."""

    commit: str
    files: dict[str, bytes]


@dataclass
class ServedRepository:
    """One repository. gated: the token that may see its files; None: anybody may."""

    revisions: dict[str, Revision]
    gated: str | None = None
    listing: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Entries of the listing that shall say something else than the truth, by path."""


def is_large(path: str) -> bool:
    return path.endswith(LARGE)


def digest_of(path: str, content: bytes) -> str:
    """As git names a small file, and git-lfs a large one."""
    return hashlib.sha256(content).hexdigest() if is_large(path) else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubServer:
    """The hub (`endpoint`) and its storage. Faults, by a file's path:

    cut: bytes that are sent before the connection is closed, a number for each request; -1: it's closed at once, from then on.
    status: answered instead of the file, or (under "api") instead of the listing.
    replaced: contents that are sent instead of the right ones.
    ignore_range: whole files are sent whatever was asked for.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, ServedRepository] = {}
        self.requests: list[Request] = []
        self.cut: dict[str, list[int]] = {}
        self.status: dict[str, int] = {}
        self.replaced: dict[str, bytes] = {}
        self.ignore_range = False
        self.not_the_hub = False
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self)) for _ in range(2)]
        self.endpoint, self.storage = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    @contextmanager
    def running(self) -> Iterator[HubServer]:
        threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}) for server in self._servers]
        for server in self._servers:
            server.daemon_threads = False  # so that closing waits for them
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            for server, thread in zip(self._servers, threads, strict=True):
                server.shutdown()
                thread.join()
                server.server_close()

    def add(self, name: str, files: dict[str, bytes], *, revision: str = "main", gated: str | None = None) -> ServedRepository:
        """Offer files under a revision. What isn't given is as it was."""
        repository = self.repositories.setdefault(name, ServedRepository({}))
        told = json.dumps([name, revision, {path: digest_of(path, content) for path, content in files.items()}])
        repository.revisions[revision] = Revision(hashlib.sha1(told.encode()).hexdigest(), files)
        repository.gated = gated
        return repository

    def of_file(self, path: str) -> list[Request]:
        """Requests that got contents of a file, from the hub or from its storage."""
        large = [
            f"/storage/{digest_of(path, r.files[path])}"
            for repo in self.repositories.values()
            for r in repo.revisions.values()
            if path in r.files
        ]
        gets = [request for request in self.requests if request.method == "GET" and request.status != 302]
        return [request for request in gets if request.path.endswith(f"/{path}") or request.path in large]


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is printed."""

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            self.sent = 0
            self.code = 0
            try:
                with suppress(ConnectionError):  # a client may go away
                    self._route(unquote(urlsplit(self.path).path))
            finally:
                path = unquote(urlsplit(self.path).path)
                request = Request(self.command, path, self.headers.get("Range"), self.headers.get("Authorization"), self.code, self.sent)
                hub.requests.append(request)

        def send_response(self, code: int, message: str | None = None) -> None:
            self.code = code
            super().send_response(code, message)

        def _route(self, path: str) -> None:
            if hub.not_the_hub:
                self._send(200, b"<html>Please log in to this network</html>", {"Content-Type": "text/html"})
            elif match := re.fullmatch("/storage/(.+)", path):
                self._storage(match[1])
            elif match := re.fullmatch("/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^?]+))?", path):
                self._api(match[1], match[2], match[3] or "main")
            elif match := re.fullmatch("/([^/]+/[^/]+)/resolve/([0-9a-f]{40}|[^/]+)/(.+)", path):
                self._resolve(*match.groups())
            else:
                self._send(404, b"")

        def _find(self, name: str, revision: str) -> tuple[ServedRepository, Revision] | None:
            """The repository at a revision; where there is none, that is answered."""
            repository = hub.repositories.get(name)
            if repository is None:
                code = 404 if self.headers.get("Authorization") else 401
                self._refuse(code, "RepoNotFound", "Invalid username or password.")
                return None
            found = repository.revisions.get(revision) or next((r for r in repository.revisions.values() if r.commit == revision), None)
            if found is None:
                self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
                return None
            return repository, found

        def _api(self, name: str, what: str | None, revision: str) -> None:
            if "api" in hub.status:
                self._send(hub.status["api"], b"")
                return
            found = self._find(name, revision)
            if found is None:
                return
            repository, at = found
            if what == "tree":
                self._send_json([{"type": "file", "path": path, **self._sizes(path, content)} for path, content in at.files.items()])
                return
            blobs = "blobs" in parse_qs(urlsplit(self.path).query)
            siblings = []
            for path, content in at.files.items():
                described: dict[str, Any] = {"rfilename": path}
                if blobs:
                    sizes = self._sizes(path, content)
                    described |= {"size": sizes["size"], "blobId": sizes["oid"]}
                    if "lfs" in sizes:
                        described["lfs"] = {"sha256": sizes["lfs"]["oid"], "size": len(content), "pointerSize": 130}
                siblings.append(described | repository.listing.get(path, {}))
            self._send_json({"id": name, "modelId": name, "sha": at.commit, "gated": bool(repository.gated), "siblings": siblings})

        def _sizes(self, path: str, content: bytes) -> dict[str, Any]:
            if not is_large(path):
                return {"size": len(content), "oid": digest_of(path, content)}
            pointer = hashlib.sha1(path.encode()).hexdigest()
            return {
                "size": len(content),
                "oid": pointer,
                "lfs": {"oid": digest_of(path, content), "size": len(content), "pointerSize": 130},
            }

        def _resolve(self, name: str, revision: str, path: str) -> None:
            found = self._find(name, revision)
            if found is None:
                return
            repository, at = found
            if repository.gated is not None and self.headers.get("Authorization") != f"Bearer {repository.gated}":
                code = 403 if self.headers.get("Authorization") else 401
                self._refuse(code, "GatedRepo", f"Access to model {name} is restricted.")
            elif path in hub.status:
                self._send(hub.status[path], b"")
            elif path not in at.files:
                self._refuse(404, "EntryNotFound", "Entry not found")
            else:
                content = at.files[path]
                digest = digest_of(path, content)
                headers = {"X-Repo-Commit": at.commit, "ETag": f'"{digest}"'}
                if is_large(path):
                    headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
                    self._send(302, b"", {**headers, "Location": f"{hub.storage}/storage/{digest}"})
                else:
                    self._send_file(path, content, headers)

        def _storage(self, digest: str) -> None:
            for repository in hub.repositories.values():
                for revision in repository.revisions.values():
                    for path, content in revision.files.items():
                        if is_large(path) and digest_of(path, content) == digest:
                            self._send_file(path, content, {"ETag": f'"{digest}"'})
                            return
            self._send(404, b"")

        def _send_file(self, path: str, content: bytes, headers: dict[str, str]) -> None:
            content = hub.replaced.get(path, content)
            start, code = 0, 200
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            if asked and not hub.ignore_range:
                start, code = int(asked[1]), 206
                if start >= len(content):
                    self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                    return
                headers = {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            cuts = hub.cut.get(path, []) if self.command == "GET" else []
            if cuts and cuts[0] < 0:
                return  # which closes the connection
            self._send(code, content[start:], headers, cut=cuts.pop(0) if cuts else None)

        def _refuse(self, code: int, kind: str, message: str) -> None:
            body = json.dumps({"error": message}).encode()
            self._send(code, body, {"X-Error-Code": kind, "X-Error-Message": message, "Content-Type": "application/json"})

        def _send_json(self, value: Any) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None, *, cut: int | None = None) -> None:
            self.send_response(code)
            for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.sent = len(body[:cut])
                self.wfile.write(body[:cut])

    return Handler
