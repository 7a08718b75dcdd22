"""A device that isn't the host, beside the CPU: where nodes go, what is copied and how often, and that nothing else touches its arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from miniort import InferenceSession, SessionOptions, WeightStore
from miniort.errors import KernelError, ProviderError, RunError
from miniort.plugins import PluginManager
from miniort.runtime.observers import BaseObserver, NodeInfo, ValueRecorder

Build = Callable[..., InferenceSession]
X = np.array([[-1, 2], [3, -4]], np.float32)


def places(session: InferenceSession) -> dict[str, str | None]:
    return {node.name: node.provider for node in session.explain().nodes}


def copies(session: InferenceSession) -> list[tuple[str, str, str]]:
    return [(copy.value, copy.source, copy.target) for copy in session.explain().copies]


@pytest.fixture
def device(opaque: ModuleType) -> Any:
    return opaque.Device()


def check(session: InferenceSession, device: Any, expected: list[Any], **feeds: Any) -> None:
    """The outputs, and as many copies in a run as `explain()` says. Twice, as a run must leave nothing behind."""
    for _ in range(2):
        device.reset()
        outputs = session.run(None, feeds or {"x": X})
        for actual, wanted in zip(outputs, expected, strict=True):
            assert isinstance(actual, np.ndarray)
            np.testing.assert_allclose(actual, wanted, rtol=1e-6)
        told = [copy.target for copy in session.explain().copies]
        assert len(device.uploads) == told.count(device.location)
        assert len(device.downloads) == len(told) - told.count(device.location)


def test_part_of_a_graph(build: Build, device: Any) -> None:
    session = build("g (float[N, 2] x) => (float[N, 2] y) { a = Add(x, x)  b = Exp(a)  c = Mul(a, b)  y = Relu(c) }", add=(device,))
    assert places(session) == {"Add_0": "opaque", "Exp_0": "cpu", "Mul_0": "opaque", "Relu_0": "opaque"}
    assert copies(session) == [
        ("x", "host", "opaque:0"),
        ("a", "opaque:0", "host"),
        ("b", "host", "opaque:0"),
        ("y", "opaque:0", "host"),
    ]
    check(session, device, [np.maximum(2 * X * np.exp(2 * X), 0)])
    assert "4 copies between devices in each run" in str(session.explain())


def test_each_value_is_copied_once_in_each_direction(build: Build, device: Any) -> None:
    session = build(
        """g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z, float[N, 2] a)
        { a = Add(x, x)  b = Exp(a)  c = Exp(x)  d = Sin(a)  e = Sub(b, c)  f = Sub(x, d)  y = Mul(e, b)  z = Mul(f, b) }""",
        add=(device,),
    )
    told = copies(session)
    assert len(told) == len(set(told))
    assert sum(value == "a" for value, _, _ in told) == 1
    assert sum(value == "b" for value, _, _ in told) == 1
    a, b = 2 * X, np.exp(2 * X)
    check(session, device, [(b - np.exp(X)) * b, (X - np.sin(a)) * b, a])


def test_the_order_of_providers_decides(build: Build, opaque: ModuleType) -> None:
    text = "g (float[N, 2] x) => (float[N, 2] y) { y = Add(x, x) }"
    for priority, first in ((900, "opaque"), (50, "cpu")):
        session = build(text, add=(opaque.Device(priority=priority),))
        assert session.get_providers()[0] == first
        assert places(session) == {"Add_0": first}
    device = opaque.Device()
    for order in (["cpu", "opaque"], ["opaque", "cpu"]):
        session = build(text, add=(device,), providers=order)
        assert session.get_providers() == order
        assert places(session) == {"Add_0": order[0]}
    assert build(text, add=(device,), providers=["cpu", "opaque"]).explain().copies == ()


def test_constants_are_uploaded_when_the_session_is_built(build: Build, device: Any) -> None:
    text = """g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2] b = {5, 6}>
        { h = MatMul(x, w)  i = Add(h, b)  j = MatMul(i, w)  y = Relu(j) }"""
    session = build(text, add=(device,))
    assert sorted(device.uploads) == [(2,), (2, 2)]
    assert copies(session) == [("x", "host", "opaque:0"), ("y", "opaque:0", "host")]
    w = np.array([[1, 2], [3, 4]], np.float32)
    check(session, device, [np.maximum((X @ w + [5, 6]) @ w, 0)])


def test_two_sessions_over_one_store_upload_once(build: Build, device: Any) -> None:
    text = "g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"
    store = WeightStore()
    sessions = [build(text, add=(device,), weights=store) for _ in range(2)]
    assert device.uploads == [(2, 2)]
    for session in sessions:
        check(session, device, [X @ np.array([[1, 2], [3, 4]], np.float32)])


def test_a_constant_that_both_sides_read(build: Build, device: Any) -> None:
    session = build(
        "g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { a = Mul(x, w)  e = Exp(a)  y = Pow(e, w) }", add=(device,)
    )
    assert device.uploads == [(2,)]
    assert [value for value, _, _ in copies(session)] == ["x", "a"]
    check(session, device, [np.exp(X * [1, 2]) ** [1, 2]])


def test_the_shape_of_a_device_array_needs_no_copy(build: Build, device: Any) -> None:
    session = build("g (float[N, 2] x) => (int64[2] s, int64 n) { a = Add(x, x)  s = Shape(a)  n = Size(a) }", add=(device,))
    assert places(session) == {"Add_0": "opaque", "Shape_0": "cpu", "Size_0": "cpu"}
    assert copies(session) == [("x", "host", "opaque:0")]
    check(session, device, [[2, 2], 4])


def test_arithmetic_with_shapes_stays_on_the_host(build: Build, device: Any) -> None:
    """The device could Add, Mul, Gather and Unsqueeze as well, but would only make the host wait for each number."""
    session = build(
        """g (float[N, T, 4] x) => (float[A, B] y) <int64 zero = {0}, int64 one = {1}, int64[1] axis = {0}, int64 four = {4}> {
            h = Relu(x)
            s = Shape(h)  n = Gather(s, zero)  t = Gather(s, one)  m = Mul(n, four)
            rows = Unsqueeze(t, axis)  columns = Unsqueeze(m, axis)  target = Concat <axis = 0>(rows, columns)
            y = Reshape(h, target)
        }""",
        add=(device,),
    )
    where = places(session)
    assert {name for name, provider in where.items() if provider == "opaque"} == {"Relu_0", "Reshape_0"}
    assert copies(session) == [("x", "host", "opaque:0"), ("y", "opaque:0", "host")]
    reasons = [refusal.reason for node in session.explain().nodes if node.op == "Mul" for refusal in node.refusals]
    assert reasons == ["it computes with shapes, which stay on the host"]
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    check(session, device, [np.maximum(x, 0).reshape(3, 8)], x=x)


def test_numbers_that_are_no_shapes_go_to_the_device(build: Build, device: Any) -> None:
    session = build(
        "g (int64[N] i, float[4, 2] table) => (float[N, 2] y, int64[N] j) { j = Add(i, i)  y = Gather(table, j) }", add=(device,)
    )
    assert set(places(session).values()) == {"opaque"}
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    check(session, device, [table[[2, 0]], [2, 0]], i=np.array([1, 0]), table=table)


def test_an_op_or_type_that_the_device_lacks_goes_to_the_cpu_and_says_why(build: Build, device: Any) -> None:
    session = build("g (float[N, 2] x, int64[N] i) => (float[N, 2] y, int64[N] j) { y = Exp(x)  j = Neg(i) }", add=(device,))
    refused = {node.op: (node.provider, [(each.provider, each.reason) for each in node.refusals]) for node in session.explain().nodes}
    assert refused["Exp"] == ("cpu", [("opaque", "it has no kernel for this op")])
    assert refused["Neg"][0] == "cpu"
    assert refused["Neg"][1][0][0] == "opaque"
    assert "tensor(float)" in refused["Neg"][1][0][1]
    assert "tensor(int64)" in refused["Neg"][1][0][1]
    assert device.uploads == []
    assert "opaque: it has no kernel for this op" in str(session.explain())


def test_an_identity_of_a_host_value_stays_on_the_host(build: Build, device: Any) -> None:
    session = build(
        """g (float[2] x) => (float[2] y, float[2] z, float[2] w, float[2] v) <float[2] k = {1, 2}>
        { y = Identity(x)  e = Exp(x)  i = Identity(e)  z = Add(i, e)  w = Identity(k)  v = Identity(z) }""",
        level="none",
        add=(device,),
    )
    assert places(session) == {
        "Identity_0": "cpu", "Exp_0": "cpu", "Identity_1": "cpu", "Add_0": "opaque", "Identity_2": "cpu", "Identity_3": "opaque",
    }  # fmt: skip
    x = X[0]
    check(session, device, [x, 2 * np.exp(x), [1, 2], 2 * np.exp(x)], x=x)


def test_one_device_to_another_goes_by_way_of_the_host(build: Build, opaque: ModuleType) -> None:
    first = opaque.Device("first", "first:0", 900, only=["Add", "Relu"])
    second = opaque.Device("second", "second:0", 800, only=["Mul", "Neg"])
    session = build(
        "g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z) { a = Add(x, x)  b = Mul(a, a)  n = Neg(a)  y = Add(b, n)  z = Exp(a) }",
        add=(first, second),
    )
    assert copies(session) == [
        ("x", "host", "first:0"),
        ("a", "first:0", "host"),
        ("a", "host", "second:0"),
        ("b", "second:0", "host"),
        ("b", "host", "first:0"),
        ("n", "second:0", "host"),
        ("n", "host", "first:0"),
        ("y", "first:0", "host"),
    ]
    y, z = session.run(None, {"x": X})
    np.testing.assert_allclose(y, 4 * X * X - 2 * X)
    np.testing.assert_allclose(z, np.exp(2 * X))
    assert (len(first.uploads), len(first.downloads), len(second.uploads), len(second.downloads)) == (3, 2, 1, 2)


def test_two_providers_of_one_device_hand_arrays_over_as_they_are(build: Build, opaque: ModuleType) -> None:
    first = opaque.Device("first", "shared:0", 900, only=["Add"])
    second = opaque.Device("second", "shared:0", 800, only=["Mul"])
    second.wrap, second.unwrap = first.wrap, first.unwrap
    session = build("g (float[N, 2] x) => (float[N, 2] y) { a = Add(x, x)  y = Mul(a, a) }", add=(first, second))
    assert set(places(session).values()) == {"first", "second"}
    assert copies(session) == [("x", "host", "shared:0"), ("y", "shared:0", "host")]
    np.testing.assert_allclose(session.run(None, {"x": X})[0], 4 * X * X)


def test_branches_that_read_device_values(build: Build, device: Any) -> None:
    session = build(
        """g (float[N, 2] x, bool c) => (float[N, 2] y) <float[2] w = {1, 2}> {
            a = Add(x, x)
            y = If(c) <then_branch = t () => (float[N, 2] p) { h = Mul(a, w)  p = Relu(h) },
                       else_branch = e () => (float[N, 2] q) { i = Exp(a)  q = Add(i, w) }>
        }""",
        add=(device,),
    )
    assert places(session)["If_0"] == "cpu"
    assert device.uploads == [(2,)]
    for c, expected in ((True, np.maximum(2 * X * [1, 2], 0)), (False, np.add(np.exp(2 * X), [1, 2]))):
        np.testing.assert_allclose(session.run(None, {"x": X, "c": np.array(c)})[0], expected, rtol=1e-6)
    assert all("//" not in copy.path and not copy.path.count("then_branch") > 1 for copy in session.explain().copies)


def test_a_loop_copies_what_it_captures_once_and_not_in_every_trip(build: Build, device: Any) -> None:
    session = build(
        """g (float[2, 2] x, int64 trips) => (float[2, 2] y) {
            a = Add(x, x)
            y = Loop(trips, , x) <body = b (int64 i, bool going, float[2, 2] state) => (bool still, float[2, 2] next)
                { still = Identity(going)  e = Exp(a)  s = Add(state, x)  next = Sub(s, e) }>
        }""",
        add=(device,),
    )
    captured = [copy for copy in copies(session) if copy[0] in ("x", "a")]
    assert sorted(captured) == [("a", "opaque:0", "host"), ("x", "host", "opaque:0")]
    counts = []
    for trips in (0, 1, 4):
        device.reset()
        (y,) = session.run(None, {"x": X, "trips": np.array(trips)})
        np.testing.assert_allclose(y, X + trips * (X - np.exp(2 * X)), rtol=1e-5)
        counts.append((len(device.uploads), len(device.downloads)))
    base = counts[0]
    assert base == (1, 1), "x to the device, a to the host"
    per_trip = (counts[1][0] - base[0], counts[1][1] - base[1])
    assert (counts[2][0] - base[0], counts[2][1] - base[1]) == (4 * per_trip[0], 4 * per_trip[1])
    assert per_trip == (2, 1), "state and e to the device, next to the host"


def test_bodies_in_bodies(build: Build, device: Any) -> None:
    session = build(
        """g (float[2, 2] x, bool c, int64 trips) => (float[2, 2] y) {
            a = Relu(x)
            y = Loop(trips, , x) <body = b (int64 i, bool going, float[2, 2] state) => (bool still, float[2, 2] next) {
                still = Identity(going)
                next = If(c) <then_branch = t () => (float[2, 2] p) { p = Add(a, state) },
                              else_branch = e () => (float[2, 2] q) { h = Mul(a, x)  k = Exp(a)  q = Add(h, k) }>
            }>
        }""",
        add=(device,),
    )
    relu = np.maximum(X, 0)
    for c, trips, expected in (
        (True, 3, X + 3 * relu),
        (False, 2, relu * X + np.exp(relu)),
        (False, 0, X),
    ):
        (y,) = session.run(None, {"x": X, "c": np.array(c), "trips": np.array(trips)})
        np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_outputs_come_to_the_host_and_belong_to_the_caller(build: Build, device: Any) -> None:
    session = build(
        """g (float[N, 2] x) => (float[N, 2] y, float[2, N] t, float[2] w, float[2] v) <float[2] w = {1, 2}>
        { y = Add(x, w)  t = Transpose <perm = [1, 0]>(y)  v = Identity(w) }""",
        add=(device,),
    )
    first = session.run(None, {"x": X})
    for output in first:
        assert isinstance(output, np.ndarray)
        output[...] = 99
    check(session, device, [np.add(X, [1, 2]), np.add(X, [1, 2]).T, [1, 2], [1, 2]])


def test_an_absent_input_is_no_array(build: Build, device: Any) -> None:
    session = build("g (float[N, 2] x, float high) => (float[N, 2] y) { y = Clip(x, , high) }", add=(device,))
    check(session, device, [np.minimum(X, 1)], x=X, high=np.array(1, np.float32))


def test_observers_get_the_devices_own_arrays(build: Build, device: Any, opaque: ModuleType) -> None:
    class Watch(BaseObserver):
        def __init__(self) -> None:
            self.steps: list[tuple[str, str]] = []

        def after_node(self, node: NodeInfo, inputs: Any, outputs: Any) -> None:
            self.steps.append((node.op, node.provider))
            assert all(hasattr(value, "shape") for value in (*inputs, *outputs))

    session = build("g (float[N, 2] x) => (float[N, 2] y) { a = Add(x, x)  y = Exp(a) }", add=(device,))
    recorder, watch = ValueRecorder(["a", "y", "x"]), Watch()
    session.observe(recorder, watch).run(None, {"x": X})
    assert type(recorder.values["a"]) is opaque.OpaqueArray
    assert isinstance(recorder.values["y"], np.ndarray)
    assert isinstance(recorder.values["x"], np.ndarray)
    assert watch.steps == [("Upload", "opaque"), ("Add", "opaque"), ("Download", "opaque"), ("Exp", "cpu")]


def test_the_device_alone(build: Build, device: Any) -> None:
    """Without any provider on the host shapes are computed wherever they can be, and what can't be is an error."""
    session = build(
        "g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { a = Add(x, w)  y = Relu(a) }", add=(device,), providers=["opaque"]
    )
    assert session.get_providers() == ["opaque"]
    check(session, device, [np.maximum(np.add(X, [1, 2]), 0)])
    session = build("g (float[N, 2] x) => (float[N, 2] y) { a = Add(x, x)  y = Exp(a) }", add=(device,), providers=["opaque"])
    with pytest.raises(KernelError, match=r"Exp.*Asked were: opaque"):
        session.run(None, {"x": X})


def test_a_device_kernel_that_fails_says_with_what(build: Build, device: Any) -> None:
    session = build("g (float[N, 2] x, float[M] b) => (float[K, 2] y) { a = Relu(x)  y = Add(a, b) }", add=(device,))
    with pytest.raises(RunError) as caught:
        session.run(None, {"x": X, "b": np.ones(3, np.float32)})
    assert "node 'Add_0' (Add) on opaque failed on (tensor(float)[2, 2], tensor(float)[3]): ValueError" in str(caught.value)


def test_a_device_array_as_a_feed_is_refused(build: Build, device: Any) -> None:
    from miniort.errors import InputError

    session = build("g (float[N, 2] x) => (float[N, 2] y) { y = Add(x, x) }", add=(device,))
    with pytest.raises(InputError, match="'x'"):
        session.run(None, {"x": device.wrap(X)})


def test_options_reach_the_provider(build: Build, device: Any) -> None:
    text = "g (float[N, 2] x) => (float[N, 2] y) { y = Add(x, x) }"
    assert build(text, add=(device,), providers=[("opaque", {"colour": 7}), "cpu"])
    with pytest.raises(ProviderError, match="'opaque' has no option 'taste'; its options: colour"):
        build(text, add=(device,), providers=[("opaque", {"taste": 7}), "cpu"])


def test_close_closes_every_provider(build: Build, device: Any) -> None:
    build("g (float[N, 2] x) => (float[N, 2] y) { y = Add(x, x) }", add=(device,)).close()
    assert device.closed == 1


def test_own_kernels_for_any_provider_get_host_arrays(build: Build, device: Any) -> None:
    from miniort.kernels import ANY_PROVIDER, Kernel

    kernel = Kernel(ANY_PROVIDER, "Triple", "test", 1, None, lambda node: lambda x: np.multiply(x, 3))
    session = build("g (float[N, 2] x) => (float[N, 2] y) { a = Relu(x)  b = test.Triple(a)  y = Neg(b) }", add=(device,), kernels=[kernel])
    assert places(session)["Triple_0"] == "cpu"
    check(session, device, [-3 * np.maximum(X, 0)])


def gpt2() -> tuple[Path, Any]:
    folder = Path(__file__).parents[2] / "data" / "fixtures" / "gpt2_optimum"
    return folder / "model.onnx", np.load(folder / "reference.npz")


def test_a_decoder_runs_with_the_device_in_front(device: Any, with_plugins: Callable[..., PluginManager]) -> None:
    path, _ = gpt2()
    store = WeightStore()
    cpu = InferenceSession(path, SessionOptions(strict=True), ["cpu"], plugins=with_plugins(), weights=store)
    session = InferenceSession(path, SessionOptions(strict=True), ["opaque", "cpu"], plugins=with_plugins(device), weights=store)
    counts = list(places(session).values())
    assert counts.count("opaque") > 60
    assert counts.count("cpu") > 10
    weights = len(device.uploads)
    rng = np.random.default_rng(0)
    for past, new in ((0, 5), (5, 1), (6, 3)):
        feeds: dict[str, Any] = {}
        for each in cpu.get_inputs():
            if each.name == "input_ids":
                feeds[each.name] = rng.integers(0, 100, (1, new))
            elif each.name == "attention_mask":
                feeds[each.name] = np.ones((1, past + new), np.int64)
            elif each.name == "position_ids":
                feeds[each.name] = np.arange(past, past + new)[None]
            else:
                heads, width = each.shape[1], each.shape[3]
                feeds[each.name] = rng.standard_normal((1, heads, past, width)).astype(np.float32)
        device.reset()
        expected, actual = cpu.run(None, feeds), session.run(None, feeds)
        for name, wanted, given in zip([each.name for each in cpu.get_outputs()], expected, actual, strict=True):
            np.testing.assert_allclose(given, wanted, rtol=1e-4, atol=1e-5, err_msg=name)
        told = [(copy.value, copy.source, copy.target) for copy in session.explain().copies]
        assert len(told) == len(set(told))
        assert len(device.uploads) == sum(target == "opaque:0" for _, _, target in told)
        assert len(device.downloads) == sum(target == "host" for _, _, target in told)
    again = InferenceSession(path, SessionOptions(strict=True), ["opaque", "cpu"], plugins=with_plugins(device), weights=store)
    device.reset()
    again.run(None, feeds)
    assert weights > 0
