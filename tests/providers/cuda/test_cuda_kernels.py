"""Each kernel against ONNX's reference evaluator or onnxruntime, on NumPy and on the test double of CuPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented

from miniort.errors import InputError, KernelError
from miniort.kernels import NEWEST_TESTED, NodeView
from miniort.testing.operators import operator_versions
from miniort_cuda.coverage import table
from miniort_cuda.element_types import ALL
from miniort_cuda.kernels import KERNELS

RunNode = Callable[..., list[np.ndarray]]
TOLERANCE = {np.dtype(np.float16): 2e-3, np.dtype(np.float32): 2e-6, np.dtype(np.float64): 1e-12}
ORT_OPSETS = range(11, 22)  # onnxruntime implements all of these; what is newer is left to the reference evaluator


@dataclass(frozen=True)
class Case:
    op: str
    opset: int
    inputs: Sequence[np.ndarray | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    note: str = ""

    def __str__(self) -> str:
        dtype = next(array.dtype for array in self.inputs if array is not None)
        return "-".join(filter(None, (self.op, str(self.opset), str(dtype), self.note)))


def f(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def whole(*shape: int, dtype: Any = np.int64, low: int = -9, high: int = 10, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(low, high, shape).astype(dtype)


def i(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def flags(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).random(shape) < 0.5


def elementwise_cases() -> list[Case]:
    cases: list[Case] = []
    for opset in (11, 13, 14, 23):
        for op in ("Add", "Sub", "Mul", "Div"):
            cases += [Case(op, opset, [f(2, 3, 4, dtype=dtype), 2 + abs(f(3, 1, dtype=dtype))]) for dtype in ("f4", "f8")]
            cases.append(Case(op, opset, [whole(2, 3), whole(3, low=1)]))
    for op in ("Add", "Sub", "Mul", "Div"):
        cases.append(Case(op, 14, [f(2, 3, dtype="f2"), 2 + abs(f(3, dtype="f2"))]))
        cases += [Case(op, 14, [whole(5, dtype=dtype, low=10, high=20), whole(5, dtype=dtype, low=1)]) for dtype in ("u1", "i1", "i4")]
    cases.append(Case("Div", 14, [i(8, -8, 7, -7), i(-3, 3, -2, 2)], note="toward-zero"))
    for opset in (11, 13, 20):
        for op in ("Neg", "Tanh", "Exp", "Sigmoid", "Erf"):
            cases += [Case(op, opset, [3 * f(4, 5, dtype=dtype)]) for dtype in ("f4", "f8") if not (op == "Erf" and dtype == "f8")]
        cases.append(Case("Sqrt", opset, [abs(f(4, 5))]))
        cases.append(Case("Sin", opset, [f(4, 5)]))
        cases.append(Case("Cos", opset, [f(4, 5)]))
        cases.append(Case("IsNaN", opset, [np.array([1, np.nan, np.inf], np.float32)]))
    cases += [Case(op, 13, [f(3, 4, dtype="f2")]) for op in ("Neg", "Tanh", "Exp", "Sigmoid", "Erf")]
    cases.append(Case("Neg", 13, [whole(7, dtype="i4")]))
    cases.append(Case("Sigmoid", 13, [np.array([-1000, -90, 0, 90, 1000], np.float32)], note="extremes"))
    for opset in (11, 12, 13, 15):
        cases.append(Case("Pow", opset, [abs(f(3, 4)), f(4)]))
        cases.append(Case("Pow", opset, [f(3, 4), np.array(3, np.float32)]))
    for opset in (12, 13, 15):
        cases.append(Case("Pow", opset, [f(3, 4), np.array(2, np.int64)], note="int-exponent"))
        cases.append(Case("Pow", opset, [whole(5, dtype="i4"), np.array(2, np.float32)], note="float-exponent"))
    for opset in (11, 13, 16, 19):
        for op in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"):
            if "OrEqual" in op and opset < 12:
                continue
            cases += [
                Case(op, opset, [whole(3, 4, dtype=dtype, low=-2, high=3), whole(4, dtype=dtype, low=-2, high=3)]) for dtype in ("f4", "i8")
            ]
        cases.append(Case("And", opset, [flags(3, 4), flags(4)]))
        cases.append(Case("Or", opset, [flags(3, 4), flags(4)]))
        cases.append(Case("Not", opset, [flags(3, 4)]))
        cases += [Case("Where", opset, [flags(3, 1), x, y]) for x, y in ((f(3, 4), f(4)), (whole(3, 4), whole(4)))]
    return cases


def cast_cases() -> list[Case]:
    types = {"f4": 1, "u1": 2, "i4": 6, "i8": 7, "?": 9, "f2": 10, "f8": 11}
    source = np.array([0, 0.5, 1.75, 100, 2], np.float64)
    cases = [
        Case("Cast", 13, [source.astype(have)], {"to": number}, note=f"to-{np.dtype(want)}")
        for have in types
        for want, number in types.items()
    ]
    cases += [Case("Cast", opset, [f(4)], {"to": 7}) for opset in (11, 19, 21, 23, 24, 25)]
    return cases


def matrix_cases() -> list[Case]:
    shapes = [
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (6, 4, 5)),
        ((4,), (2, 4, 5)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((2, 0), (0, 3)),
    ]
    cases = [Case("MatMul", opset, [f(*a, seed=1), f(*b)], note=f"{a}x{b}") for opset in (11, 13) for a, b in shapes]
    cases += [Case("MatMul", 13, [f(2, 3, 4, dtype=dtype), f(2, 4, 5, dtype=dtype)]) for dtype in ("f2", "f8")]
    for opset in (11, 13):
        cases.append(Case("Gemm", opset, [f(3, 4), f(4, 5)]))
        cases += [Case("Gemm", opset, [f(3, 4), f(4, 5), f(*c)], note=f"c{c}") for c in ((5,), (3, 1), (3, 5), (1,), ())]
        both = {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}
        cases.append(Case("Gemm", opset, [f(4, 3), f(5, 4), f(5)], both, note="transposed"))
        cases.append(Case("Gemm", opset, [f(3, 4), f(4, 5), f(5)], {"beta": 0.0}, note="beta-0"))
    cases.append(Case("Gemm", 13, [f(3, 4, dtype="f8"), f(4, 5, dtype="f8"), f(5, dtype="f8")]))
    return cases


def shape_cases() -> list[Case]:
    x = f(2, 3, 4)
    cases: list[Case] = []
    for opset in (11, 13, 14, 21, 23, 24, 25):
        cases.append(Case("Reshape", opset, [x, i(2, 0, 1, -1)]))
        cases.append(Case("Reshape", opset, [x, i(-1)]))
        cases += [Case("Transpose", opset, [x], attributes) for attributes in ({}, {"perm": [1, 2, 0]})]
        cases += [Case("Flatten", opset, [x], {"axis": axis}, note=f"axis{axis}") for axis in (-1, 0, 1, 3)]
        cases.append(Case("Identity", opset, [x]))
        if opset < 13:
            cases.append(Case("Unsqueeze", opset, [x], {"axes": [0, -1]}))
            cases.append(Case("Squeeze", opset, [f(1, 3, 1)], {"axes": [-1]}))
            cases.append(Case("Split", opset, [f(2, 7)], {"axis": 1, "split": [3, 0, 4]}, 3))
        else:
            cases.append(Case("Unsqueeze", opset, [x, i(0, -1)]))
            cases.append(Case("Squeeze", opset, [f(1, 3, 1), i(-1)]))
            cases.append(Case("Split", opset, [f(2, 7), i(3, 0, 4)], {"axis": -1}, 3))
        cases.append(Case("Squeeze", opset, [f(1, 3, 1)], note="all"))
        equal = {"axis": 1} if opset < 18 else {"axis": 1, "num_outputs": 2}
        cases.append(Case("Split", opset, [f(2, 6)], equal, 2, note="equal"))
        cases.append(Case("Expand", opset, [f(3, 1), i(2, 1, 4)]))
        cases += [Case("Concat", opset, [x, f(2, 1, 4), f(2, 0, 4)], {"axis": axis}, note=f"axis{axis}") for axis in (1, -2)]
        cases.append(Case("Gather", opset, [x, np.array([[0, -1], [2, 1]])], {"axis": 1}))
        cases.append(Case("Gather", opset, [x, np.array(-1)], note="scalar"))
        cases.append(Case("Slice", opset, [x, i(1), i(2**62)]))
        cases.append(Case("Slice", opset, [x, i(-1, 0), i(-(2**62), -1), i(2, 1), i(-2, 1)], note="backwards"))
        cases.append(Case("Slice", opset, [x, i(0), i(9), None, i(2)], note="no-axes"))
        cases.append(Case("Slice", opset, [x, np.array([3], np.int32), np.array([1], np.int32), np.array([1], np.int32)], note="empty"))
    cases.append(Case("Split", 18, [f(7, 2)], {"num_outputs": 3}, 3, note="uneven"))
    cases.append(Case("Reshape", 14, [f(0, 6, 2), i(3, 2, -1)], note="empty"))
    cases.append(Case("Reshape", 14, [f(0, 6, 2), i(0, 0, 3)], {"allowzero": 1}, note="allowzero"))
    cases += [Case("Transpose", 13, [whole(2, 3).astype(dtype)]) for dtype in sorted(ALL, key=str)]
    return cases


def normalization_cases() -> list[Case]:
    cases: list[Case] = []
    for opset in (11, 13):
        cases += [Case("Softmax", opset, [3 * f(2, 3, 4)], {"axis": axis}, note=f"axis{axis}") for axis in (0, 1, -1)]
        cases.append(Case("Softmax", opset, [f(2, 3, 4)], note="default-axis"))
        cases.append(Case("Softmax", opset, [np.array([[1000, 999, -np.inf]], np.float32)], note="large"))
        cases.append(Case("Softmax", opset, [f(0, 4)], note="empty"))
    cases += [Case("Softmax", 13, [f(2, 5, dtype=dtype)]) for dtype in ("f2", "f8")]
    for outputs in (1, 2, 3):
        cases.append(
            Case("LayerNormalization", 17, [5 + f(2, 3, 8), f(8), f(8, seed=1)], {"epsilon": 1e-3}, outputs, note=f"{outputs}-outputs")
        )
    cases.append(Case("LayerNormalization", 17, [f(2, 3, 4), f(3, 4)], {"axis": 1}, note="axis1-no-bias"))
    cases.append(Case("LayerNormalization", 23, [f(2, 8, dtype="f2"), f(8, dtype="f2"), f(8, dtype="f2", seed=1)]))
    cases += [Case("RMSNormalization", 23, [f(2, 3, 8, dtype=dtype), f(8, dtype=dtype)], {"epsilon": 1e-3}) for dtype in ("f2", "f4")]
    cases.append(Case("RMSNormalization", 23, [f(2, 3, 4), f(3, 4)], {"axis": -2}, note="axis-2"))
    for opset in (11, 13):
        cases += [
            Case("ReduceMean", opset, [f(2, 3, 4)], attributes) for attributes in ({"axes": [-1]}, {"axes": [0, 2], "keepdims": 0}, {})
        ]
    for keepdims in (0, 1):
        cases.append(Case("ReduceMean", 18, [f(2, 3, 4), i(-1, 0)], {"keepdims": keepdims}, note=f"keep{keepdims}"))
        cases.append(Case("ReduceMean", 18, [f(2, 3, 4)], {"keepdims": keepdims}, note=f"all-keep{keepdims}"))
    cases.append(Case("ReduceMean", 18, [f(2, 3, 4), i()], {"noop_with_empty_axes": 1}, note="noop"))
    cases.append(Case("ReduceMean", 18, [f(2, 3, dtype="f8"), i(1)]))
    for approximate in ("none", "tanh"):
        cases += [Case("Gelu", 20, [3 * f(4, 5, dtype=dtype)], {"approximate": approximate}, note=approximate) for dtype in ("f2", "f4")]
    return cases


ALL_CASES = elementwise_cases() + cast_cases() + matrix_cases() + shape_cases() + normalization_cases()


def oracle(case: Case) -> list[np.ndarray]:
    """What onnxruntime gives, or ONNX's reference evaluator where that has no kernel: most of float16, and the newest opsets."""
    names = ["" if array is None else f"x{index}" for index, array in enumerate(case.inputs)]
    feeds = {name: array for name, array in zip(names, case.inputs, strict=True) if array is not None}
    outputs = [f"y{index}" for index in range(case.outputs)]
    node = helper.make_node(case.op, names, outputs, **case.attributes)
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape) for name, array in feeds.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=9)
    small_types = any(array.dtype.itemsize < 4 for array in feeds.values())
    if small_types or case.opset not in ORT_OPSETS:
        return list(ReferenceEvaluator(model).run(None, feeds))
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except NotImplemented:
        return list(ReferenceEvaluator(model).run(None, feeds))
    return list(session.run(None, feeds))


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_kernel_gives_what_the_oracle_gives(case: Case, run_node: RunNode) -> None:
    with np.errstate(all="ignore"):
        found = run_node(case.op, case.opset, case.inputs, case.attributes, case.outputs)
    wanted = oracle(case)
    assert len(found) == len(wanted) == case.outputs
    for have, want in zip(found, wanted, strict=True):
        assert have.dtype == want.dtype
        assert have.shape == want.shape
        tolerance = TOLERANCE.get(have.dtype, 0)
        np.testing.assert_allclose(have, want, rtol=tolerance * 10, atol=tolerance)


def test_every_kernel_has_a_case() -> None:
    """Here, or in the provider kit, which test_cuda_conformance.py runs; other domains have tests of their own."""
    tested = {(case.op, onnx.defs.get_schema(case.op, case.opset, "").since_version) for case in ALL_CASES}
    tested |= {(each.op, each.version) for each in operator_versions() if each.domain == ""}
    for kernel in KERNELS:
        if kernel.domain == "" and kernel.op != "SimplifiedLayerNormalization" and (kernel.until is None or kernel.until >= 11):
            assert any(op == kernel.op and kernel.covers(version) for op, version in tested), f"{kernel.op} {kernel.versions_text()}"


def schema_versions(op: str) -> set[int]:
    """The versions of an op's schema that opsets 11 to the newest imply."""
    return {onnx.defs.get_schema(op, opset, "").since_version for opset in range(11, NEWEST_TESTED[""] + 1) if has_schema(op, opset)}


def has_schema(op: str, opset: int) -> bool:
    return onnx.defs.has(op, opset, "")


@pytest.mark.parametrize("op", sorted({kernel.op for kernel in KERNELS if kernel.domain == ""}))
def test_versions_since_opset_11_are_covered_once_and_types_are_the_schema_s(op: str) -> None:
    for version in schema_versions(op):
        (kernel,) = [kernel for kernel in KERNELS.find("", op) if kernel.covers(version)]
        schema = onnx.defs.get_schema(op, version, "")
        assert set(kernel.types) <= {constraint.type_param_str for constraint in schema.type_constraints}
        assert kernel.host_inputs <= set(range(len(schema.inputs)))


def test_slice_backwards_from_before_the_first_element_takes_it(run_node: RunNode) -> None:
    # The spec clamps the start to [0, size - 1] when stepping backwards.
    (y,) = run_node("Slice", 13, [np.arange(5), i(-9), i(-(2**62)), i(0), i(-1)], {}, 1)
    assert y.tolist() == [0]


def test_reshape_that_no_size_fits(run_node: RunNode) -> None:
    with pytest.raises(InputError, match=r"\[2, 3\] has 6 elements"):
        run_node("Reshape", 13, [f(2, 3), i(4, -1)], {}, 1)


def test_split_that_does_not_add_up(run_node: RunNode) -> None:
    with pytest.raises(InputError, match="adds up to 5, but axis 1 has size 7"):
        run_node("Split", 13, [f(2, 7), i(2, 3)], {"axis": 1}, 2)


def test_cast_to_a_type_without_arrays_is_refused_when_nodes_are_assigned() -> None:
    (kernel,) = KERNELS.find("", "Cast")
    assert kernel.refuse is not None
    view = NodeView(op="Cast", domain="", version=13, name="", inputs=(), outputs=(), attributes={"to": onnx.TensorProto.FLOAT8E5M2})
    assert kernel.refuse(view) == "it has no arrays of tensor(float8e5m2)"
    assert kernel.refuse(replace(view, attributes={"to": onnx.TensorProto.FLOAT})) is None


def test_the_page_lists_what_the_code_has() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cuda.md").read_text(encoding="utf-8")
    assert table() in page, "paste what `python -m miniort_cuda.coverage` prints"


def test_gelu_of_an_unknown_kind(run_node: RunNode) -> None:
    with pytest.raises(KernelError, match="approximate must be 'none' or 'tanh', found 'sigmoid'"):
        run_node("Gelu", 20, [f(2)], {"approximate": "sigmoid"}, 1)


def test_outputs_share_memory_only_as_the_kernel_says(run_node: RunNode) -> None:
    for case in ALL_CASES:
        version = onnx.defs.get_schema(case.op, case.opset, "").since_version
        (kernel,) = [kernel for kernel in KERNELS.find("", case.op) if kernel.covers(version)]
        with np.errstate(all="ignore"):
            outputs = run_node(case.op, case.opset, case.inputs, case.attributes, case.outputs)
        for position, output in enumerate(outputs):
            for index, array in enumerate(case.inputs):
                allowed = position == 0 and kernel.view_of == index
                assert allowed or array is None or not np.shares_memory(output, array), f"{case}: output {position}, input {index}"


def test_no_kernel_writes_into_an_input(run_node: RunNode) -> None:
    for case in ALL_CASES:
        before = [None if array is None else array.copy() for array in case.inputs]
        with np.errstate(all="ignore"):
            run_node(case.op, case.opset, case.inputs, case.attributes, case.outputs)
        for array, copy in zip(case.inputs, before, strict=True):
            if array is not None:
                np.testing.assert_array_equal(array, copy)
