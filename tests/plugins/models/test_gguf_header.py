"""The header of GGUF files, as the gguf package writes them, and what is said of those that are damaged."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from miniort.errors import ModelError
from miniort_models.weights.gguf_header import read_header


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file with metadata of every type and two tensors."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 200)
    writer.add_int8("a.int8", -100)
    writer.add_uint16("a.uint16", 60000)
    writer.add_int16("a.int16", -30000)
    writer.add_uint32("a.uint32", 2**32 - 1)
    writer.add_int32("a.int32", -(2**31))
    writer.add_uint64("a.uint64", 2**63 + 1)
    writer.add_int64("a.int64", -(2**62))
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 1e-300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "naïve 😀")
    writer.add_array("a.strings", ["", "Ġthe", "日本"])
    writer.add_array("a.integers", [3, -1, 4])
    writer.add_array("a.numbers", [0.25, -2.0])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_type_of_metadata(written: Path) -> None:
    header = read_header(written)
    assert {key: value for key, value in header.metadata.items() if key.startswith("a.")} == {
        "a.uint8": 200,
        "a.int8": -100,
        "a.uint16": 60000,
        "a.int16": -30000,
        "a.uint32": 2**32 - 1,
        "a.int32": -(2**31),
        "a.uint64": 2**63 + 1,
        "a.int64": -(2**62),
        "a.float32": 0.5,
        "a.float64": 1e-300,
        "a.bool": True,
        "a.string": "naïve 😀",
        "a.strings": ["", "Ġthe", "日本"],
        "a.integers": [3, -1, 4],
        "a.numbers": [0.25, -2.0],
    }
    assert header.architecture == "llama"
    assert (header.string("a.string"), header.string("a.uint8")) == ("naïve 😀", None)
    assert [header.integer(key) for key in ("a.int8", "a.bool", "a.float32")] == [-100, None, None]
    assert [header.number(key) for key in ("a.int8", "a.bool", "a.float32")] == [-100.0, None, 0.5]


def test_where_tensors_are(written: Path) -> None:
    header = read_header(written)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(written).tensors}
    for name, tensor in header.tensors.items():
        assert tensor.offset == reference[name].data_offset
        assert tensor.type == reference[name].tensor_type
    assert header.tensors["first"].shape == (2, 3)
    assert header.tensors["second"].size == 4


def test_a_file_that_was_cut_anywhere_in_its_header(written: Path, tmp_path: Path) -> None:
    content = written.read_bytes()
    end = read_header(written).tensors["first"].offset
    cut = tmp_path / "cut.gguf"
    for length in (5, 12, 24, 40, 100, 333, end - 64):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf ends within its header"):
            read_header(cut)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: b"", "is empty"),
        (lambda content: b"GGML" + content[4:], "is no GGUF file: it begins with b'GGML'"),
        (lambda content: content[:4] + b"\x01\0\0\0" + content[8:], "of version 1; wanted little-endian, version 2 or 3"),
        (lambda content: content[:4] + b"\0\0\0\x03" + content[8:], "big-endian"),
        (lambda content: content[:8] + b"\xff" * 8 + content[16:], "ends within its header"),
        (lambda content: content.replace(b"a.uint8\0\0\0\0", b"a.uint8\x63\0\0\0"), "unknown type 99"),
    ],
)
def test_what_is_wrong_with_a_file(written: Path, change: object, said: str) -> None:
    written.write_bytes(change(written.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ModelError, match=said) as caught:
        read_header(written)
    assert str(written) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't be read: No such file"):
        read_header(tmp_path / "none.gguf")


def test_a_part_of_a_split_file(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="one of 3 parts"):
        read_header(path)
