"""Optimised graphs on disk: a session from one is as a fresh one, and whatever is stale, broken or in the way is as if it weren't there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from miniort import InferenceSession, SessionOptions, create_plugin_manager
from miniort.errors import ModelError
from miniort.kernels import Kernel
from miniort.plugins import PluginManager, hookimpl
from miniort.runtime import graph_cache, session

X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
TABLE = (40, 64)


class Counted:
    """How often passes were run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        run_passes = session.run_passes

        def counting(*arguments: Any) -> Any:
            self.count += 1
            return run_passes(*arguments)

        monkeypatch.setattr(session, "run_passes", counting)

    def in_building(self, build: Callable[[], InferenceSession]) -> tuple[int, InferenceSession]:
        before = self.count
        built = build()
        return self.count - before, built


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache that is turned on, and empty."""
    monkeypatch.setenv("MINIORT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MINIORT_GRAPH_CACHE_MB", raising=False)
    return tmp_path / "cache" / "graphs"


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def vision_model(scale: float = 1.0, opset: int = 18) -> onnx.ModelProto:
    """Two convolutions, the first normalised and with an activation, and a product with a transposed matrix."""
    rng = np.random.default_rng(1)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((scale * rng.standard_normal(shape)).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c1", "scale", "bias", "mean", "variance"], ["n1"]),
        helper.make_node("Relu", ["n1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"]),
        helper.make_node("GlobalAveragePool", ["c2"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["f", "turned"], ["y"]),
    ]
    weights = [weight("w1", 16, 3, 3, 3), weight("w2", 64, 16, 3, 3), weight("table", *TABLE)]
    weights += [weight(name, 16) for name in ("scale", "bias", "mean")]
    weights.append(numpy_helper.from_array(np.linspace(0.5, 1, 16).astype(np.float32), "variance"))
    graph = helper.make_graph(
        nodes,
        "vision",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", TABLE[0]])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def save(model: onnx.ModelProto, path: Path, *, external: bool = False) -> Path:
    """Written, and old enough that the time of another change would be another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if external:
        data = path.with_suffix(".data")
        data.unlink(missing_ok=True)
        onnx.save(model, path, save_as_external_data=True, location=data.name, size_threshold=0)
        grow_old(data)
    else:
        onnx.save(model, path)
    return path


def grow_old(path: Path) -> None:
    past = path.stat().st_mtime_ns - 10_000_000_001
    os.utime(path, ns=(past, past))


def run(built: InferenceSession) -> np.ndarray:
    found: np.ndarray = built.run(None, {"x": X})[0]
    return found


def assert_alike(one: InferenceSession, other: InferenceSession) -> None:
    """Whatever can be asked of them."""
    assert np.array_equal(run(one), run(other))
    assert one.explain() == other.explain()
    assert str(one.explain()) == str(other.explain())
    assert one.memory_plan({"batch": 2}) == other.memory_plan({"batch": 2})
    assert (one.get_inputs(), one.get_outputs()) == (other.get_inputs(), other.get_outputs())
    assert [step.info for step in one.plan.steps] == [step.info for step in other.plan.steps]


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("level", ["none", "basic", "extended", "all"])
def test_the_second_start_is_as_the_first_without_running_a_pass(
    tmp_path: Path, entries: Path, passes: Counted, monkeypatch: pytest.MonkeyPatch, level: str, external: bool
) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx", external=external)

    def build() -> InferenceSession:
        return InferenceSession(path, SessionOptions(level), ["cpu"])

    (first, fresh), (second, kept) = passes.in_building(build), passes.in_building(build)
    assert (first, second) == (1, 0)
    assert [each.name.partition("-")[0] for each in entries.iterdir()] == ["vision"]
    monkeypatch.setenv("MINIORT_GRAPH_CACHE_MB", "0")
    third, uncached = passes.in_building(build)
    assert third == 1
    assert_alike(fresh, kept)
    assert_alike(uncached, kept)


@pytest.mark.parametrize("external", [False, True])
def test_weights_are_not_written_again(tmp_path: Path, entries: Path, external: bool) -> None:
    """Neither as they are nor transposed, which is how this matrix is read."""
    model = vision_model()
    rng = np.random.default_rng(2)
    model.graph.initializer[2].CopyFrom(numpy_helper.from_array(rng.standard_normal((4000, 64)).astype(np.float32), "table"))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4000
    path = save(model, tmp_path / "vision.onnx", external=external)
    fresh, kept = (InferenceSession(path, providers=["cpu"]) for _ in range(2))
    (entry,) = entries.iterdir()
    assert entry.stat().st_size < 4000 * 64 * 4 / 2
    assert_alike(fresh, kept)
    matrices = [each for built in (fresh, kept) for each in built.plan.initial if getattr(each, "shape", None) == (64, 4000)]
    assert [each.strides for each in matrices] == [(4, 256)] * 2


def test_sessions_from_the_cache_share_weights(tmp_path: Path, entries: Path) -> None:
    from miniort import WeightStore

    path = save(vision_model(), tmp_path / "vision.onnx")
    InferenceSession(path, providers=["cpu"])
    weights = WeightStore()
    first = InferenceSession(path, providers=["cpu"], weights=weights)
    size = weights.nbytes
    second = InferenceSession(path, providers=["cpu"], weights=weights)
    assert weights.nbytes == size
    assert_alike(first, second)


def test_changed_weights_are_noticed(tmp_path: Path, entries: Path, passes: Counted) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx", external=True)
    before = run(InferenceSession(path, providers=["cpu"]))
    save(vision_model(scale=2), path, external=True)
    count, changed = passes.in_building(lambda: InferenceSession(path, providers=["cpu"]))
    assert count == 1
    assert not np.allclose(run(changed), before)
    assert len(list(entries.iterdir())) == 1, "the stale entry is written anew"
    assert passes.in_building(lambda: InferenceSession(path, providers=["cpu"]))[0] == 0


@pytest.mark.parametrize("in_place", [True, False])
def test_weights_that_were_given_the_old_time_again_are_noticed(tmp_path: Path, entries: Path, in_place: bool) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx", external=True)
    before = run(InferenceSession(path, providers=["cpu"]))
    data = path.with_suffix(".data")
    status = data.stat()
    numbers = np.fromfile(data, np.float32) * 2
    if not in_place:
        data.unlink()
    with data.open("r+b" if in_place else "wb") as file:
        file.write(numbers.tobytes())
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (data.stat().st_size, data.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert not np.allclose(run(InferenceSession(path, providers=["cpu"])), before)


def test_weights_that_were_only_just_written_are_not_trusted(tmp_path: Path, entries: Path) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx", external=True)
    path.with_suffix(".data").touch()
    InferenceSession(path, providers=["cpu"])
    assert not entries.exists()


def test_a_changed_model_of_the_same_size_and_time_is_noticed(tmp_path: Path, entries: Path) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx")
    status = path.stat()
    before = run(InferenceSession(path, providers=["cpu"]))
    model = vision_model()
    model.graph.initializer[3].raw_data = bytes(reversed(model.graph.initializer[3].raw_data))
    path.write_bytes(model.SerializeToString())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert not np.allclose(run(InferenceSession(path, providers=["cpu"])), before, equal_nan=True)


def test_what_decides_about_a_graph_tells_entries_apart(tmp_path: Path, entries: Path, passes: Counted) -> None:
    paths = [save(vision_model(), tmp_path / folder / "vision.onnx") for folder in ("here", "there")]
    ways: list[Callable[[], InferenceSession]] = [
        *(lambda level=level: InferenceSession(paths[0], SessionOptions(level), ["cpu"]) for level in ("none", "basic", "all")),
        lambda: InferenceSession(paths[1], providers=["cpu"]),
        lambda: InferenceSession(paths[0], providers=["numba", "cpu"]),
        lambda: InferenceSession(paths[0], providers=["cpu"], base_dir=tmp_path),
    ]
    assert [passes.in_building(build)[0] for build in ways] == [1] * len(ways)
    assert len(list(entries.iterdir())) == len(ways)
    assert [passes.in_building(build)[0] for build in ways] == [0] * len(ways)


PLUGIN = """
from miniort.graph.passes import GraphPass, Level
from miniort.plugins import hookimpl

def double(model, context):
    from onnx_ir import Node
    node = next(node for node in model.graph if node.outputs[0].name == "y")
    node.replace_input_with(0, twice(model.graph, node))
    context.changed(node, "{reason}")

def twice(graph, node):
    from onnx_ir import Node
    value = node.inputs[0]
    add = Node("", "Add", [value, value], name="added")
    add.outputs[0].name, add.outputs[0].type, add.outputs[0].shape = "doubled", value.type, value.shape
    graph.insert_before(node, add)
    return add.outputs[0]

@hookimpl
def miniort_graph_passes():
    return [GraphPass("double", Level.BASIC, double)]
"""


class Release(Distribution):
    """A distribution of that version."""

    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: doubling\nVersion: {self._version}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> NoReturn:
        raise NotImplementedError


@pytest.fixture
def doubling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PluginManager]]:
    """f(version, reason): a manager with the CPU provider and a plugin whose pass doubles something, written anew if a reason is given."""
    module, file = "miniort_test_doubling", tmp_path / "site" / "miniort_test_doubling.py"
    file.parent.mkdir()
    monkeypatch.syspath_prepend(str(file.parent))

    def manager(version: str = "1", reason: str | None = None) -> PluginManager:
        if reason is not None:
            file.write_text(PLUGIN.format(reason=reason))
            sys.modules.pop(module, None)
        point = EntryPoint("doubling", module, "miniort")
        vars(point).update(dist=Release(version))
        cpu = [each for each in entry_points(group="miniort") if each.name == "cpu"]
        return create_plugin_manager([point, *cpu], deny=[])

    yield manager
    sys.modules.pop(module, None)


def test_plugins_and_their_versions_tell_entries_apart(
    tmp_path: Path, entries: Path, passes: Counted, doubling: Callable[..., PluginManager]
) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx")

    def count(plugins: PluginManager) -> tuple[int, InferenceSession]:
        return passes.in_building(lambda: InferenceSession(path, providers=["cpu"], plugins=plugins))

    plain = run(count(create_plugin_manager(allow=["cpu"], deny=[]))[1])
    first, built = count(doubling("1", "for a test"))
    np.testing.assert_allclose(run(built), 2 * plain, rtol=1e-5)
    again, kept = count(doubling("1"))
    newer, _ = count(doubling("2"))
    changed, other = count(doubling("2", "for another test"))
    assert (first, again, newer, changed) == (1, 0, 1, 1)
    assert_alike(built, kept)
    assert other.explain().changes[-1].reason == "for another test"


class ByHand:
    @hookimpl
    def miniort_select_kernel(self, node: Any, candidates: Any) -> None:
        return None


class Watching:
    @hookimpl
    def miniort_observers(self, session: Any) -> list[Any]:
        return []


def test_nothing_is_kept_where_nobody_knows_whose_code_decides(tmp_path: Path, entries: Path) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx")
    plugins = create_plugin_manager(allow=["cpu"], deny=[])
    plugins.register(ByHand(), name="by hand")
    InferenceSession(path, providers=["cpu"], plugins=plugins)
    InferenceSession(path, providers=["cpu"], kernels=[Kernel("cpu", "Relu", "", 1, None, lambda node: lambda x: np.maximum(x, 0))])
    for model in (vision_model(), vision_model().SerializeToString()):
        InferenceSession(model, providers=["cpu"])
    assert not entries.exists()
    plugins = create_plugin_manager(allow=["cpu"], deny=[])
    plugins.register(Watching(), name="watching")
    InferenceSession(path, providers=["cpu"], plugins=plugins)
    assert len(list(entries.iterdir())) == 1


def test_a_broken_entry_is_left_aside_and_written_anew(tmp_path: Path, entries: Path, passes: Counted) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx")

    def build() -> InferenceSession:
        return InferenceSession(path, providers=["cpu"])

    wanted = run(build())
    (entry,) = entries.iterdir()
    whole = entry.read_bytes()
    damaged = [whole[:length] for length in range(0, len(whole), len(whole) // 23)]
    damaged += [whole + b"\x00", b"something else", bytes(len(whole))]
    for place in range(0, len(whole), len(whole) // 29):
        damaged.append(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    for number, content in enumerate(damaged):
        entry.write_bytes(content)
        count, built = passes.in_building(build)
        assert count == 1, number
        assert np.array_equal(run(built), wanted), number
        assert len(entry.read_bytes()) == len(whole), number
        assert [each.name for each in entries.iterdir()] == [entry.name]
    assert passes.in_building(build)[0] == 0


def test_an_entry_that_is_a_folder_is_no_error(tmp_path: Path, entries: Path) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx")
    wanted = run(InferenceSession(path, providers=["cpu"]))
    (entry,) = entries.iterdir()
    entry.unlink()
    entry.mkdir()
    assert np.array_equal(run(InferenceSession(path, providers=["cpu"])), wanted)
    assert [each.name for each in entries.iterdir()] == [entry.name], "what was begun is cleared away"


def test_a_place_that_cannot_be_written_is_no_error(
    tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("MINIORT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with caplog.at_level("DEBUG", "miniort"):
        wanted = run(InferenceSession(path, providers=["cpu"]))
    assert [(record.levelname, "isn't kept" in record.message) for record in caplog.records if record.name == "miniort"] == [
        ("DEBUG", False),
        ("DEBUG", True),
    ]

    def full(*arguments: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("MINIORT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(graph_cache.os, "replace", full)
    assert np.array_equal(run(InferenceSession(path, providers=["cpu"])), wanted)
    assert list(entries.iterdir()) == []


def test_what_was_read_least_lately_makes_room(tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch, passes: Counted) -> None:
    monkeypatch.setenv("MINIORT_GRAPH_CACHE_MB", "1")
    paths = []
    for number in range(3):
        model = vision_model()
        rng = np.random.default_rng(number)
        model.graph.initializer[1].CopyFrom(numpy_helper.from_array(rng.standard_normal((700, 16, 3, 3)).astype(np.float16), "w2"))
        model.graph.initializer[2].CopyFrom(numpy_helper.from_array(rng.standard_normal((8, 700)).astype(np.float32), "table"))
        model.graph.node.insert(3, helper.make_node("Cast", ["w2"], ["cast"], to=TensorProto.FLOAT))
        model.graph.node[4].input[1] = "cast"
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 8
        paths.append(save(model, tmp_path / f"model_{number}.onnx"))
    counts = []
    for number in (0, 1, 0, 2, 0, 1):
        counts.append(passes.in_building(lambda path=paths[number]: InferenceSession(path, providers=["cpu"]))[0])  # type: ignore[misc]
        for age, entry in enumerate(sorted(entries.iterdir(), key=lambda each: -each.stat().st_mtime_ns), 1):
            os.utime(entry, ns=(10**18 - age * 10**9,) * 2)
    assert counts == [1, 1, 0, 1, 0, 1]
    assert sum(each.stat().st_size for each in entries.iterdir()) <= 1_000_000


def test_the_limit_is_a_number(tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx")
    monkeypatch.setenv("MINIORT_GRAPH_CACHE_MB", "lots")
    with pytest.raises(ModelError, match=r"MINIORT_GRAPH_CACHE_MB is a number of megabytes.* found 'lots'"):
        InferenceSession(path, providers=["cpu"])


def test_unfinished_entries_of_processes_that_ended_are_cleared_away(tmp_path: Path, entries: Path) -> None:
    entries.mkdir(parents=True)
    old, new = (entries / f".unfinished-{name}" for name in ("old", "new"))
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    InferenceSession(save(vision_model(), tmp_path / "vision.onnx"), providers=["cpu"])
    assert [old.exists(), new.exists()] == [False, True]


def test_processes_may_race(tmp_path: Path, entries: Path) -> None:
    path = save(vision_model(), tmp_path / "vision.onnx", external=True)
    script = textwrap.dedent("""
        import hashlib, sys
        from pathlib import Path
        import numpy as np
        from miniort import InferenceSession

        path, entries = Path(sys.argv[1]), Path(sys.argv[2])
        x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
        sys.stdin.readline()
        for number in range(10):
            session = InferenceSession(path, providers=["cpu"])
            print(hashlib.sha256(session.run(None, {"x": x})[0].tobytes()).hexdigest())
            if number % 5 == int(sys.argv[3]):
                for entry in entries.glob("vision*"):
                    entry.unlink(missing_ok=True)
    """)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path), str(entries), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [process.communicate(timeout=100) for process in processes]
    assert [errors for _, errors in found] == [""] * 3
    assert len({line for output, _ in found for line in output.split()}) == 1
    assert not [each for each in entries.iterdir() if each.name.startswith(".")]
