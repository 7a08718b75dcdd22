"""LSTM, GRU and DynamicQuantizeLSTM beside the CPU provider, and the compiled functions that they stand on beside plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from miniort import InferenceSession, SessionOptions
from miniort.errors import RunError
from miniort_numba.compiled.activations import tanh
from miniort_numba.compiled.integers import round_to_bytes
from miniort_numba.compiled.panel_products import ADD_PRODUCTS, add_products
from miniort_numba.compiled.panels import pack
from miniort_numba.compiled.row_products import WIDTH
from miniort_numba.team import hire

from .test_numba_conformance import plugins

PLUGINS = plugins()
GATES = {"LSTM": 4, "GRU": 3, "DynamicQuantizeLSTM": 4}
DIRECTIONS = ("forward", "reverse", "bidirectional")
WEIGHTS = ("w", "r", "b", "w_scale", "w_zero_point", "r_scale", "r_zero_point")

Inputs = dict[str, np.ndarray | None]


def inputs_of(
    op: str, direction: str, sizes: tuple[int, int, int, int], lengths: bool = True, states: bool = True, seed: int = 0
) -> Inputs:
    """All that an op takes, by name and in its order. sizes: T, B, I, H."""
    generator = np.random.default_rng(seed)
    time, batch, width, hidden = sizes
    ways, columns = 2 if direction == "bidirectional" else 1, GATES[op] * hidden

    def normal(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape) / 4).astype(np.float32)

    inputs: Inputs = {"x": normal(time, batch, width), "w": normal(ways, columns, width), "r": normal(ways, columns, hidden)}
    inputs["b"] = normal(ways, 2 * columns)
    inputs["lengths"] = generator.integers(0, time + 1, batch).astype(np.int32) if lengths else None
    inputs["h"] = normal(ways, batch, hidden) if states else None
    if op != "GRU":
        inputs["c"] = normal(ways, batch, hidden) if states else None
    return inputs


def in_eight_bits(inputs: Inputs, dtype: Any, by_column: bool, seed: int = 0) -> Inputs:
    """The inputs of an LSTM as DynamicQuantizeLSTM has them."""
    generator = np.random.default_rng(seed)
    info, quantized = np.iinfo(dtype), {"peepholes": None} | inputs
    for name in ("w", "r"):
        weights = inputs[name]
        assert weights is not None
        ways, columns, inner = weights.shape
        shape = (ways, columns) if by_column else (ways,)
        quantized[name] = generator.integers(info.min, info.max, (ways, inner, columns), endpoint=True).astype(dtype)
        quantized[f"{name}_scale"] = generator.uniform(0.001, 0.002, shape).astype(np.float32)
        quantized[f"{name}_zero_point"] = generator.integers(100, 150, shape).astype(dtype) if info.min == 0 else np.zeros(shape, dtype)
    order = ("x", "w", "r", "b", "lengths", "h", "c", "peepholes", *WEIGHTS[3:])
    return {name: quantized[name] for name in order}


def model(op: str, inputs: Inputs, constants: tuple[str, ...] = (), **attributes: Any) -> onnx.ModelProto:
    quantized = op == "DynamicQuantizeLSTM"
    outputs = ["y", "h_last"] if op == "GRU" else ["y", "h_last", "c_last"]
    names = [name if array is not None else "" for name, array in inputs.items()]
    node = helper.make_node(op, names, outputs, domain="com.microsoft" if quantized else "", **attributes)
    there = {name: array for name, array in inputs.items() if array is not None}
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in there.items()
            if name not in constants
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in there.items() if name in constants],
    )
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def session(proto: onnx.ModelProto, providers: list[str], threads: int) -> InferenceSession:
    return InferenceSession(proto, SessionOptions(intra_op_num_threads=threads), providers=providers, plugins=PLUGINS)


def agree(
    op: str, inputs: Inputs, constants: tuple[str, ...] = (), threads: int = 2, tolerance: float = 1e-5, rounds: int = 2, **attributes: Any
) -> None:
    """Both providers give the same, also where memory is what the first run left there."""
    proto = model(op, inputs, constants, **attributes)
    ours, theirs = session(proto, ["numba", "cpu"], threads), session(proto, ["cpu"], threads)
    assert [node.provider for node in ours.explain().nodes] == ["numba"]
    feed = {name: array for name, array in inputs.items() if array is not None and name not in constants}
    wanted = theirs.run(None, feed)
    for _ in range(rounds):
        for actual, expected in zip(ours.run(None, feed), wanted, strict=True):
            assert actual.dtype == expected.dtype
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=tolerance)


SIZES = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 70), st.integers(1, 70))


@settings(max_examples=80, deadline=None)
@given(
    op=st.sampled_from(["LSTM", "GRU"]),
    direction=st.sampled_from(DIRECTIONS),
    sizes=SIZES,
    left_out=st.sets(st.sampled_from(["b", "lengths", "h", "c"])),
    constants=st.sampled_from([(), WEIGHTS]),
    threads=st.integers(1, 3),
    linear=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_layer(
    op: str,
    direction: str,
    sizes: tuple[int, int, int, int],
    left_out: set[str],
    constants: tuple[str, ...],
    threads: int,
    linear: bool,
    seed: int,
) -> None:
    inputs = {name: None if name in left_out else array for name, array in inputs_of(op, direction, sizes, seed=seed).items()}
    attributes = {"linear_before_reset": int(linear)} if op == "GRU" else {}
    agree(op, inputs, constants, threads, hidden_size=sizes[3], direction=direction, **attributes)


@settings(max_examples=40, deadline=None)
@given(
    direction=st.sampled_from(DIRECTIONS),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 70), st.integers(1, 40)),
    lengths=st.booleans(),
    states=st.booleans(),
    dtype=st.sampled_from([np.int8, np.uint8]),
    by_column=st.booleans(),
    constants=st.sampled_from([(), WEIGHTS]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_any_layer_of_eight_bits(
    direction: str,
    sizes: tuple[int, int, int, int],
    lengths: bool,
    states: bool,
    dtype: Any,
    by_column: bool,
    constants: tuple[str, ...],
    threads: int,
    seed: int,
) -> None:
    """A hidden state that lies half way between two of its 256 numbers may be rounded to either, which shows in the steps behind it."""
    inputs = in_eight_bits(inputs_of("LSTM", direction, sizes, lengths, states, seed), dtype, by_column, seed)
    agree("DynamicQuantizeLSTM", inputs, constants, threads, tolerance=5e-3, hidden_size=sizes[3], direction=direction)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_layers_share_their_steps(op: str, direction: str, threads: int) -> None:
    inputs = inputs_of(op, direction, (6, 2, 40, 224))
    if op == "DynamicQuantizeLSTM":
        inputs = in_eight_bits(inputs, np.uint8, by_column=True)
    agree(op, inputs, WEIGHTS, threads, tolerance=1e-2 if op == "DynamicQuantizeLSTM" else 1e-5, hidden_size=224, direction=direction)


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_numbers_that_are_too_large_and_none(op: str) -> None:
    """Gates saturate, and what is NaN in one row is nobody else's."""
    inputs = inputs_of(op, "bidirectional", (4, 3, 5, 6), lengths=False)
    x = inputs["x"]
    assert x is not None
    x *= 1e30
    agree(op, inputs, WEIGHTS, hidden_size=6, direction="bidirectional")
    x[1, 1, 2] = np.nan
    agree(op, inputs, WEIGHTS, hidden_size=6, direction="bidirectional")


@pytest.mark.parametrize(
    ("op", "attributes", "reason"),
    [
        ("LSTM", {"clip": 1.0}, "no clip"),
        ("LSTM", {"input_forget": 1}, "no clip and no input_forget"),
        ("LSTM", {"layout": 1}, "time before batch"),
        ("GRU", {"activations": ["Sigmoid", "Relu"]}, "activations Sigmoid, Tanh only"),
    ],
)
def test_refused(op: str, attributes: dict[str, Any], reason: str) -> None:
    proto = model(op, inputs_of(op, "forward", (2, 2, 3, 4), lengths=False, states=False), hidden_size=4, **attributes)
    (node,) = session(proto, ["numba", "cpu"], 1).explain().nodes
    assert node.provider == "cpu"
    assert reason in str(node.refusals)


def test_peepholes_are_refused() -> None:
    peepholes = {"p": np.zeros((1, 12), np.float32)}
    (node,) = (
        session(model("LSTM", inputs_of("LSTM", "forward", (2, 2, 3, 4)) | peepholes, hidden_size=4), ["numba", "cpu"], 1).explain().nodes
    )
    assert node.provider == "cpu"
    assert "no peepholes" in str(node.refusals)


def test_default_activations_may_be_named() -> None:
    inputs = inputs_of("GRU", "bidirectional", (3, 2, 3, 4))
    agree("GRU", inputs, hidden_size=4, direction="bidirectional", activations=["sigmoid", "tanh", "Sigmoid", "Tanh"])


@pytest.mark.parametrize(("name", "shape"), [("b", (1, 9)), ("r", (1, 16, 5)), ("h", (1, 3, 4)), ("lengths", (5,))])
def test_shapes_that_do_not_fit(name: str, shape: tuple[int, ...]) -> None:
    inputs = inputs_of("LSTM", "forward", (2, 2, 3, 4))
    inputs[name] = np.zeros(shape, np.int32 if name == "lengths" else np.float32)
    node = helper.make_node("LSTM", list(inputs), ["y"], hidden_size=4)
    there = {each: array for each, array in inputs.items() if array is not None}
    values = [
        helper.make_tensor_value_info(each, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
        for each, array in there.items()
    ]
    graph = helper.make_graph([node], "g", values, [helper.make_empty_tensor_value_info("y")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    with pytest.raises(RunError, match="has to be of shape"):
        session(proto, ["numba", "cpu"], 1).run(None, there)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 30])
@pytest.mark.parametrize("inner", [0, 1, 2, 77, 128])
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_products_with_panels(rows: int, inner: int, eight_bits: bool, threads: int) -> None:
    """Two matrices of three panels each, from the second panel of the first on."""
    crew, generator = hire(threads), np.random.default_rng(inner)
    columns, factor = 3 * WIDTH, np.float32(0.5)
    a = generator.integers(-255, 256, (rows, inner)).astype(np.float32)
    start = generator.standard_normal((2, rows, columns)).astype(np.float32)
    y, scale, zero = start.copy(), generator.uniform(0.5, 1, (2, columns)).astype(np.float32), np.full((2, columns), 3, np.float32)
    if eight_bits:
        matrices = generator.integers(-128, 128, (2, inner, columns)).astype(np.int8)
        wanted = 0.5 * a.astype(float) @ ((matrices - zero[:, None].astype(float)) * scale[:, None])
    else:
        matrices = generator.standard_normal((2, inner, columns)).astype(np.float32)
        wanted = a.astype(float) @ matrices
    wanted[0, :, :WIDTH] = 0
    panels = np.stack([pack(each) for each in matrices])
    words = np.array([panels.ctypes.data, 3, inner, *((scale.ctypes.data, zero.ctypes.data) if eight_bits else (0, 0))], np.int64)
    add_products(crew.board, crew.helpers, ADD_PRODUCTS, y.ctypes.data, a, factor, words, 1, 5)
    np.testing.assert_allclose(y, start + wanted, rtol=1e-5, atol=2e-3)


def test_hyperbolic_tangent() -> None:
    x = np.concatenate([np.linspace(-12, 12, 40_001), np.geomspace(1e-30, 100, 2_001), [np.nan, np.inf, -np.inf, 0.0, 1e30]]).astype(
        np.float32
    )
    wanted = np.tanh(x.astype(np.float64))
    tanh(x)
    np.testing.assert_allclose(x, wanted, rtol=3e-7)


@pytest.mark.parametrize("numbers", [[], [0, 0], [3, 1, 2], [-3, -1, -2], [-1, 0.5, 2, 0.25], [1, np.nan], [1, np.inf], [1e-40, -1e-42]])
def test_rounding_to_bytes(numbers: list[float]) -> None:
    x = np.array(numbers, np.float32)
    y = np.full_like(x, 7)
    scale = round_to_bytes(y, x)
    with np.errstate(all="ignore"):
        low, high = min([0, *numbers]), max([0, *numbers])
        wanted_scale = (
            np.float32(np.nan) if np.isnan(x).any() else np.float32(1) if low == high else np.float32(high - low) / np.float32(255)
        )
        zero = np.fmax(np.rint(np.float32(-low) / wanted_scale), np.float32(0))
        wanted = np.minimum(np.fmax(np.rint(x / wanted_scale) + zero, 0), 255) - zero
    np.testing.assert_array_equal(scale, wanted_scale)
    np.testing.assert_array_equal(y, wanted)
