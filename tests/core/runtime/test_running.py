"""`run`: what it takes, what it gives, whose memory that is, and what its errors say."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import parser

from miniort import InferenceSession, SessionOptions
from miniort.errors import InputError, ModelError, RunError
from miniort.kernels import Kernel

Build = Callable[..., InferenceSession]
X = np.array([[1, -2, 3]], np.float32)
TEXT = "g (float[N, 3] x) => (float[N, 3] y, float[N, 3] z) { y = Neg(x)  z = Exp(y) }"


def test_outputs_by_name_in_the_order_asked(build: Build) -> None:
    session = build(TEXT)
    y, z = -X, np.exp(-X)
    for names, expected in ((None, [y, z]), ([], [y, z]), (["z"], [z]), (["z", "y"], [z, y]), (("y",), [y])):
        for actual, wanted in zip(session.run(names, {"x": X}), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-6)


def test_one_output_asked_for_twice_is_two_arrays(build: Build) -> None:
    first, second = build(TEXT).run(["y", "y"], {"x": X})
    first[...] = 9
    assert second.tolist() == (-X).tolist()


def test_an_output_that_is_not_there(build: Build) -> None:
    with pytest.raises(InputError, match="no output 'w'; its outputs: y, z"):
        build(TEXT).run(["w"], {"x": X})


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, r"input 'x' is missing: tensor\(float\) of shape \[N, 3\] is needed"),
        ({"x": None}, "input 'x' is missing"),
        ({"x": X, "w": X}, "no input 'w'; its inputs: x"),
        ({"x": X.astype(np.float64)}, r"input 'x' must be tensor\(float\), found tensor\(double\); convert it with .astype\('float32'\)"),
        ({"x": X.astype(np.int64)}, r"must be tensor\(float\), found tensor\(int64\)"),
        ({"x": X.astype(ml_dtypes.bfloat16)}, r"must be tensor\(float\), found tensor\(bfloat16\)"),
        ({"x": X.astype(">f4")}, r"must be tensor\(float\), found tensor\(>f4\)"),
        ({"x": np.array([["a", "b", "c"]])}, r"must be tensor\(float\), found tensor\(string\)"),
        ({"x": np.array([["2020-01-01"] * 3], "M8[D]")}, r"must be tensor\(float\), found tensor\(datetime64\[D\]\)"),
        ({"x": X[0]}, r"must have the shape \[N, 3\], found \[3\]"),
        ({"x": X[:, :2]}, r"must have the shape \[N, 3\], found \[1, 2\]"),
        ({"x": X[None]}, r"must have the shape \[N, 3\], found \[1, 1, 3\]"),
        ({"x": [[1, 2, 3], [4]]}, "'x'.*can't be made an array"),
        ({"x": object()}, "'x' must be"),
        ({"x": {"a": 1}}, "'x' must be"),
        ({"x": "text"}, "'x' must be"),
        ({"x": [[1j, 2, 3]]}, "'x' must be"),
    ],
)
def test_feeds_that_do_not_fit(build: Build, feeds: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build(TEXT).run(None, feeds)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("float", [1, 2.5], [1, 2.5]),
        ("float", (1, 2), [1, 2]),
        ("double", [0.1, 2], [0.1, 2]),
        ("int64", [1, 2], [1, 2]),
        ("int32", [1, -2], [1, -2]),
        ("uint8", [1, 255], [1, 255]),
        ("bool", [True, False], [True, False]),
        ("float16", [1, 0.5], [1, 0.5]),
        ("bfloat16", [1, 0.5], [1, 0.5]),
        ("string", ["a", "größer"], ["a", "größer"]),
        ("string", np.array(["a", "b"]), ["a", "b"]),
        ("float", [np.float32(1), np.float32(2)], [1, 2]),
    ],
)
def test_lists_as_feeds(build: Build, kind: str, given: Any, expected: list[Any]) -> None:
    (y,) = build(f"g ({kind}[2] x) => ({kind}[2] y) {{ y = Identity(x) }}").run(None, {"x": given})
    assert y.tolist() == expected


def test_a_number_as_a_feed(build: Build) -> None:
    session = build("g (float x) => (float y) { y = Neg(x) }")
    for given in (3, 3.0, np.float32(3), np.array(3, np.float32)):
        (y,) = session.run(None, {"x": given})
        assert isinstance(y, np.ndarray)
        assert y.shape == ()
        assert y == -3


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("int64", [1.5, 2.0]),
        ("int64", [1.0, 2.0]),
        ("bool", [1, 0]),
        ("uint8", [1, 300]),
        ("uint8", [-1, 2]),
        ("int64", [True, "a"]),
        ("string", [1, 2]),
    ],
)
def test_lists_are_not_cut_to_fit(build: Build, kind: str, given: Any) -> None:
    with pytest.raises(InputError, match="'x'"):
        build(f"g ({kind}[2] x) => ({kind}[2] y) {{ y = Identity(x) }}").run(None, {"x": given})


def test_text_of_the_wrong_shape(build: Build) -> None:
    with pytest.raises(InputError, match=r"shape \[2\], found \[3\]"):
        build("g (string[2] x) => (string[2] y) { y = Identity(x) }").run(None, {"x": np.array(["a", "b", "c"])})


def test_arrays_that_are_not_contiguous(build: Build) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2, ::-1]
    np.testing.assert_array_equal(build(TEXT).run(["y"], {"x": x})[0], -x)


VIEWS = """g (float[2, 3] x) => (float[2, 3] identity, float[6] reshaped, float[3, 2] transposed, float[1, 2, 3] wider, float[2, 3] weight,
                                float[3, 2] turned, float[2, 3] y, float[6] yr, float[2, 3] yi)
    <float[2, 3] w = {1, 2, 3, 4, 5, 6}, int64[1] flat = {-1}, int64[1] zero = {0}> {
        identity = Identity(x)  reshaped = Reshape(x, flat)  transposed = Transpose(x)  wider = Unsqueeze(x, zero)
        weight = Identity(w)  turned = Transpose(w)
        y = Neg(x)  yr = Reshape(y, flat)  yi = Identity(y)
    }"""


@pytest.mark.parametrize("level", ["none", "all"])
def test_results_share_memory_with_nothing(build: Build, level: str) -> None:
    """Not with feeds, not with weights, not with each other: the caller may write into them."""
    session = build(VIEWS, level=level)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    first = session.run(None, {"x": x})
    kept = [output.copy() for output in first]
    weights = [value for value in session.plan.initial if isinstance(value, np.ndarray)]
    for index, output in enumerate(first):
        assert not any(np.shares_memory(output, other) for other in (x, *weights, *first[:index])), index
        output[...] = -99
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    for actual, wanted in zip(session.run(None, {"x": x}), kept, strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("c", [True, False])
def test_results_of_branches_share_memory_with_nothing(build: Build, c: bool) -> None:
    session = build(
        """g (float[2] x, bool c) => (float[2] p, float[2] q) <float[2] w = {1, 2}> {
        p, q = If(c) <then_branch = t () => (float[2] a, float[2] b) { a = Identity(x)  b = Identity(a) },
                      else_branch = e () => (float[2] d, float[2] f) { d = Identity(w)  f = Identity(w) }> }""",
        level="none",
    )
    x = np.array([5, 6], np.float32)
    p, q = session.run(None, {"x": x, "c": np.array(c)})
    p[...] = 9
    assert q.tolist() == ([5, 6] if c else [1, 2])
    assert x.tolist() == [5, 6]
    assert session.run(None, {"x": x, "c": np.array(c)})[0].tolist() == ([5, 6] if c else [1, 2])


def test_large_results_outlive_the_next_run(build: Build) -> None:
    """A result from the pool must not be handed out again while the caller has it."""
    session = build("g (float[N] x) => (float[N] y) { a = Neg(x)  b = Neg(a)  y = Neg(b) }")
    results = [session.run(None, {"x": np.full(50_000, value, np.float32)})[0] for value in range(5)]
    assert [set(result) for result in results] == [{0.0}, {-1.0}, {-2.0}, {-3.0}, {-4.0}]


def test_a_kernel_that_fails_is_named_with_what_it_was_given(build: Build) -> None:
    session = build("g (float[N] x, float[M] b) => (float[K] y) { a = Relu(x)  y = Add(a, b) }")
    with pytest.raises(RunError) as caught:
        session.run(None, {"x": np.ones(2, np.float32), "b": np.ones(3, np.float32)})
    message = str(caught.value)
    assert "node 'Add_0' (Add) on cpu failed on (tensor(float)[2], tensor(float)[3]): ValueError" in message
    assert isinstance(caught.value.__cause__, ValueError)
    assert [value.tolist() for value in session.run(None, {"x": np.ones(2, np.float32), "b": np.ones(2, np.float32)})] == [[2, 2]]


def test_a_kernel_that_fails_in_a_body_is_named_by_its_path(build: Build) -> None:
    def fail(*_: Any) -> NoReturn:
        raise ZeroDivisionError("one two")

    text = """g (float[2] x, bool c) => (float[2] y)
    { y = If(c) <then_branch = t () => (float[2] p) { p = test.Fail(x) }, else_branch = e () => (float[2] q) { q = Relu(x) }> }"""
    session = build(text, kernels=[Kernel("cpu", "Fail", "test", 1, None, lambda node: fail)])
    with pytest.raises(RunError, match=r"'If_0/then_branch/Fail_0' \(test\.Fail\) on cpu .*ZeroDivisionError: one two"):
        session.run(None, {"x": np.ones(2, np.float32), "c": np.array(True)})


def test_ctrl_c_goes_through(build: Build) -> None:
    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    session = build(
        "g (float[2] x) => (float[2] y) { y = test.Fail(x) }", kernels=[Kernel("cpu", "Fail", "test", 1, None, lambda node: interrupt)]
    )
    with pytest.raises(KeyboardInterrupt):
        session.run(None, {"x": np.ones(2, np.float32)})


def test_runs_in_four_threads(build: Build) -> None:
    session = build(
        """g (float[N, 64] x, int64 trips) => (float[N, 64] y) <float[64] w = {WEIGHTS}> {
            a = Add(x, w)  b = Neg(a)
            y = Loop(trips, , b) <body = l (int64 i, bool going, float[N, 64] s) => (bool still, float[N, 64] n)
                { still = Identity(going)  t = Mul(s, s)  r = Sqrt(t)  n = Add(r, a) }>
        }""".replace("WEIGHTS", ", ".join(map(str, range(64))))
    )
    wrong: list[str] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(25):
            x = rng.standard_normal((int(rng.integers(1, 400)), 64)).astype(np.float32)
            trips = int(rng.integers(0, 4))
            (y,) = session.run(None, {"x": x, "trips": np.array(trips)})
            a = x + np.arange(64, dtype=np.float32)
            expected = -a
            for _ in range(trips):
                expected = np.sqrt(expected * expected) + a
            if not np.array_equal(y, expected):
                wrong.append(f"{seed}: {x.shape}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_hook_is_called_after_the_session_is_built(build: Build) -> None:
    text = """g (float[2] x, bool c) => (float[2] y)
    { y = If(c) <then_branch = t () => (float[2] p) { p = Neg(x) }, else_branch = e () => (float[2] q) { q = Relu(x) }> }"""
    session = build(text)

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a hook was called in a run")

    session.plugins._inner_hookexec = fail
    with pytest.raises(AssertionError, match="a hook was called"):
        session.plugins.hook.miniort_providers()
    for _ in range(2):
        assert session.run(None, {"x": np.ones(2, np.float32), "c": np.array(True)})[0].tolist() == [-1, -1]


def test_execute_gives_everything_by_name_unchecked(build: Build) -> None:
    outputs = build(TEXT).execute({"x": X})
    assert list(outputs) == ["y", "z"]
    np.testing.assert_array_equal(outputs["y"], -X)


def test_pickled_by_what_it_was_built_from(tmp_path: Path) -> None:
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {TEXT}')
    onnx.save(proto, tmp_path / "model.onnx")
    options = SessionOptions(graph_optimization_level="basic", strict=True)
    for model in (tmp_path / "model.onnx", str(tmp_path / "model.onnx"), proto.SerializeToString(), proto):
        session = InferenceSession(model, options, ["cpu"])
        copy = pickle.loads(pickle.dumps(session))
        assert copy.options == options
        assert copy.get_providers() == ["cpu"]
        np.testing.assert_array_equal(copy.run(["y"], {"x": X})[0], -X)
        assert copy.weights is not session.weights


def test_an_ir_model_cannot_be_pickled(build: Build) -> None:
    from miniort import load_model

    session = InferenceSession(load_model(parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {TEXT}')))
    with pytest.raises(ModelError, match="can't be pickled; build it from a path"):
        pickle.dumps(session)


def test_unnamed_optional_outputs(build: Build) -> None:
    text = "g (float[2, 3] x) => (float[2, 3] y) <float[3] s = {{1, 1, 1}}> {{ {} = LayerNormalization(x, s) }}"
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    for level in ("none", "all"):
        results = [build(text.format(outputs), level=level).run(None, {"x": x})[0] for outputs in ("y", "y, ", "y, m", "y, , i")]
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


def test_inputs_that_nobody_reads_must_still_fit(build: Build) -> None:
    session = build("g (float[2] x, float[2] unread) => (float[2] y) { y = Neg(x) }")
    with pytest.raises(InputError, match="'unread' is missing"):
        session.run(None, {"x": np.ones(2, np.float32)})


def test_an_output_that_is_a_weight(build: Build) -> None:
    session = build("g (float[2] x) => (float[2] y, float[2] w) <float[2] w = {1, 2}> { y = Neg(x) }")
    _, w = session.run(None, {"x": np.ones(2, np.float32)})
    w[...] = 9
    assert session.run(["w"], {"x": np.ones(2, np.float32)})[0].tolist() == [1, 2]
