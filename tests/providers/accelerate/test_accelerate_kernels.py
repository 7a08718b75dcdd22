"""Each kernel on the stand-in against NumPy: odd sizes, empty ones, transposes, strides, stacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miniort.errors import InputError
from miniort.kernels import NodeView
from miniort.types import ValueInfo
from miniort_accelerate.kernels import KERNELS
from miniort_accelerate.kernels.matrix import layout_of

RunNode = Callable[..., np.ndarray]


def f(*shape: int, dtype: str = "f4", seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def close(found: np.ndarray, wanted: Any) -> None:
    assert found.dtype == wanted.dtype
    tolerance = 1e-5 if found.dtype == np.float32 else 1e-12
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
    assert found.shape == wanted.shape


SHAPES = [
    ((3, 5), (5, 4)),
    ((1, 1), (1, 1)),
    ((1, 7), (7, 1)),
    ((7, 1), (1, 7)),
    ((2, 3, 5), (5, 4)),
    ((2, 3, 5), (2, 5, 4)),
    ((2, 1, 3, 5), (6, 5, 4)),
    ((3, 5), (2, 3, 5, 4)),
    ((5,), (5, 4)),
    ((5,), (2, 5, 4)),
    ((3, 5), (5,)),
    ((2, 3, 5), (5,)),
    ((5,), (5,)),
    ((0, 5), (5, 4)),
    ((3, 0), (0, 4)),
    ((2, 3, 0), (0, 4)),
    ((0, 3, 5), (0, 5, 4)),
    ((33, 65), (65, 17)),
]


@pytest.mark.parametrize(("a", "b"), SHAPES)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_matmul(run_node: RunNode, a: tuple[int, ...], b: tuple[int, ...], dtype: str) -> None:
    x, y = f(*a, dtype=dtype, seed=1), f(*b, dtype=dtype, seed=2)
    close(np.asarray(run_node("MatMul", x, y)), np.asarray(np.matmul(x, y)))


def misaligned(array: np.ndarray) -> np.ndarray:
    """The same values one byte off."""
    return np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda x: x,
    "columns contiguous": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "part of longer rows": lambda x: np.concatenate([x, np.full_like(x, np.nan)], -1)[..., : x.shape[-1]],
    "every second row": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
    "every second column": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "backwards": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "axes in another order": lambda x: x.transpose(1, 0, 2).copy().transpose(1, 0, 2),
    "one byte off": misaligned,
}


@pytest.mark.parametrize("of_a", LAYOUTS)
@pytest.mark.parametrize("of_b", LAYOUTS)
@pytest.mark.parametrize("sizes", [(3, 5, 4), (1, 5, 1), (3, 1, 4)])
def test_matmul_of_any_layout(run_node: RunNode, of_a: str, of_b: str, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    a, b = f(2, m, k, seed=1), f(2, k, n, seed=2)
    x, y = LAYOUTS[of_a](a), LAYOUTS[of_b](b)
    np.testing.assert_array_equal(x, a)
    np.testing.assert_array_equal(y, b)
    close(run_node("MatMul", x, y), np.matmul(a, b))


def test_operands_that_blas_can_read_are_not_copied() -> None:
    matrix = np.zeros((6, 8), np.float32)
    for readable in (matrix, matrix.T, matrix[:, 2:5], matrix.T[:, 1:3], matrix[::2], matrix[:1], matrix[:1, ::2]):
        layout = layout_of(readable)
        assert layout is not None
        assert layout.leading >= (readable.shape[1] if layout.transpose == 111 else readable.shape[0])
    for unreadable in (matrix[:, ::2], matrix[::-1], np.broadcast_to(matrix[0], (6, 8)), misaligned(matrix)):
        assert layout_of(unreadable) is None


def test_a_broadcast_row_is_read_right(run_node: RunNode) -> None:
    row = f(5)
    close(run_node("MatMul", np.broadcast_to(row, (3, 5)), f(5, 4)), np.broadcast_to(row, (3, 5)) @ f(5, 4))
    stack = np.broadcast_to(f(3, 5), (2, 3, 5))
    close(run_node("MatMul", stack, f(2, 5, 4)), stack @ f(2, 5, 4))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("c", [None, (), (1,), (4,), (3, 1), (3, 4)])
@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm(run_node: RunNode, dtype: str, c: tuple[int, ...] | None, transposed: int) -> None:
    a, b = f(3, 5, dtype=dtype), f(5, 4, dtype=dtype)
    bias = None if c is None else f(*c, dtype=dtype).reshape(c)
    given = (a.T.copy(), b.T.copy()) if transposed else (a, b)
    found = run_node("Gemm", *given, bias, transA=transposed, transB=transposed, alpha=0.5, beta=2.0)
    wanted = 0.5 * (a @ b) + (0 if bias is None else 2 * bias)
    close(found, wanted.astype(dtype))


def test_gemm_without_an_inner_axis_is_beta_c(run_node: RunNode) -> None:
    close(run_node("Gemm", f(3, 0), f(0, 4), f(4), beta=2.0), np.broadcast_to(2 * f(4), (3, 4)))
    close(run_node("Gemm", f(3, 0), f(0, 4)), np.zeros((3, 4), np.float32))


UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Exp": np.exp,
    "Log": np.log,
    "Sqrt": np.sqrt,
    "Tanh": np.tanh,
    "Reciprocal": np.reciprocal,
    "Sigmoid": lambda x: (1 / (1 + np.exp(-x.astype(np.float64)))).astype(x.dtype),
    "Swish": lambda x: (x / (1 + np.exp(-x.astype(np.float64)))).astype(x.dtype),
}


@pytest.mark.parametrize("op", UNARY)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 0), (2, 3, 5)])
def test_unary(run_node: RunNode, op: str, shape: tuple[int, ...]) -> None:
    x = np.abs(f(*shape)).reshape(shape) + np.float32(0.1)
    close(run_node(op, x), np.asarray(UNARY[op](x)))


@pytest.mark.parametrize("op", [*UNARY, "Gelu"])
def test_unary_of_strided_operands(run_node: RunNode, op: str) -> None:
    attributes = {"approximate": "tanh"} if op == "Gelu" else {}
    x = np.abs(f(6, 8)) + np.float32(0.1)
    wanted = run_node(op, x, **attributes)
    for view in (np.s_[::2], np.s_[:, ::-1], np.s_[1:4, 2:5]):
        close(run_node(op, x[view], **attributes), wanted[view])
    close(run_node(op, x.T, **attributes), wanted.T)
    close(run_node(op, misaligned(x), **attributes), wanted)


@pytest.mark.parametrize("op", ["Exp", "Log", "Sqrt", "Tanh", "Reciprocal"])
def test_unary_in_float64(run_node: RunNode, op: str) -> None:
    x = np.abs(f(5, 3, dtype="f8")) + 0.1
    close(run_node(op, x), UNARY[op](x))


def test_sigmoid_and_swish_of_large_values(run_node: RunNode) -> None:
    x = np.array([-1000, -90, 0, 90, 1000], np.float32)
    close(run_node("Sigmoid", x), np.array([0, np.exp(np.float64(-90)), 0.5, 1, 1], np.float32))
    close(run_node("Swish", x), np.array([0, 0, 0, 90, 1000], np.float32))


def test_swish_with_alpha(run_node: RunNode) -> None:
    x = f(9)
    close(run_node("Swish", x, alpha=1.702), x / (1 + np.exp(np.float32(-1.702) * x)))


def test_gelu(run_node: RunNode) -> None:
    x = 3 * f(4, 5)
    wanted = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    close(run_node("Gelu", x, approximate="tanh"), wanted)


@pytest.mark.parametrize(("op", "formula"), [("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide)])
@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (2, 3, 5)])
def test_binary(run_node: RunNode, op: str, formula: np.ufunc, shape: tuple[int, ...]) -> None:
    x, y = f(*shape, seed=1).reshape(shape), 2 + np.abs(f(*shape, seed=2)).reshape(shape)
    y = np.asarray(y, np.float32)
    close(run_node(op, x, y), np.asarray(formula(x, y)))


@pytest.mark.parametrize(("op", "formula"), [("Sub", np.subtract), ("Div", np.divide)])
def test_binary_of_strided_operands(run_node: RunNode, op: str, formula: np.ufunc) -> None:
    x, y = f(4, 6, seed=1).T, 2 + np.abs(f(6, 8, seed=2))[:, ::2]
    close(run_node(op, x, y), formula(x, y))


def view(op: str, *shapes: tuple[int | str | None, ...] | None, **attributes: Any) -> NodeView:
    infos = tuple(ValueInfo("x", np.dtype(np.float32), shape) for shape in shapes)
    return NodeView(op=op, domain="", version=20, name="", inputs=infos, outputs=(), attributes=attributes)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (((2, 3), (2, 3)), None),
        ((("batch", 3), ("batch", 3)), None),
        (((2, 3), (3,)), "[2, 3] and [3]"),
        (((None, 3), (None, 3)), "[?, 3] and [?, 3]"),
        ((None, None), "[...] and [...]"),
        ((("batch", 3), (1, 3)), "[batch, 3] and [1, 3]"),
    ],
)
def test_operands_that_may_broadcast_are_refused_when_nodes_are_assigned(shapes: Any, reason: str | None) -> None:
    (kernel,) = KERNELS.find("", "Add")
    assert kernel.refuse is not None
    found = kernel.refuse(view("Add", *shapes))
    assert found == (None if reason is None else f"its kernel takes operands of one known shape, the node has {reason}")


def test_gelu_by_the_error_function_is_refused_when_nodes_are_assigned() -> None:
    (kernel,) = KERNELS.find("", "Gelu")
    assert kernel.refuse is not None
    assert kernel.refuse(view("Gelu", (2,))) == "its kernel takes approximate='tanh', the node has 'none'"
    assert kernel.refuse(view("Gelu", (2,), approximate="tanh")) is None


def test_types_that_show_up_only_at_run_time_are_refused(run_node: RunNode) -> None:
    with pytest.raises(InputError, match=r"'the_MatMul' \(MatMul\) takes tensor\(double\) or tensor\(float\), found tensor\(float16\)"):
        run_node("MatMul", f(2, 2, dtype="f2"), f(2, 2, dtype="f2"))
    with pytest.raises(InputError, match=r"found tensor\(float\), tensor\(double\)"):
        run_node("Gemm", f(2, 2), f(2, 2, dtype="f8"))
    with pytest.raises(InputError, match=r"takes tensor\(float\), found tensor\(double\)"):
        run_node("Sigmoid", f(2, dtype="f8"))


def test_inner_sizes_that_differ(run_node: RunNode) -> None:
    with pytest.raises(InputError, match=r"\[2, 3\] has 3 columns, but \[4, 2\] has 4 rows"):
        run_node("MatMul", f(2, 3), f(4, 2))
    with pytest.raises(InputError, match=r"inner sizes of \[2, 3\] and \[4, 2\] differ"):
        run_node("Gemm", f(2, 3), f(4, 2))


def test_no_kernel_writes_into_an_input(run_node: RunNode) -> None:
    inputs = {"MatMul": 2, "Gemm": 3, "Add": 2, "Sub": 2, "Mul": 2, "Div": 2}
    single = {"MatMul", "Gemm", "Add", "Sub", "Mul", "Div", "Exp", "Log", "Sqrt", "Tanh", "Reciprocal", "Sigmoid", "Swish", "Gelu", "Erf"}
    for kernel in KERNELS:
        if kernel.op not in single:
            continue  # test_accelerate_conformance.py freezes the inputs of all
        arrays = [np.abs(f(4, 4, seed=index)) for index in range(inputs.get(kernel.op, 1))]
        for array in arrays:
            array.flags.writeable = False
        copies = [array.copy() for array in arrays]
        run_node(kernel.op, *arrays, **({"approximate": "tanh"} if kernel.op == "Gelu" else {}))
        for array, copy in zip(arrays, copies, strict=True):
            np.testing.assert_array_equal(array, copy)
