"""`miniort compare`: differences, times, and the first node that is wrong, found by name in a graph of 600."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result
from onnx import TensorProto, helper

NODES = 600
WRONG = "node_437"

PROVIDER_WITH_A_WRONG_KERNEL = f"""
import numpy as np
from miniort import hookimpl
from miniort.kernels import KernelTable
from miniort.pool import BufferPool
from miniort.providers import HOST, Availability, MemoryStats, ProviderInfo

kernels = KernelTable("sloppy")

@kernels.register("Tanh", (6, None))
def tanh(node):
    error = np.float32(1.001 if node.name == "{WRONG}" else 1)
    return lambda x: np.tanh(x) * error

class Sloppy:
    device = HOST
    def __init__(self):
        self.kernels = kernels
    def allocate(self, shape, dtype): return np.empty(shape, dtype)
    def upload(self, array): return array
    def download(self, array): return array
    def synchronize(self): pass
    def memory(self): return MemoryStats(0, 0, 0)
    def close(self): pass

@hookimpl
def miniort_providers():
    return [ProviderInfo("sloppy", 50, lambda: Availability(True, "always"), lambda options: Sloppy())]
"""


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    """600 nodes in a row: Tanh, Mul by 2 and Add of the input, over and over."""
    nodes, value = [], "x"
    for number in range(NODES):
        op = ("Tanh", "Mul", "Add")[number % 3] if number != int(WRONG[5:]) else "Tanh"
        inputs = {"Tanh": [value], "Mul": [value, "two"], "Add": [value, "x"]}[op]
        nodes.append(helper.make_node(op, inputs, [f"v{number}"], name=f"node_{number}"))
        value = f"v{number}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4])
    y = helper.make_tensor_value_info(value, TensorProto.FLOAT, ["rows", 4])
    two = helper.make_tensor("two", TensorProto.FLOAT, [], [2.0])
    model = helper.make_model(helper.make_graph(nodes, "long", [x], [y], [two]), opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path = tmp_path / "long.onnx"
    onnx.save(model, path)
    return path


Miniort = Callable[..., Result]


def compare(miniort: Miniort, *arguments: object) -> Result:
    return miniort("compare", *map(str, arguments), "--warm-up", "0", "--repeats", "1")


@pytest.mark.parametrize("baseline", ["cpu", "reference", "onnxruntime"])
def test_a_wrong_kernel_is_found_by_name(
    miniort: Miniort, install_plugin: Callable[[str, str], Path], long_model: Path, tmp_path: Path, baseline: str
) -> None:
    install_plugin("sloppy", PROVIDER_WITH_A_WRONG_KERNEL)
    folder = tmp_path / "found" / "here"
    result = compare(
        miniort, long_model, "--providers", f"sloppy,{baseline}", "--size", "rows=3", "--relative", "1e-5", "--locate", "--save", folder
    )
    assert result.exit_code == 1, result.stderr
    assert f"the first node that differs from {baseline}" in result.stdout
    assert f"is '{WRONG}' (Tanh, on sloppy)" in result.stdout
    described = json.loads((folder / "node.json").read_text())
    assert (described["node"], described["op"], described["output"]) == (WRONG, "Tanh", "v437")
    assert described["files"] == {"input_0.npy": "v436", "found.npy": "v437", "wanted.npy": "v437"}
    x, found, wanted = (np.load(folder / f"{name}.npy") for name in ("input_0", "found", "wanted"))
    np.testing.assert_allclose(wanted, np.tanh(x), rtol=1e-5)
    np.testing.assert_allclose(found, 1.001 * np.tanh(x), rtol=1e-5)
    assert x.shape == (3, 4)


def test_a_right_provider_passes_and_every_node_is_compared(
    miniort: Miniort, install_plugin: Callable[[str, str], Path], long_model: Path
) -> None:
    install_plugin("sloppy", PROVIDER_WITH_A_WRONG_KERNEL.replace("1.001", "1.0"))
    result = compare(miniort, long_model, "--providers", "sloppy,cpu", "--levels", "none,all", "--locate", "--json")
    assert result.exit_code == 0, result.stderr
    (found,) = json.loads(result.stdout)
    assert found["passed"]
    assert found["baseline"] == "cpu (none)"
    by_label = {each["run_by"]: each for each in found["contenders"]}
    assert list(by_label) == ["sloppy (none)", "sloppy (all)", "cpu (none)", "cpu (all)"]
    assert by_label["sloppy (none)"]["compared_values"] == NODES
    assert by_label["sloppy (none)"]["nodes"] == "cpu 399, sloppy 201"
    assert by_label["cpu (none)"]["differences"] == {}
    assert all(each["seconds"] > 0 for each in found["contenders"])


def test_an_input_from_a_file(miniort: Miniort, long_model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.full((2, 4), 0.5, np.float32))
    result = compare(miniort, long_model, "--providers", "cpu,reference", "--input", f"x={tmp_path / 'x.npy'}")
    assert result.exit_code == 0, result.stderr
    assert "long.onnx: x [2, 4]" in result.stdout
    assert "cpu 600" in result.stdout


def test_a_decoder_is_fed_tokens_mask_positions_and_a_cache(miniort: Miniort) -> None:
    result = compare(miniort, "demo", "--providers", "cpu", "--levels", "none,all", "--size", "past=3", "--size", "tokens=2", "--locate")
    assert result.exit_code == 0, result.stderr
    assert "prefill.onnx: input_ids [1, 2], attention_mask [1, 2], position_ids [1, 2]" in result.stdout
    assert "decode.onnx: input_ids [1, 2], attention_mask [1, 5], position_ids [1, 2], past_key_values.0.key [1, 6, 3, 32]" in result.stdout
    assert result.stdout.count("cpu (all): no node differs from cpu (none)") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--providers", "cpu"], "there is nothing to compare with"),
        (["--providers", "cpu,cpu"], "must be different names"),
        (["--providers", "nvidia,cpu"], "no provider is named 'nvidia'"),
        (["--providers", "cuda,cpu"], "provider 'cuda' can't be used here"),
        (["--levels", "none,most"], "'most' is no level"),
        (["--size", "rows"], "not of the form NAME=SIZE"),
        (["--size", "columns=2"], "no input has a size named 'columns'; the sizes with names: rows"),
        (["--input", "x"], "not of the form NAME=FILE"),
        (["--input", "x=missing.npy"], "missing.npy can't be read as .npy"),
        (["--save", "somewhere"], "--save needs --locate"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_status_2(miniort: Miniort, long_model: Path, arguments: list[str], message: str) -> None:
    result = compare(miniort, long_model, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_unknown_input_and_a_model_that_is_not_there(miniort: Miniort, long_model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 4), np.float32))
    result = compare(miniort, long_model, "--input", f"z={tmp_path / 'x.npy'}")
    assert (result.exit_code, "the model has no input 'z'; its inputs: x" in result.stderr) == (2, True)
    result = compare(miniort, tmp_path / "nowhere.onnx")
    assert (result.exit_code, "no such file or folder" in result.stderr) == (2, True)
