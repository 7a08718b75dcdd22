"""Kernels that are generated from chains of elementwise ops: right for every op, type and way to broadcast, and one launch each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator

from miniort.errors import KernelError
from miniort.graph.elementwise_body import DOMAIN, FIRST_VERSIONS, FUSED_ELEMENTWISE, Body, Step, body_text
from miniort.kernels import NodeContext
from miniort.types import DType, ValueInfo, dtype_to_onnx
from miniort_cuda.bfloat16 import BFloat16Array
from miniort_cuda.chains import Key, common_axes, in_one_launch
from miniort_cuda.elementwise_source import TYPES, chain_source, kernel_name, refusal
from miniort_cuda.kernels import KERNELS
from miniort_cuda.provider import CUDAProvider

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile CUDA C for the host with")

OPSET = 24
START = 'extern "C"'
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_TYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]

STEPS: dict[str, Step] = {
    **{op: Step(op, OPSET, ("a",), "y") for op in ("Abs", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish")},
    **{op: Step(op, OPSET, ("a",), "y") for op in ("IsNaN", "LeakyRelu", "Log", "Neg", "Not", "Reciprocal", "Relu", "Round", "Sigmoid")},
    **{op: Step(op, OPSET, ("a",), "y") for op in ("Sign", "Sin", "Softplus", "Sqrt", "Swish", "Tanh")},
    **{op: Step(op, OPSET, ("a", "b"), "y") for op in ("Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")},
    **{op: Step(op, OPSET, ("a", "b"), "y") for op in ("Mul", "Or", "PRelu", "Pow", "Sub", "Xor")},
    **{op: Step(op, OPSET, ("a", "b", "c"), "y") for op in ("Max", "Min", "Sum", "Clip")},
    "Clip without a maximum": Step("Clip", OPSET, ("a", "b"), "y"),
    "Clip without a minimum": Step("Clip", OPSET, ("a", "", "b"), "y"),
    "Gelu by tanh": Step("Gelu", OPSET, ("a",), "y", {"approximate": "tanh"}),
    "LeakyRelu of another slope": Step("LeakyRelu", OPSET, ("a",), "y", {"alpha": 0.25}),
    "Swish of another scale": Step("Swish", OPSET, ("a",), "y", {"alpha": 1.5}),
    "Elu of another scale": Step("Elu", OPSET, ("a",), "y", {"alpha": 0.5}),
    "HardSigmoid of other numbers": Step("HardSigmoid", OPSET, ("a",), "y", {"alpha": 0.5, "beta": 0.25}),
    "Where": Step("Where", OPSET, ("condition", "a", "b"), "y"),
    "CastLike": Step("CastLike", OPSET, ("a", "b"), "y"),
    **{f"Cast to {dtype}": Step("Cast", OPSET, ("a",), "y", {"to": dtype_to_onnx(dtype)}) for dtype in TYPES},
}


EITHER_ZERO = frozenset({"Clip", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Max", "Min", "PRelu", "Relu", "Sign"})
"""Ops that compare with zero, for which 0 and -0 are one."""


def numbers(dtype: DType, *shape: int, seed: int = 0) -> np.ndarray:
    """Numbers of both signs, halves among them; for float types also those that aren't finite, and both zeros."""
    rng = np.random.default_rng([seed, *shape])
    if dtype == np.bool_:
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.kind == "i":
        return np.asarray(rng.integers(-9, 9, shape)).astype(dtype)
    found = np.asarray(rng.integers(-24, 24, shape) / 8 + rng.standard_normal(shape) * (rng.random(shape) < 0.5)).astype(dtype)
    places = rng.random(shape)
    for index, value in enumerate((np.nan, np.inf, -np.inf, -0.0)):
        found[(places > 0.03 * index) & (places < 0.03 * (index + 1))] = value
    return found


def device_node(provider: CUDAProvider, body: Body, arrays: Sequence[np.ndarray]) -> NodeContext:
    values = tuple(ValueInfo(f"x{index}", array.dtype, array.shape) for index, array in enumerate(arrays))
    return NodeContext(
        FUSED_ELEMENTWISE, DOMAIN, 1, "the_chain", values, (ValueInfo("y"),), {"body": body_text(body, OPSET)}, provider=provider
    )


def run_chain(cupy: Any, body: Body, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """A chain by its kernel, which has to be one launch."""
    provider = CUDAProvider(cupy, cupy.special)
    (kernel,) = provider.kernels.find(DOMAIN, FUSED_ELEMENTWISE)
    node = device_node(provider, body, arrays)
    assert kernel.refuse is not None
    assert kernel.refuse(node) is None
    run, uploaded = kernel.compile(node), [provider.upload(array) for array in arrays]
    cupy.launches.clear()
    found = run(*uploaded)
    assert cupy.launches == ({kernel_name(body): 1} if provider.download(found).size else {})
    return provider.download(found)


def reference(body: Body, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The same by ONNX's reference evaluator, step by step, and each step of a narrow type computed in float32 and rounded."""
    values = dict(zip(body.inputs, arrays, strict=True))
    for step in body.steps:
        if step.op == "Constant":
            values[step.output] = np.array(step.attributes["value"], np.float32)
            continue
        read = [values[name] for name in step.inputs if name]
        if step.op in ("Cast", "CastLike"):
            target = read[1].dtype if step.op == "CastLike" else helper.tensor_dtype_to_np_dtype(int(step.attributes["to"]))
            values[step.output] = read[0].astype(np.float32).astype(target) if read[0].dtype == BFLOAT16 else read[0].astype(target)
            continue
        narrow = next((array.dtype for array in read if array.dtype in (np.float16, BFLOAT16)), None)
        wide = [array.astype(np.float32) if array.dtype == narrow else array for array in read]
        feeds = dict(zip([name for name in step.inputs if name], wide, strict=True))
        node = helper.make_node(step.op, list(step.inputs), [step.output], **step.attributes)
        infos = [helper.make_tensor_value_info(name, dtype_to_onnx(array.dtype), array.shape) for name, array in feeds.items()]
        graph = helper.make_graph([node], "step", infos, [helper.make_empty_tensor_value_info(step.output)])
        with np.errstate(all="ignore"):
            (result,) = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])).run(None, feeds)
            values[step.output] = result.astype(narrow) if narrow is not None and result.dtype == np.float32 else result
    return values[body.steps[-1].output]


def expect_equal(found: np.ndarray, wanted: np.ndarray, name: str = "") -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
    if found.dtype.kind in "bi":
        np.testing.assert_array_equal(found, wanted, err_msg=name)
        return
    one = {np.dtype(np.float16): 2e-3, BFLOAT16: 1e-2}.get(found.dtype, 2e-6)  # one unit in the last place of narrow types
    np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=one, atol=one / 4, err_msg=name)


def operands(step: Step, dtype: DType, shape: tuple[int, ...]) -> tuple[Body, list[np.ndarray]]:
    names = tuple(filter(None, step.inputs))
    arrays = [numbers(np.dtype(np.bool_) if name == "condition" else dtype, *shape, seed=index) for index, name in enumerate(names)]
    if step.op == "Clip":
        arrays[1:] = [np.array(bound).astype(dtype) for bound in (-1, 1.5)][: len(arrays) - 1]
    return Body(names, (step,)), arrays


@pytest.fixture(scope="module")
def cases() -> dict[DType, dict[str, tuple[Body, list[np.ndarray]]]]:
    """A chain of one step, and arrays for it, of each type that the op has."""
    found: dict[DType, dict[str, tuple[Body, list[np.ndarray]]]] = {}
    for dtype in TYPES:
        every = {name: operands(step, dtype, (7, 37)) for name, step in STEPS.items()}
        found[dtype] = {name: case for name, case in every.items() if refusal(case[0], [array.dtype for array in case[1]]) is None}
    return found


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_op_of_each_type(dtype: DType, cases: dict[DType, dict[str, tuple[Body, list[np.ndarray]]]], host: ModuleType) -> None:
    """All in one source, which is compiled faster than many."""
    found = cases[dtype]
    sources = [chain_source(body, [array.dtype for array in arrays], 1, "int") for body, arrays in found.values()]
    begin = sources[0].index(START)
    kernels = [
        text[begin:].replace(kernel_name(body), f"kernel_{index}", 1)
        for index, (text, (body, _)) in enumerate(zip(sources, found.values(), strict=True))
    ]
    code = sources[0][:begin] + "".join(kernels)
    for index, (name, (body, arrays)) in enumerate(found.items()):
        step = body.steps[0]
        if step.op == "Cast" and dtype.kind != "i" and step.attributes["to"] in (onnx.TensorProto.INT32, onnx.TensorProto.INT64):
            arrays = [
                np.nan_to_num(array.astype(np.float32), posinf=5, neginf=-5).astype(dtype) for array in arrays
            ]  # the rest is undefined
        wanted = reference(body, arrays)
        y = np.empty(wanted.shape, wanted.dtype)
        steps = [np.int32(1 if array.ndim else 0) for array in arrays]
        raw = [array.view(np.uint16) if array.dtype == BFLOAT16 else array for array in (*arrays, y)]
        host.launch(code, f"kernel_{index}", (-(-y.size // 64),), 64, [*raw, np.int32(y.size), *steps])
        expect_equal(y, wanted, name)
        if dtype.kind != "i" and step.op not in EITHER_ZERO:
            zero = wanted == 0
            np.testing.assert_array_equal(np.signbit(y[zero].astype(np.float32)), np.signbit(wanted[zero].astype(np.float32)), err_msg=name)


def test_each_op_has_a_type(cases: dict[DType, dict[str, tuple[Body, list[np.ndarray]]]]) -> None:
    assert {name for found in cases.values() for name in found} == set(STEPS)
    for name in ("Add", "Exp", "Gelu", "Clip", "Where"):
        assert all(name in cases[dtype] for dtype in FLOAT_TYPES)


def test_every_op_has_a_case() -> None:
    assert {step.op for step in STEPS.values()} == set(FIRST_VERSIONS)


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "equal": [(3, 5, 7), (3, 5, 7)],
    "a number": [(3, 5, 7), ()],
    "one element": [(3, 5, 7), (1, 1, 1, 1)],
    "trailing axis": [(3, 5, 7), (7,)],
    "channels": [(2, 3, 5, 7), (3, 1, 1)],
    "outer axis": [(3, 5, 7), (3, 1, 1)],
    "both are repeated": [(3, 1, 7), (5, 1)],
    "all differ": [(2, 1, 3, 1, 5), (1, 4, 1, 2, 1)],
    "larger than a block": [(40, 41), (41,)],
    "nothing": [(0, 3), (3,)],
    "no axes": [(), ()],
}


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_broadcasting(name: str, dtype: DType, compiling_cupy: Any) -> None:
    body = Body(("a", "b"), (Step("Sub", OPSET, ("a", "b"), "t"), Step("Mul", OPSET, ("t", "b"), "y")))
    arrays = [numbers(dtype, *shape, seed=index) for index, shape in enumerate(SHAPES[name])]
    expect_equal(run_chain(compiling_cupy, body, arrays), reference(body, arrays))


@st.composite
def layouts(draw: Any) -> list[np.ndarray]:
    """Arrays that broadcast to each other, of any strides: turned, with steps, backwards, repeated."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    arrays = []
    for _ in range(draw(st.integers(1, 3))):
        own = [size if draw(st.booleans()) else 1 for size in shape[draw(st.integers(0, len(shape))) :]]
        steps = [draw(st.sampled_from([1, 1, 2, -1])) for _ in own]
        whole = np.arange(max(1, np.prod([abs(step) * size for step, size in zip(steps, own, strict=True)], dtype=int)), dtype=np.float32)
        order = draw(st.permutations(range(len(own))))
        turned = whole.reshape([abs(steps[axis]) * own[axis] for axis in order]).transpose(np.argsort(order).astype(int).tolist())
        arrays.append(turned[tuple(slice(None, None, step) for step in steps)])
    return arrays


def key(arrays: Sequence[np.ndarray]) -> Key:
    return tuple((array.dtype, array.shape, array.strides) for array in arrays)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(layouts())
def test_common_axes_lead_to_the_elements_that_broadcasting_gives(arrays: list[np.ndarray]) -> None:
    axes = common_axes(key(arrays))
    assert axes.shape == np.broadcast_shapes(*(array.shape for array in arrays))
    for array, steps in zip(arrays, axes.steps, strict=True):
        seen = np.lib.stride_tricks.as_strided(array, axes.sizes, [step * array.itemsize for step in steps])
        np.testing.assert_array_equal(seen.reshape(axes.shape), np.broadcast_to(array, axes.shape))


@pytest.mark.parametrize(
    ("shapes", "count"), [([(3, 5, 7), (3, 5, 7)], 1), ([(3, 5, 7), ()], 1), ([(3, 5, 7), (7,)], 2), ([(2, 3, 5, 7), (3, 1, 1)], 3)]
)
def test_as_few_axes_as_possible(shapes: list[tuple[int, ...]], count: int) -> None:
    assert len(common_axes(key([np.zeros(shape, np.float32) for shape in shapes])).sizes) == count


UNARY = ["Neg", "Abs", "Tanh", "Sigmoid", "Exp", "Relu", "Swish", "Erf", "Round"]
BINARY = ["Add", "Sub", "Mul", "Max", "Min"]


@st.composite
def chains(draw: Any) -> tuple[Body, list[np.ndarray]]:
    """A random chain, and operands of any layout for it."""
    dtype = draw(st.sampled_from(FLOAT_TYPES))
    arrays = [np.tanh(array - 1).astype(dtype) for array in draw(layouts())]
    names = tuple(f"x{index}" for index in range(len(arrays)))
    known, steps = list(names), []
    for index in range(draw(st.integers(1, 6))):
        pick = st.sampled_from(known)
        kind = draw(st.sampled_from(["unary", "binary", "binary", "number", "where", "cast"]))
        if kind == "unary":
            steps.append(Step(draw(st.sampled_from(UNARY)), OPSET, (draw(pick),), f"t{index}"))
        elif kind == "where":
            steps.append(Step("Less", OPSET, (draw(pick), draw(pick)), f"b{index}"))
            steps.append(Step("Where", OPSET, (f"b{index}", draw(pick), draw(pick)), f"t{index}"))
        else:
            other = draw(pick)
            if kind == "number":
                steps.append(Step("Constant", OPSET, (), f"n{index}", {"value": draw(st.sampled_from([0.0, -1.5, 0.1]))}))
                other = f"c{index}"
                steps.append(Step("CastLike", OPSET, (f"n{index}", known[0]), other))
            steps.append(Step(draw(st.sampled_from(BINARY)), OPSET, (draw(pick), other), f"t{index}"))
        known.append(f"t{index}")
    for index, name in enumerate(name for name in names if not any(name in step.inputs for step in steps)):
        steps.append(Step("Add", OPSET, (known[-1], name), f"u{index}"))
        known.append(f"u{index}")
    if len(known[-1:]) and steps[-1].output != known[-1]:
        steps.append(Step("Neg", OPSET, (known[-1],), "last"))
    return Body(names, tuple(steps)), arrays


def check(cupy: Any, case: tuple[Body, list[np.ndarray]]) -> None:
    """By every layout as it is: a view of an uploaded block on the device."""
    body, arrays = case
    provider = CUDAProvider(cupy, cupy.special)
    with provider.current_device():
        views = [np.asarray(array) for array in arrays]
        placed = [cupy._new(view.view(np.uint16) if view.dtype == BFLOAT16 else view) for view in views]
        device = [BFloat16Array(each) if array.dtype == BFLOAT16 else each for each, array in zip(placed, arrays, strict=True)]
        found = provider.download(in_one_launch(device_node(provider, body, arrays), body)(*device))
    wanted = reference(body, arrays)
    everything = np.broadcast_shapes(*(array.shape for array in arrays))
    expect_equal(found, np.broadcast_to(wanted, everything))


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=CHECKS)
@given(chains())
def test_random_chains(compiling_cupy: Any, case: tuple[Body, list[np.ndarray]]) -> None:
    check(compiling_cupy, case)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=CHECKS)
@given(chains())
def test_very_many_random_chains(compiling_cupy: Any, case: tuple[Body, list[np.ndarray]]) -> None:
    check(compiling_cupy, case)


def test_many_elements_are_counted_with_64_bits(host: Any) -> None:
    body = Body(("a", "b"), (Step("Add", OPSET, ("a", "b"), "y"),))
    a, b, y = (np.arange(size, dtype=np.float32) for size in (12, 4, 12))
    wide = chain_source(body, [a.dtype, b.dtype], 2, "long long")
    host.launch(wide, "chain_Add", (1,), 32, [a, b, y, *(np.int64(each) for each in (12, 4, 4, 1, 0, 1))])
    np.testing.assert_array_equal(y, np.arange(12) + np.arange(12) % 4)


def test_what_it_has_no_kernel_for_is_refused_or_left_to_the_formula(compiling_cupy: Any) -> None:
    body = Body(("a",), (Step("Exp", OPSET, ("a",), "y"),))
    assert refusal(body, [np.dtype(np.float64)]) == "its kernel takes no tensor(double)"
    assert refusal(body, [np.dtype(np.int32)]) == "its kernel has no Exp of tensor(int32)"
    assert refusal(body, [None]) == "its kernel has to know all types, and that of a isn't known"
    assert refusal(body, []) == "the body of its kernel has 1 inputs, the node 0"
    provider = CUDAProvider(compiling_cupy, compiling_cupy.special)
    x = np.ones((2, 3))
    node = device_node(provider, body, [x])
    with pytest.raises(KernelError, match=r"node 'the_chain' \(FusedElementwise\): its kernel takes no tensor\(double\)"):
        in_one_launch(node, body)(provider.upload(x))
    assert in_one_launch(node, body, lambda x: "by formula")(provider.upload(x)) == "by formula"


def test_one_kernel_is_compiled_for_all_chains_that_do_the_same(compiling_cupy: Any) -> None:
    compiled: list[str] = []
    module = compiling_cupy.RawModule
    compiling_cupy.RawModule = lambda code, options: (compiled.append(code), module(code, options))[1]
    provider = CUDAProvider(compiling_cupy, compiling_cupy.special)
    body = Body(("a",), (Step("Exp", OPSET, ("a",), "t"), Step("Neg", OPSET, ("t",), "y")))
    for shape in ((2, 3), (4,), (1, 1)):
        x = np.ones(shape, np.float32)
        run = in_one_launch(device_node(provider, body, [x]), body)
        with provider.current_device():
            for _ in range(2):
                run(provider.upload(x))
    assert len(compiled) == 1


def test_the_op_is_not_offered_without_a_compiler(cupy: Any) -> None:
    assert not CUDAProvider(cupy, cupy.special).kernels.find(DOMAIN, FUSED_ELEMENTWISE)
    assert KERNELS.find(DOMAIN, FUSED_ELEMENTWISE)


@pytest.mark.slow
def test_nvrtc_compiles_every_op_of_every_type(
    nvrtc: Callable[[str, int], None], capability: int, cases: dict[DType, dict[str, tuple[Body, list[np.ndarray]]]]
) -> None:
    for dtype, found in cases.items():
        steps, names = [], {"a": dtype, "b": dtype, "c": dtype, "condition": np.dtype(np.bool_)}
        for index, (body, _) in enumerate(found.values()):
            (step,) = body.steps
            steps.append(Step(step.op, step.version, step.inputs, f"v{index}", step.attributes))
        flags = []
        for index, step in enumerate(list(steps)):
            steps.append(Step("Cast", OPSET, (step.output,), f"f{index}", {"to": onnx.TensorProto.FLOAT}))
            flags.append(f"f{index}")
        steps.append(Step("Sum", OPSET, tuple(flags), "y"))
        whole = Body(tuple(names), tuple(steps))
        for axes, index_type in ((1, "int"), (3, "int"), (2, "long long")):
            nvrtc(chain_source(whole, list(names.values()), axes, index_type), capability)
