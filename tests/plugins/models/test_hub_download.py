"""Pulling from a hub: what is fetched, how a cut download goes on, and that a fault is one clear error that leaves nothing half-written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miniort.errors import ModelError
from miniort_models.hub_cache import hub_cache
from miniort_models.pull import Pulled, pull
from miniort_models.pulled import open_pulled, read_pulled

GRAPH = "onnx/model.onnx"
NAME = "tiny/gpt2"


class Watcher:
    """Notes what it's told."""

    def __init__(self) -> None:
        self.size = 0
        self.count = 0
        self.waited = False

    def waiting(self) -> None:
        self.waited = True

    def planned(self, size: int) -> None:
        self.size = size

    def received(self, count: int) -> None:
        self.count += count

    def converting(self) -> None:
        """Of no interest here."""


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def fetch(watcher: Watcher) -> Callable[..., Pulled]:
    """`pull`, which doesn't wait for a network that was cut to come back."""

    def fetch(name: str = NAME, **options: Any) -> Pulled:
        return pull(name, watcher=watcher, retry_waits=(), **options)

    return fetch


@pytest.fixture
def files(data: Path) -> dict[str, bytes]:
    """A decoder as ONNX, about 1 MB."""
    folder = data / "fixtures" / "gpt2_optimum"
    return {
        "README.md": b"# nothing that is needed",
        "config.json": (folder / "config.json").read_bytes(),
        "tokenizer.json": (data / "tokenizer" / "tokenizer.json").read_bytes(),
        GRAPH: (folder / "model.onnx").read_bytes(),
    }


def left_behind(folder: Path) -> set[str]:
    """All files below a folder, but for those that only lock."""
    return {path.name for path in folder.rglob("*") if not path.is_dir() and path.suffix != ".lock"}


def failure(fetch: Callable[..., Pulled], *arguments: Any, **options: Any) -> str:
    """The message, which is one line."""
    with pytest.raises(ModelError) as caught:
        fetch(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------------------------- what is fetched


def test_what_is_needed_is_fetched_once(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], watcher: Watcher) -> None:
    hub.add(NAME, files)
    pulled = fetch()
    assert pulled.changed
    needed = {"config.json", "tokenizer.json", GRAPH}
    assert {file.path for file in pulled.model.files} == needed
    for path in needed:
        assert (pulled.model.snapshot / path).read_bytes() == files[path]
        assert [request.sent for request in hub.of_file(path)] == [len(files[path])]
    assert not hub.of_file("README.md")
    assert watcher.size == watcher.count == sum(len(files[path]) for path in needed)
    assert open_pulled(NAME).find_graphs() == (pulled.model.snapshot / GRAPH,)

    before = len(hub.requests)
    again = fetch()
    assert not again.changed
    assert again.model == pulled.model
    assert [request.path for request in hub.requests[before:]] == ["/api/models/tiny/gpt2/revision/main"]


def test_huggingface_hub_finds_what_was_pulled(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes]) -> None:
    from huggingface_hub import constants, hf_hub_download, scan_cache_dir

    hub.add(NAME, files)
    fetch()
    found = hf_hub_download(NAME, GRAPH, local_files_only=True)
    assert Path(found).read_bytes() == files[GRAPH]
    scanned = scan_cache_dir(constants.HF_HUB_CACHE)
    assert scanned.warnings == []
    [repository] = scanned.repos
    assert (repository.repo_id, set(repository.refs)) == (NAME, {"main"})


def test_what_huggingface_hub_fetched_is_found(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes]) -> None:
    from huggingface_hub import snapshot_download

    hub.add(NAME, files)
    snapshot_download(NAME)
    before = len(hub.requests)
    model = fetch().model
    assert [request.path for request in hub.requests[before:]] == ["/api/models/tiny/gpt2/revision/main"]
    assert not any(file.fetched for file in model.files)


def test_a_branch_a_tag_and_a_commit(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes]) -> None:
    hub.add(NAME, files)
    changed = {**files, "config.json": b"{}"}
    other = hub.add(NAME, changed, revision="refs/pr/1").revisions["refs/pr/1"].commit
    model = fetch(revision="refs/pr/1").model
    assert model.commit == other
    assert (model.snapshot / "config.json").read_bytes() == b"{}"
    assert fetch(revision=other).model.commit == other
    assert fetch().model.commit != other


def test_a_branch_that_moved_on(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes]) -> None:
    """What didn't change isn't fetched again; what is no longer needed goes."""
    hub.add(NAME, files)
    first = fetch().model
    hub.add(NAME, {**files, "config.json": b'{"n_positions": 64}'})
    second = fetch()
    assert second.changed
    assert (second.model.snapshot / "config.json").read_bytes() == b'{"n_positions": 64}'
    assert len(hub.of_file(GRAPH)) == 1
    assert not first.snapshot.exists()
    assert files["config.json"] not in [blob.read_bytes() for blob in hub_cache(NAME).blob("").iterdir()]


def test_weights_in_files_that_only_the_graph_names(hub: Any, fetch: Callable[..., Pulled], data: Path) -> None:
    folder = data / "fixtures" / "llama_genai_int4_asym"
    graph = (folder / "model.onnx").read_bytes()
    assert b"model.onnx.data" in graph
    weights = (folder / "model.onnx.data").read_bytes()
    # A name of the same length that doesn't begin as the graph's does: it can only be known from the graph.
    hub.add(NAME, {"a/model.onnx": graph.replace(b"model.onnx.data", b"weights-in-here"), "a/weights-in-here": weights})
    model = fetch().model
    assert (model.snapshot / "a" / "weights-in-here").read_bytes() == weights
    hub.add("tiny/incomplete", {"a/model.onnx": graph})
    assert "tiny/incomplete lacks a/model.onnx.data, where a/model.onnx says that its weights are" in failure(fetch, "tiny/incomplete")


def test_an_empty_file(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes]) -> None:
    hub.add(NAME, {**files, "merges.txt": b""})
    assert (fetch().model.snapshot / "merges.txt").read_bytes() == b""


def test_a_token_goes_to_the_hub_and_not_to_its_storage(
    hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    hub.add(NAME, files, gated="hf_right")
    fetch()
    assert {request.authorization for request in hub.requests if "/storage/" not in request.path} == {"Bearer hf_right"}
    assert {request.authorization for request in hub.requests if "/storage/" in request.path} == {None}


def test_two_pulls_at_once(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes]) -> None:
    hub.add(NAME, files)
    watchers = [Watcher(), Watcher()]
    results: list[Pulled] = []
    threads = [threading.Thread(target=lambda each=each: results.append(pull(NAME, watcher=each))) for each in watchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.changed for result in results) == [False, True]
    assert len(hub.of_file(GRAPH)) == 1


# --------------------------------------------------------------------------------------- a connection that is cut


def test_a_cut_connection_goes_on_with_the_next_pull(
    hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], tmp_path: Path, watcher: Watcher
) -> None:
    hub.add(NAME, files)
    hub.cut[GRAPH] = [300_000]
    message = failure(fetch)
    assert f"{GRAPH} of {NAME} came only up to byte 300,000 of {len(files[GRAPH]):,}" in message
    assert "pull again to go on from there" in message
    assert read_pulled(NAME) is None
    with pytest.raises(ModelError, match="tiny/gpt2 was pulled only in part; `miniort pull tiny/gpt2` goes on"):
        open_pulled(NAME)

    watcher.count = 0
    model = fetch().model
    first, second = hub.of_file(GRAPH)
    assert (first.range, first.sent) == (None, 300_000)
    assert (second.range, second.sent) == ("bytes=300000-", len(files[GRAPH]) - 300_000)
    assert (model.snapshot / GRAPH).read_bytes() == files[GRAPH]
    assert watcher.count == watcher.size
    assert all(file.fetched for file in model.files)
    assert not [name for name in left_behind(tmp_path) if "incomplete" in name or "unfinished" in name]


def test_one_pull_goes_on_by_itself(hub: Any, files: dict[str, bytes], watcher: Watcher) -> None:
    hub.add(NAME, files)
    hub.cut[GRAPH] = [1000, 0, 500, 2000]
    model = pull(NAME, watcher=watcher, retry_waits=(0, 0)).model
    assert (model.snapshot / GRAPH).read_bytes() == files[GRAPH]
    ranges = [request.range for request in hub.of_file(GRAPH)]
    assert ranges == [None, "bytes=1000-", "bytes=1000-", "bytes=1500-", "bytes=3500-"]
    assert sum(request.sent for request in hub.of_file(GRAPH)) == len(files[GRAPH])


def test_ctrl_c_in_the_middle(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes]) -> None:
    class Impatient(Watcher):
        def received(self, count: int) -> None:
            super().received(count)
            if self.count > 200_000:
                raise KeyboardInterrupt

    hub.add(NAME, files)
    with pytest.raises(KeyboardInterrupt):
        pull(NAME, watcher=Impatient())
    assert (fetch().model.snapshot / GRAPH).read_bytes() == files[GRAPH]
    second = hub.of_file(GRAPH)[1]
    assert second.range is not None
    assert second.sent < len(files[GRAPH])


def test_it_gives_up_when_nothing_more_comes(hub: Any, files: dict[str, bytes], watcher: Watcher) -> None:
    hub.add(NAME, files)
    hub.cut[GRAPH] = [1000, -1]
    with pytest.raises(ModelError, match="came only up to byte 1,000"):
        pull(NAME, watcher=watcher, retry_waits=(0, 0))


def test_a_server_that_sends_all_of_it_again(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], watcher: Watcher) -> None:
    hub.add(NAME, files)
    hub.cut[GRAPH] = [300_000]
    failure(fetch)
    hub.ignore_range = True
    watcher.count = 0
    model = fetch().model
    assert (model.snapshot / GRAPH).read_bytes() == files[GRAPH]
    assert watcher.count == watcher.size


@pytest.mark.parametrize("beginning", [b"x" * 1000, b"x" * 2_000_000], ids=["other bytes", "more than all"])
def test_a_beginning_that_is_not_of_the_file(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], beginning: bytes) -> None:
    hub.add(NAME, files)
    hub.cut[GRAPH] = [300_000]
    failure(fetch)
    [partial] = hub_cache(NAME).blob("").glob("*.incomplete")
    partial.write_bytes(beginning)
    assert (fetch().model.snapshot / GRAPH).read_bytes() == files[GRAPH]


def test_a_beginning_that_is_all_of_it(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes]) -> None:
    hub.add(NAME, files)
    hub.cut[GRAPH] = [300_000]
    failure(fetch)
    [partial] = hub_cache(NAME).blob("").glob("*.incomplete")
    partial.write_bytes(files[GRAPH])
    assert (fetch().model.snapshot / GRAPH).read_bytes() == files[GRAPH]
    assert len(hub.of_file(GRAPH)) == 1


def test_the_model_that_was_there_stays(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes]) -> None:
    hub.add(NAME, files)
    first = fetch().model
    hub.add(NAME, {**files, GRAPH: files[GRAPH][:-1]})
    hub.cut[GRAPH] = [1000]
    failure(fetch)
    assert open_pulled(NAME) == first
    assert (first.snapshot / GRAPH).read_bytes() == files[GRAPH]


# ----------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("path", ["config.json", GRAPH], ids=["git's hash", "sha256"])
def test_contents_of_another_hash(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], path: str, tmp_path: Path) -> None:
    hub.add(NAME, files)
    hub.replaced[path] = bytes([files[path][0] ^ 1]) + files[path][1:]
    message = failure(fetch)
    assert f"{path} of {NAME} is not what the hub says that it is" in message
    assert "It was deleted" in message
    assert hub.replaced[path] not in [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    hub.replaced.clear()
    assert (fetch().model.snapshot / path).read_bytes() == files[path]


def test_more_bytes_than_there_should_be(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], tmp_path: Path) -> None:
    hub.add(NAME, files)
    hub.replaced["config.json"] = files["config.json"] + b" "
    assert "is not what the hub says that it is" in failure(fetch)
    assert left_behind(tmp_path) == set()


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ({"name": "gpt2"}, ["'gpt2' is no name on the hub: wanted OWNER/NAME, such as openai-community/gpt2"]),
        ({"name": "a/b/c"}, ["'a/b/c' is no name on the hub"]),
        ({"name": "../gpt2"}, ["'../gpt2' is no name on the hub"]),
        ({"name": "nobody/nothing"}, ["there is no model nobody/nothing on http://127.0.0.1", "private", "hf auth login", "HF_TOKEN"]),
        ({"revision": "v9"}, ["tiny/gpt2 has no revision 'v9'", "/tiny/gpt2/tree/main"]),
        ({"revision": "../../v9"}, ["'../../v9' is no revision"]),
        ({"file": "q4"}, ["--file q4: tiny/gpt2 has no such ONNX or GGUF file; it has onnx/model.onnx (1.0 MB)"]),
        ({"dtype": "int8"}, ["tiny/gpt2 comes as ONNX graphs, whose weights stay as they are; leave --dtype out"]),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for(
    hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], fault: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    hub.add(NAME, files)
    message = failure(fetch, **fault)
    for part in parts:
        assert part in message
    assert left_behind(tmp_path) == set()


def test_a_file_that_is_listed_and_not_there(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], tmp_path: Path) -> None:
    hub.add(NAME, files)
    hub.status["config.json"] = 404
    hub.repositories[NAME].listing["config.json"] = {}
    message = failure(fetch)
    assert "404" in message
    assert "config.json of tiny/gpt2" in message
    assert left_behind(tmp_path) == set()

    hub.status.clear()
    commit = hub.repositories[NAME].revisions["main"]
    with_one_more = [*commit.files, "generation_config.json"]
    commit.files["generation_config.json"] = b"{}"

    class Gone(dict[str, bytes]):
        """Listed, and not there when it's asked for."""

        def __contains__(self, path: object) -> bool:
            return path != "generation_config.json" and path in with_one_more

    commit.files = Gone(commit.files)
    assert "has no file generation_config.json in tiny/gpt2 at main, though it lists it" in failure(fetch)
    assert left_behind(tmp_path) == set()


@pytest.mark.parametrize(
    ("token", "parts"),
    [
        (None, ["tiny/gpt2 is gated: ask for access at http://127.0.0.1", "/tiny/gpt2, then log in with `hf auth login` or set HF_TOKEN"]),
        ("hf_other", ["tiny/gpt2 is gated: your token has no access; ask for it at http://127.0.0.1", "/tiny/gpt2"]),
    ],
)
def test_a_gated_repository(
    hub: Any,
    fetch: Callable[..., Pulled],
    files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    token: str | None,
    parts: list[str],
    tmp_path: Path,
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.add(NAME, files, gated="hf_right")
    message = failure(fetch)
    for part in parts:
        assert part in message
    assert token is None or token not in message
    assert left_behind(tmp_path) == set()


@pytest.mark.parametrize(
    ("status", "part"),
    [
        (500, "failed with status 500 when asked for"),
        (503, "try again later"),
        (429, "gets too many requests from here"),
        (403, "forbids"),
        (418, "answered with status 418"),
    ],
)
@pytest.mark.parametrize("what", ["api", "config.json"])
def test_a_server_that_fails(
    hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], status: int, part: str, what: str, tmp_path: Path
) -> None:
    hub.add(NAME, files)
    hub.status[what] = status
    message = failure(fetch)
    assert part in message
    assert hub.endpoint in message
    assert left_behind(tmp_path) == set()


def test_a_server_that_fails_in_the_middle(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes]) -> None:
    """What has come whole is there for the next time."""
    hub.add(NAME, files)
    hub.status[GRAPH] = 500
    assert "status 500" in failure(fetch)
    hub.status.clear()
    fetch()
    assert len(hub.of_file("tokenizer.json")) == 1


def test_no_network(hub: Any, fetch: Callable[..., Pulled], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = failure(fetch)
    assert message.startswith("http://127.0.0.1:9 can't be reached (")
    assert "check the network, HF_ENDPOINT and proxy settings" in message
    assert left_behind(tmp_path) == set()


def test_something_that_is_no_hub(hub: Any, fetch: Callable[..., Pulled]) -> None:
    """Such as the page on which one logs in to a hotel's network."""
    hub.not_the_hub = True
    assert "answered with something that describes no repository; is HF_ENDPOINT right?" in failure(fetch)


@pytest.mark.parametrize(
    "path", ["../../../evil.json", "/etc/evil.json", "onnx/../../evil.json", "C:\\evil.json", "..\\evil.json", "\\\\host\\evil", "a\0b"]
)
def test_names_that_lead_out_of_the_folder(
    hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], path: str, tmp_path: Path
) -> None:
    hub.add(NAME, {**files, path: b"{}"})
    message = failure(fetch)
    assert "which would lie outside of the model's folder: refused" in message
    assert left_behind(tmp_path) == set()
    assert not (tmp_path.parent / "evil.json").exists()


@pytest.mark.parametrize("told", [{"blobId": "../../evil"}, {"blobId": None}, {"size": -1}, {"size": None}])
def test_hashes_and_sizes_that_cannot_be(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], told: dict[str, Any]) -> None:
    """A hash becomes a file's name."""
    hub.add(NAME, files).listing["config.json"] = told
    assert "lists 'config.json' without its size and hash, so it can't be checked" in failure(fetch)


def test_a_disk_that_is_too_small_is_known_before(
    hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add(NAME, files)
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    message = failure(fetch)
    assert "tiny/gpt2 needs 1.0 MB more in " in message
    assert "where 1.0 kB are free; make room, or set HF_HOME" in message
    assert left_behind(tmp_path) == set()


def test_what_has_come_is_not_forgotten_when_the_disk_is_full(
    hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add(NAME, files)
    hub.cut[GRAPH] = [300_000]
    failure(fetch)
    before = left_behind(tmp_path)
    with monkeypatch.context() as patched:
        free = shutil.disk_usage(tmp_path)._replace(free=1000)
        patched.setattr(shutil, "disk_usage", lambda path: free)
        assert "tiny/gpt2 needs 711 kB more in " in failure(fetch)
    assert left_behind(tmp_path) == before
    fetch()
    assert hub.of_file(GRAPH)[-1].range == "bytes=300000-"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit for a file's size")
def test_a_disk_that_gets_full(hub: Any, files: dict[str, bytes], tmp_path: Path) -> None:
    """The limit for a file's size stands for it: writing fails in the middle as it does then."""
    hub.add(NAME, files)
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        f"from miniort_cli.main import cli; cli(['pull', '{NAME}'], prog_name='miniort')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert f"{GRAPH} ({len(files[GRAPH]):,} bytes) can't be written to " in line
    assert "make room for it" in line
    assert not [name for name in left_behind(tmp_path) if "incomplete" in name]


@pytest.mark.skipif(sys.platform == "win32" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_cache_that_cannot_be_written(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], tmp_path: Path) -> None:
    hub.add(NAME, files)
    (tmp_path / "hf-home").mkdir(mode=0o500)
    assert "can't be written" in failure(fetch)


def test_a_file_where_the_cache_should_be(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], tmp_path: Path) -> None:
    hub.add(NAME, files)
    (tmp_path / "hf-home").write_text("")
    assert "Not a directory" in failure(fetch)


# ---------------------------------------------------------------------------------------------------------- offline


def test_offline(hub: Any, fetch: Callable[..., Pulled], files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.add(NAME, files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert failure(fetch) == "tiny/gpt2 can't be fetched: HF_HUB_OFFLINE is set; unset it"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    model = fetch().model
    before = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch().model == model
    assert "HF_HUB_OFFLINE is set" in failure(fetch, revision="v2")
    (model.snapshot / GRAPH).unlink()
    model.cache.blob(next(file.digest for file in model.files if file.path == GRAPH)).unlink()
    assert "HF_HUB_OFFLINE is set" in failure(fetch)
    assert len(hub.requests) == before
