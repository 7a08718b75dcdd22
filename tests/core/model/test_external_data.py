"""Weights in files beside the model: mapped, shared, and only from where they may come from."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from miniort import InferenceSession, WeightStore, load_model
from miniort.errors import ModelError

W = np.arange(4096, dtype=np.float32).reshape(64, 64)
X = np.ones((1, 64), np.float32)
Y = X @ W


def external_model(location: str = "model.onnx_data", **fields: int) -> onnx.ModelProto:
    """y = x @ w, where w lies in an external file."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=W.shape, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": 0, "length": W.nbytes, **fields}.items():
        weight.external_data.add(key=key, value=str(value))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 64])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its weights; a file outside of the folder that nobody may read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(external_model().SerializeToString())
    (folder / "model.onnx_data").write_bytes(W.tobytes())
    (tmp_path / "secret").write_bytes(W.tobytes())
    return folder


def load(folder: Path, proto: onnx.ModelProto) -> object:
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return load_model(folder / "model.onnx")


def test_weights_are_mapped_and_not_copied(folder: Path) -> None:
    model = load_model(folder / "model.onnx")
    array = model.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not array.flags.writeable
    assert np.array_equal(array, W)


def test_two_weights_of_one_file_share_one_map(folder: Path) -> None:
    proto = external_model()
    second = proto.graph.initializer.add()
    second.CopyFrom(proto.graph.initializer[0])
    second.name = "v"
    second.dims[0] = 32
    second.external_data[1].value = str(W.nbytes // 2)
    second.external_data[2].value = str(W.nbytes // 2)
    proto.graph.node.append(helper.make_node("MatMul", ["y", "v2"], ["z"]))
    proto.graph.node.insert(1, helper.make_node("Concat", ["v", "v"], ["v2"], axis=0))
    proto.graph.output[0].name = "z"
    model = load(folder, proto)
    w, v = (model.graph.initializers[name].const_value.numpy() for name in "wv")  # type: ignore[attr-defined]
    assert np.shares_memory(w, v)
    assert np.array_equal(v, W[32:])


@pytest.mark.parametrize("relative", [False, True])
def test_a_session_from_a_path(folder: Path, relative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = "model.onnx" if relative else folder / "model.onnx"
    assert np.array_equal(InferenceSession(path).run(None, {"x": X})[0], Y)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_model_without_a_path_needs_base_dir(folder: Path, as_bytes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = external_model().SerializeToString() if as_bytes else external_model()
    monkeypatch.chdir(folder)  # the working directory is no answer
    with pytest.raises(ModelError, match=r"'w'.*'model\.onnx_data'.*base_dir"):
        InferenceSession(model)
    assert np.array_equal(InferenceSession(model, base_dir=folder).run(None, {"x": X})[0], Y)
    assert np.array_equal(InferenceSession(model, base_dir=str(folder)).run(None, {"x": X})[0], Y)
    assert np.array_equal(InferenceSession(model, base_dir=".").run(None, {"x": X})[0], Y)


def test_base_dir_goes_before_the_folder_of_the_file(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.onnx_data").write_bytes((2 * W).tobytes())
    assert np.array_equal(InferenceSession(folder / "model.onnx", base_dir=other).run(None, {"x": X})[0], 2 * Y)


@pytest.mark.parametrize("location", ["../secret", "sub/../../secret", "{outside}", "./../model/../secret", "..", ".", ""])
@pytest.mark.parametrize("relative", [False, True])
def test_a_path_that_leaves_the_folder_is_refused(
    folder: Path, tmp_path: Path, location: str, relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = location.format(outside=tmp_path / "secret")
    (folder / "model.onnx").write_bytes(external_model(location).SerializeToString())
    monkeypatch.chdir(folder)
    with pytest.raises(ModelError, match="outside of the model's folder") as caught:
        load_model("model.onnx" if relative else folder / "model.onnx")
    assert "a link" not in str(caught.value)


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="a link to"):
        load(folder, external_model("link"))
    (folder / "up").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ModelError, match="a link to"):
        load(folder, external_model("up/secret"))


def test_a_link_inside_of_the_folder_is_followed(folder: Path) -> None:
    (folder / "link").symlink_to("model.onnx_data")
    assert load(folder, external_model("link"))


def hub_cache(root: Path, blob: Path | None = None) -> Path:
    """The layout of a hub cache: files of a revision are links to blobs that are named by hash."""
    repository = root / "hub" / "models--someone--gpt"
    snapshot = repository / "snapshots" / "0123abcd" / "onnx"
    snapshot.mkdir(parents=True)
    blobs = repository / "blobs"
    blobs.mkdir()
    (blobs / "aaaa").write_bytes(external_model().SerializeToString())
    (blobs / "bbbb").write_bytes(W.tobytes())
    up = Path("..", "..", "..", "blobs")
    (snapshot / "model.onnx").symlink_to(up / "aaaa")
    (snapshot / "model.onnx_data").symlink_to(up / "bbbb" if blob is None else blob)
    return snapshot


@pytest.mark.parametrize("relative", [False, True])
def test_a_link_that_a_hub_cache_made_is_followed(tmp_path: Path, relative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_cache(tmp_path)
    monkeypatch.chdir(snapshot)
    session = InferenceSession("model.onnx" if relative else snapshot / "model.onnx")
    assert np.array_equal(session.run(None, {"x": X})[0], Y)


def test_a_blob_that_repositories_share(tmp_path: Path) -> None:
    """Since huggingface_hub 2.4, a repository's blob may be a link itself."""
    snapshot = hub_cache(tmp_path)
    blob, shared = tmp_path / "hub" / "models--someone--gpt" / "blobs" / "bbbb", tmp_path / "hub" / "blobs" / "cc" / "cccc"
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(Path("..", "..", "blobs", "cc", "cccc"))
    session = InferenceSession(snapshot / "model.onnx")
    assert np.array_equal(session.run(None, {"x": X})[0], Y)


def test_a_hub_cache_behind_a_link(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path / "disk")
    (tmp_path / "home").symlink_to(tmp_path / "disk", target_is_directory=True)
    path = tmp_path / "home" / snapshot.relative_to(tmp_path / "disk") / "model.onnx"
    assert np.array_equal(InferenceSession(path).run(None, {"x": X})[0], Y)


def test_a_link_from_one_hub_cache_to_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(W.tobytes())
    snapshot = hub_cache(tmp_path, blob=tmp_path / "secret")
    with pytest.raises(ModelError, match="a link to"):
        load_model(snapshot / "model.onnx")
    other = hub_cache(tmp_path / "other")
    (snapshot / "model.onnx_data").unlink()
    (snapshot / "model.onnx_data").symlink_to(other / "model.onnx_data")
    with pytest.raises(ModelError, match="a link to"):
        load_model(snapshot / "model.onnx")


def test_a_missing_file(folder: Path) -> None:
    (folder / "model.onnx_data").unlink()
    with pytest.raises(ModelError, match=r"model\.onnx_data.*can't be read"):
        load_model(folder / "model.onnx")


@pytest.mark.parametrize("size", [0, 1, W.nbytes // 2, W.nbytes - 1])
def test_a_file_that_was_cut_short(folder: Path, size: int) -> None:
    (folder / "model.onnx_data").write_bytes(W.tobytes()[:size])
    with pytest.raises(ModelError, match=rf"has only {size} bytes"):
        load_model(folder / "model.onnx")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 4}, "takes 16384 bytes, the model says 4"),
        ({"offset": 4}, "has only"),
        ({"offset": -4}, r"model\.onnx"),
        ({"offset": 1 << 62}, "has only"),
    ],
)
def test_offsets_and_lengths_that_do_not_fit(folder: Path, fields: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(folder, external_model(**fields))


def test_a_folder_in_place_of_the_file(folder: Path) -> None:
    (folder / "sub").mkdir()
    with pytest.raises(ModelError, match="sub"):
        load(folder, external_model("sub"))


def test_an_offset_that_is_not_aligned(folder: Path) -> None:
    (folder / "odd").write_bytes(b"abc" + W.tobytes())
    load(folder, external_model("odd", offset=3))
    assert np.array_equal(InferenceSession(folder / "model.onnx").run(None, {"x": X})[0], Y)


def test_external_text_is_refused(folder: Path) -> None:
    proto = external_model()
    proto.graph.initializer[0].data_type = TensorProto.STRING
    with pytest.raises(ModelError, match="text can't be kept in an external file"):
        load(folder, proto)


def test_external_data_inside_of_bodies_and_constants(folder: Path) -> None:
    """In an initializer of a branch, in a Constant of the other one."""
    weight = external_model().graph.initializer[0]
    constant = helper.make_node("Constant", [], ["k"], value=weight)
    out = helper.make_tensor_value_info("o", TensorProto.FLOAT, ["N", 64])
    then = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["o"])], "then", [], [out], [weight])
    other = helper.make_graph([constant, helper.make_node("Sub", ["x", "k"], ["o"])], "other", [], [out])
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64]), helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 64])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    load(folder, proto)
    session = InferenceSession(folder / "model.onnx")
    assert np.array_equal(session.run(None, {"x": X, "c": np.array(True)})[0], Y)
    assert np.array_equal(session.run(None, {"x": X, "c": np.array(False)})[0], X - W)


def test_two_sessions_over_one_store_hold_one_copy(folder: Path) -> None:
    store = WeightStore()
    first, second = (InferenceSession(folder / "model.onnx", weights=store) for _ in range(2))
    arrays = [[value for value in session.plan.initial if isinstance(value, np.ndarray)] for session in (first, second)]
    assert len(arrays[0]) == 1
    assert arrays[0][0] is arrays[1][0]
    assert store.nbytes == W.nbytes
    assert np.array_equal(numpy_helper.to_array(numpy_helper.from_array(arrays[0][0])), W)


def test_a_file_that_was_replaced_is_read_again(folder: Path) -> None:
    store = WeightStore()
    first = InferenceSession(folder / "model.onnx", weights=store)
    replacement = folder / "replacement"
    replacement.write_bytes((3 * W).tobytes())
    os.utime(replacement, (1, 1))
    replacement.replace(folder / "model.onnx_data")
    second = InferenceSession(folder / "model.onnx", weights=store)
    assert np.array_equal(first.run(None, {"x": X})[0], Y)
    assert np.array_equal(second.run(None, {"x": X})[0], 3 * Y)
