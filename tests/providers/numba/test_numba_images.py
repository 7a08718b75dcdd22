"""Kernels of vision models beside onnxruntime and the CPU provider: convolutions, pools, batch normalization, activations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from miniort import InferenceSession, SessionOptions
from miniort.errors import RunError

from .test_numba_conformance import plugins

PLUGINS = plugins()
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    # name: x's shape, w's shape, attributes
    "points": ((1, 64, 60, 70), (96, 64, 1, 1), {}),
    "points with strides": ((2, 48, 41, 37), (64, 48, 1, 1), {"strides": [2, 3]}),
    "points in groups": ((2, 64, 40, 30), (128, 16, 1, 1), {"group": 4}),
    "one point": ((2, 64, 1, 1), (130, 64, 1, 1), {}),
    "one window in groups": ((2, 64, 3, 5), (12, 16, 3, 5), {"group": 4}),
    "patches": ((1, 3, 90, 100), (24, 3, 5, 5), {"strides": [2, 2], "pads": [2, 2, 1, 3]}),
    "patches of several images": ((3, 8, 30, 40), (16, 8, 3, 3), {"pads": [1, 1, 1, 1], "dilations": [2, 1]}),
    "patches in groups": ((1, 32, 50, 60), (60, 8, 3, 3), {"pads": [1, 0, 1, 0], "group": 4}),
    "patches of few places": ((1, 64, 9, 7), (512, 64, 3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "patches without padding": ((1, 40, 31, 33), (24, 40, 3, 2), {}),
    "deep patches": ((1, 130, 20, 21), (70, 130, 3, 3), {"pads": [1, 1, 1, 1]}),
    "patches of a wide stride": ((1, 4, 61, 66), (9, 4, 7, 5), {"strides": [3, 4], "pads": [3, 2, 3, 2]}),
    "rows of elements": ((2, 30, 200), (20, 30, 7), {"pads": [3, 3], "strides": [2]}),
    "single channels": ((1, 48, 61, 66), (48, 1, 5, 5), {"pads": [2, 2, 2, 2], "group": 48}),
    "single channels with strides": ((1, 24, 50, 47), (24, 1, 5, 3), {"pads": [2, 1, 2, 1], "strides": [3, 2], "group": 24}),
    "single channels with both": ((1, 9, 40, 33), (9, 1, 3, 3), {"pads": [1, 2, 3, 4], "strides": [2, 2], "dilations": [3, 2], "group": 9}),
    "single channels of several features": ((2, 10, 31, 20), (30, 1, 3, 4), {"pads": [1, 1, 1, 2], "group": 10}),
    "single channels in one dimension": ((2, 30, 200), (30, 1, 7), {"pads": [3, 3], "strides": [2], "group": 30}),
    "more padding than image": ((1, 5, 1, 2), (5, 1, 3, 3), {"pads": [3, 3, 3, 3], "group": 5}),
}


def model(nodes: Sequence[onnx.NodeProto], inputs: dict[str, np.ndarray], constants: dict[str, np.ndarray] | None = None) -> bytes:
    values = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape) for name, each in inputs.items()]
    weights = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", values, [helper.make_empty_tensor_value_info("y")], weights)
    serialized: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10).SerializeToString()
    return serialized


def run(proto: bytes, inputs: dict[str, np.ndarray], providers: list[str], threads: int = 2) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """The result, the second time that it's computed, and which op ran where."""
    session = InferenceSession(proto, SessionOptions(intra_op_num_threads=threads), providers=providers, plugins=PLUGINS)
    session.run(None, inputs)  # afterwards memory is what the first run left there
    (y,) = session.run(None, inputs)
    return y, [(node.op, node.provider) for node in session.explain().nodes]


def close(actual: np.ndarray, wanted: np.ndarray) -> None:
    assert actual.shape == wanted.shape
    assert actual.dtype == wanted.dtype
    scale = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0))
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=2e-5 * max(1.0, scale))


def onnxruntime_s(proto: bytes, inputs: dict[str, np.ndarray]) -> np.ndarray:
    (y,) = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(None, inputs)
    return y  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 3])
def test_convolution(case: str, threads: int) -> None:
    shape, weight, attributes = CASES[case]
    generator = np.random.default_rng(1)
    inputs = {
        "x": generator.standard_normal(shape).astype(np.float32),
        "w": (generator.standard_normal(weight) / 8).astype(np.float32),
        "b": generator.standard_normal(weight[0]).astype(np.float32),
    }
    proto = model([helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)], inputs)
    actual, placed = run(proto, inputs, ["numba", "cpu"], threads)
    assert placed == [("Conv", "numba")]
    close(actual, onnxruntime_s(proto, inputs))


FOLLOWERS: dict[str, dict[str, float]] = {
    "Relu": {},
    "Sigmoid": {},
    "HardSwish": {},
    "LeakyRelu": {"alpha": 0.2},
    "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
    "Clip": {},
    "Swish": {},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", ["Relu", "Clip"])
def test_convolution_with_a_sum_and_an_activation(case: str, op: str) -> None:
    shape, weight, attributes = CASES[case]
    generator = np.random.default_rng(2)
    x, w = generator.standard_normal(shape).astype(np.float32), (generator.standard_normal(weight) / 8).astype(np.float32)
    convolution = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    result = onnxruntime_s(model([convolution], {"x": x}, {"w": w}), {"x": x})
    inputs = {"x": x, "addend": generator.standard_normal(result.shape).astype(np.float32)}
    bounds = {"low": np.array(-0.5, np.float32), "high": np.array(0.75, np.float32)} if op == "Clip" else {}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], **attributes),
        helper.make_node("Add", ["addend", "c"], ["s"]),
        helper.make_node(op, ["s", *bounds], ["y"], **FOLLOWERS[op]),
    ]
    proto = model(nodes, inputs, {"w": w, **bounds})
    actual, placed = run(proto, inputs, ["numba", "cpu"])
    assert placed == [("miniort.FusedConv", "numba")]
    close(actual, onnxruntime_s(proto, inputs))


@pytest.mark.parametrize("op", FOLLOWERS)
def test_each_activation_behind_a_convolution(op: str) -> None:
    """Also of infinities, and of NaN, which stays NaN."""
    generator = np.random.default_rng(3)
    x, w = 4 * generator.standard_normal((1, 5, 13, 17)).astype(np.float32), generator.standard_normal((6, 5, 1, 1)).astype(np.float32)
    x[0, 0, 3, 3], x[0, 1, 4, 4], x[0, 2, 5, 5] = np.inf, -np.inf, np.nan
    bounds = {"low": np.array(-0.5, np.float32), "high": np.array(0.75, np.float32)} if op == "Clip" else {}
    followers = [helper.make_node(op, ["c", *bounds], ["y"], **FOLLOWERS[op])]
    if op == "Swish":  # from opset 24 on; as exporters write it before
        followers = [helper.make_node("Sigmoid", ["c"], ["s"]), helper.make_node("Mul", ["c", "s"], ["y"])]
    proto = model([helper.make_node("Conv", ["x", "w"], ["c"]), *followers], {"x": x}, {"w": w, **bounds})
    actual, placed = run(proto, {"x": x}, ["numba", "cpu"])
    assert placed == [("miniort.FusedConv", "numba")]
    wanted, _ = run(proto, {"x": x}, ["cpu"])
    close(actual, wanted)


def test_a_sum_of_another_shape() -> None:
    """One of the sum's sides is repeated: the activation comes after that."""
    generator = np.random.default_rng(4)
    x, w = generator.standard_normal((1, 5, 6, 7)).astype(np.float32), generator.standard_normal((4, 5, 3, 3)).astype(np.float32)
    for shape in ((3, 4, 4, 5), (1, 1, 4, 1)):
        inputs = {"x": x, "addend": generator.standard_normal(shape).astype(np.float32)}
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["c"]),
            helper.make_node("Add", ["c", "addend"], ["s"]),
            helper.make_node("HardSwish", ["s"], ["y"]),
        ]
        proto = model(nodes, inputs, {"w": w})
        actual, placed = run(proto, inputs, ["numba", "cpu"])
        assert placed == [("miniort.FusedConv", "numba")]
        close(actual, onnxruntime_s(proto, inputs))


@pytest.mark.parametrize(("shape", "weight"), [((0, 3, 5, 5), (4, 3, 3, 3)), ((1, 3, 2, 5), (4, 3, 3, 3)), ((2, 0, 5, 5), (4, 0, 3, 3))])
def test_convolution_of_nothing(shape: tuple[int, ...], weight: tuple[int, ...]) -> None:
    """No image, no window, no channel."""
    inputs = {"x": np.ones(shape, np.float32), "w": np.ones(weight, np.float32), "b": np.arange(-1, 3, dtype=np.float32)}
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["c"]), helper.make_node("Relu", ["c"], ["y"])]
    proto = model(nodes, inputs)
    actual, placed = run(proto, inputs, ["numba", "cpu"])
    assert placed == [("miniort.FusedConv", "numba")]
    wanted, _ = run(proto, inputs, ["cpu"])
    assert actual.shape == wanted.shape
    np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize(
    ("node", "shapes", "message"),
    [
        (helper.make_node("Conv", ["x", "w"], ["y"]), {"x": (1, 4, 5, 5), "w": (2, 3, 1, 1)}, "don't fit an input"),
        (helper.make_node("Conv", ["x", "w"], ["y"], group=2), {"x": (1, 4, 5, 5), "w": (3, 2, 1, 1)}, "don't fit an input"),
        (
            helper.make_node("Conv", ["x", "w", "b"], ["y"]),
            {"x": (1, 4, 5, 5), "w": (2, 4, 1, 1), "b": (3,)},
            "one number for each feature",
        ),
        (helper.make_node("Conv", ["x", "w"], ["y"]), {"x": (1, 4, 2, 5), "w": (2, 4, 4, 1)}, "doesn't fit"),
        (
            helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"]),
            {"x": (1, 4, 5), "s": (3,), "b": (3,), "m": (3,), "v": (3,)},
            "statistics of 4 channels",
        ),
    ],
)
def test_shapes_that_do_not_fit(node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [f"{name}{axis}" for axis in range(len(shape))])
        for name, shape in shapes.items()
    ]
    graph = helper.make_graph([node], "g", values, [helper.make_empty_tensor_value_info("y")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10).SerializeToString()
    session = InferenceSession(proto, providers=["numba", "cpu"], plugins=PLUGINS)
    assert session.explain().nodes[0].provider == "numba"
    with pytest.raises(RunError, match=message):
        session.run(None, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})


@st.composite
def windows(draw: st.DrawFn, rank: int) -> tuple[list[int], list[int], dict[str, Any]]:
    """Sizes, a kernel, and attributes that fit."""
    kernel = [draw(st.integers(1, 5)) for _ in range(rank)]
    strides = [draw(st.integers(1, 4)) for _ in range(rank)]
    dilations = [draw(st.integers(1, 3)) for _ in range(rank)]
    extents = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    sizes = [extent + draw(st.integers(0, 40)) for extent in extents]
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides}
    padding = draw(st.sampled_from(["none", "pads", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if padding == "pads":
        attributes["pads"] = [draw(st.integers(0, size - 1)) for size in (*kernel, *kernel)]
    elif padding != "none":
        attributes["auto_pad"] = padding
    if padding in ("none", "pads"):  # onnxruntime refuses dilations with the others
        attributes["dilations"] = dilations
    return sizes, kernel, attributes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_convolutions_at_random(data: st.DataObject) -> None:
    rank, batch, groups = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    channels, features = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 11))
    sizes, kernel, attributes = data.draw(windows(rank))
    generator = np.random.default_rng(data.draw(st.integers(0, 9)))
    inputs = {
        "x": generator.standard_normal((batch, groups * channels, *sizes)).astype(np.float32),
        "w": generator.standard_normal((groups * features, channels, *kernel)).astype(np.float32),
    }
    names = ["x", "w"]
    if data.draw(st.booleans()):
        inputs["b"] = generator.standard_normal(groups * features).astype(np.float32)
        names.append("b")
    proto = model([helper.make_node("Conv", names, ["y"], group=groups, **attributes)], inputs)
    actual, placed = run(proto, inputs, ["numba", "cpu"])
    assert placed == [("Conv", "numba")]
    wanted, _ = run(proto, inputs, ["cpu"])
    close(actual, wanted)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pools_at_random(data: st.DataObject) -> None:
    """Also with infinities, and with NaN, which is the largest."""
    rank, op = data.draw(st.integers(1, 2)), data.draw(st.sampled_from(["MaxPool", "AveragePool"]))
    sizes, _, attributes = data.draw(windows(rank))
    attributes["ceil_mode"] = data.draw(st.integers(0, 1))
    if op == "AveragePool":
        attributes["count_include_pad"] = data.draw(st.integers(0, 1))
    generator = np.random.default_rng(data.draw(st.integers(0, 9)))
    x = generator.standard_normal((data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5)), *sizes)).astype(np.float32)
    for value in (np.nan, np.inf, -np.inf):
        x.reshape(-1)[generator.integers(x.size)] = value
    proto = model([helper.make_node(op, ["x"], ["y"], **attributes)], {"x": x})
    actual, placed = run(proto, {"x": x}, ["numba", "cpu"])
    assert placed == [(op, "numba")]
    wanted, _ = run(proto, {"x": x}, ["cpu"])
    close(actual, wanted)


@pytest.mark.parametrize("shape", [(1, 3, 5), (2, 70, 31, 33), (1, 600, 7, 7)])
def test_channels(shape: tuple[int, ...]) -> None:
    """The mean of a channel, and its normalization with statistics that are constants or not."""
    generator = np.random.default_rng(5)
    x = generator.standard_normal(shape).astype(np.float32)
    proto = model([helper.make_node("GlobalAveragePool", ["x"], ["y"])], {"x": x})
    actual, placed = run(proto, {"x": x}, ["numba", "cpu"])
    assert placed == [("GlobalAveragePool", "numba")]
    close(actual, onnxruntime_s(proto, {"x": x}))
    statistics = {name: generator.uniform(0.5, 1.5, shape[1]).astype(np.float32) for name in ("scale", "shift", "mean", "variance")}
    node = helper.make_node("BatchNormalization", ["x", *statistics], ["y"], epsilon=0.01)
    for inputs, constants in (({"x": x}, statistics), ({"x": x, **statistics}, {})):
        proto = model([node], inputs, constants)
        actual, placed = run(proto, inputs, ["numba", "cpu"])
        assert placed == [("BatchNormalization", "numba")]
        close(actual, onnxruntime_s(proto, inputs))


@pytest.mark.parametrize("op", ["Relu", "Sigmoid", "HardSwish", "LeakyRelu", "HardSigmoid"])
@pytest.mark.parametrize("dies", [True, False])
def test_activations(op: str, dies: bool) -> None:
    """Of an input that's kept, and of one that's written over; NaN stays NaN."""
    x = np.concatenate([5 * np.random.default_rng(6).standard_normal(70_001), [np.nan, np.inf, -np.inf, 0, 100, -100]]).astype(np.float32)
    nodes = [helper.make_node(op, ["n" if dies else "x"], ["y"], **FOLLOWERS[op])]
    if dies:
        nodes.insert(0, helper.make_node("Neg", ["x"], ["n"]))
    proto = model(nodes, {"x": x})
    before = x.copy()
    actual, placed = run(proto, {"x": x}, ["numba", "cpu"])
    assert placed[-1] == (op, "numba")
    np.testing.assert_array_equal(x, before)
    wanted, _ = run(proto, {"x": x}, ["cpu"])
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("zeros", ["none", "one", "of each feature"])
def test_convolution_of_integers(kind: type[np.integer], zeros: str) -> None:
    generator = np.random.default_rng(7)
    limits = np.iinfo(kind)
    x = generator.integers(limits.min, limits.max, (2, 9, 14, 11), kind, True)
    w = generator.integers(-128, 127, (7, 9, 3, 3), np.int8, True)
    names, constants, inputs = ["x", "w"], {"w": w}, {"x": x}
    if zeros != "none":
        names += ["x_zero", "w_zero"]
        inputs["x_zero"] = np.array(3, kind)
        constants["w_zero"] = np.array(2, np.int8) if zeros == "one" else generator.integers(-9, 9, 7, np.int8)
    proto = model([helper.make_node("ConvInteger", names, ["y"], pads=[1, 2, 0, 1])], inputs, constants)
    actual, placed = run(proto, inputs, ["numba", "cpu"])
    assert placed == [("ConvInteger", "numba")]
    wanted, _ = run(proto, inputs, ["cpu"])
    np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("size", [1, 5, 40_000])
@pytest.mark.parametrize("scale", [0.0, 3.0, np.inf, np.nan])
def test_quantization_by_range(size: int, scale: float) -> None:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    if np.isfinite(scale):
        x *= np.float32(scale)
    else:
        x[-1] = scale
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"])
    for output in ("q", "scale", "zero"):
        proto = model([node, helper.make_node("Identity", [output], ["y"])], {"x": x})
        actual, placed = run(proto, {"x": x}, ["numba", "cpu"])
        assert placed[0] == ("DynamicQuantizeLinear", "numba")
        wanted, _ = run(proto, {"x": x}, ["cpu"])
        if np.isfinite(scale) or output == "scale":
            np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("size", [(1, 5, 3), (24, 1024, 821), (7, 300, 65), (3, 0, 4)])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("constant", [True, False])
def test_product_of_integers(size: tuple[int, int, int], kind: type[np.integer], zeros: bool, constant: bool) -> None:
    """With the largest numbers, too, whose sums float32 wouldn't hold."""
    rows, inner, columns = size
    generator, limits = np.random.default_rng(9), np.iinfo(kind)
    inputs = {
        "a": generator.integers(0, 255, (rows, inner), np.uint8, True),
        "b": generator.integers(limits.min, limits.max, (inner, columns), kind, True),
    }
    inputs["a"][0], inputs["b"][:, 0] = 255, limits.max
    if zeros:
        inputs |= {"a_zero": np.array(7, np.uint8), "b_zero": np.array(limits.min, kind)}
    fed = {name: each for name, each in inputs.items() if not constant or name != "b"}
    proto = model([helper.make_node("MatMulInteger", list(inputs), ["y"])], fed, {"b": inputs["b"]} if constant else {})
    actual, placed = run(proto, fed, ["numba", "cpu"])
    assert placed == [("MatMulInteger", "numba")]
    wide = {name: each.astype(np.int64) for name, each in inputs.items()}
    np.testing.assert_array_equal(actual, (wide["a"] - wide.get("a_zero", 0)) @ (wide["b"] - wide.get("b_zero", 0)))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 10),
    inner=st.integers(0, 40),
    columns=st.integers(0, 140),
    kinds=st.tuples(*[st.sampled_from([np.int8, np.uint8])] * 2),
    zeros=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_products_of_integers_with_a_constant(
    rows: int, inner: int, columns: int, kinds: tuple[Any, Any], zeros: bool, threads: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    limits = [np.iinfo(kind) for kind in kinds]
    shapes = ((rows, inner), (inner, columns))
    a, b = (generator.integers(each.min, each.max, shape, kind, True) for each, shape, kind in zip(limits, shapes, kinds, strict=True))
    inputs, constants = {"a": a}, {"b": b}
    if zeros:
        inputs["a_zero"] = generator.integers(limits[0].min, limits[0].max, (), kinds[0], True)
        constants["b_zero"] = generator.integers(limits[1].min, limits[1].max, (), kinds[1], True)
    names = ["a", "b", "a_zero", "b_zero"] if zeros else ["a", "b"]
    actual, _ = run(model([helper.make_node("MatMulInteger", names, ["y"])], inputs, constants), inputs, ["numba", "cpu"], threads)
    wide = {name: each.astype(np.int64) for name, each in (inputs | constants).items()}
    np.testing.assert_array_equal(actual, (wide["a"] - wide.get("a_zero", 0)) @ (wide["b"] - wide.get("b_zero", 0)))


def refusal(nodes: Sequence[onnx.NodeProto], inputs: dict[str, np.ndarray], constants: dict[str, np.ndarray] | None = None) -> str:
    """Why the provider doesn't take the first node."""
    session = InferenceSession(model(nodes, inputs, constants), providers=["numba", "cpu"], plugins=PLUGINS)
    node = session.explain().nodes[0]
    assert node.provider == "cpu"
    return str(node)


def test_what_it_does_not_take() -> None:
    cube, image = np.zeros((1, 2, 4, 4, 4), np.float32), np.zeros((1, 2, 4, 4), np.float32)
    assert "rows and images only" in refusal(
        [helper.make_node("Conv", ["x", "w"], ["y"])], {"x": cube, "w": np.zeros((2, 2, 1, 1, 1), np.float32)}
    )
    assert "rows and images only" in refusal([helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2, 2])], {"x": cube})
    indexed = [helper.make_node("MaxPool", ["x"], ["m", "i"], kernel_shape=[2, 2]), helper.make_node("Identity", ["i"], ["y"])]
    assert "where the largest is" in refusal(indexed, {"x": image})
    statistics = {name: np.ones(2, np.float32) for name in ("s", "b", "m", "v")}
    training = [
        helper.make_node("BatchNormalization", ["x", *statistics], ["y", "rm", "rv"], training_mode=1),
    ]
    assert "doesn't train" in refusal(training, {"x": image}, statistics)
    integers = [helper.make_node("ConvInteger", ["x", "w"], ["y"])]
    bytes_of = {"x": np.zeros((1, 2, 4, 4), np.uint8), "w": np.zeros((3, 2, 1, 1), np.int8)}
    assert "constant weights only" in refusal(integers, bytes_of)
    large = np.full((1, 600, 1, 1), 127, np.int8)
    assert "smaller weights" in refusal(integers, {"x": np.zeros((1, 600, 4, 4), np.uint8)}, {"w": large})


@pytest.mark.parametrize("name", ["shufflenet", "inception_v2", "densenet121"])
def test_whole_models(name: str) -> None:
    path = LIGHT / f"light_{name}.onnx"
    graph = onnx.load(path, load_external_data=False).graph
    weights = {each.name for each in graph.initializer}
    (info,) = (each for each in graph.input if each.name not in weights)
    shape = [each.dim_value for each in info.type.tensor_type.shape.dim]
    assert info.type.tensor_type.elem_type == TensorProto.FLOAT
    x = np.random.default_rng(8).standard_normal(shape).astype(np.float32)
    ours, theirs = (
        InferenceSession(path, SessionOptions(intra_op_num_threads=2), providers=each, plugins=PLUGINS)
        for each in (["numba", "cpu"], ["cpu"])
    )
    assert {node.provider for node in ours.explain().nodes if "Conv" in node.op} == {"numba"}
    for actual, wanted in zip(ours.run(None, {info.name: x}), theirs.run(None, {info.name: x}), strict=True):
        close(actual, wanted)
