"""Groups of elementwise ops made one node: which are, which aren't, and what the node says that it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import numpy_helper, parser

from miniort import InferenceSession, SessionOptions
from miniort.errors import ModelError
from miniort.graph.elementwise_body import FUSED_ELEMENTWISE, Body, Step, body_text, read_body
from miniort.graph.elementwise_fusion import FUSE_ELEMENTWISE, MOST_INPUTS, MOST_STEPS
from miniort.graph.inference import INFER_TYPES
from miniort.graph.passes import GraphPass, Level, PassContext, run_passes
from miniort.model.loading import load_model
from miniort.model.weights import WeightStore
from miniort.plugins import PluginManager, create_plugin_manager, hookimpl
from miniort.runtime.observers import Observer
from miniort.runtime.optimise import optimise_model

FUSED = f"miniort.{FUSED_ELEMENTWISE}"


def f(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(0.5, 2, shape).astype(np.float32)


def fused(plugins: PluginManager, text: str, opset: int = 24, constants: dict[str, np.ndarray] | None = None, **feeds: Any) -> Any:
    """A session over the graph at the highest level, which gives what it gives without optimisation."""
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (constants or {}).items())
    plain, session = (InferenceSession(proto, SessionOptions(level, strict=True), ["cpu"], plugins=plugins) for level in ("none", "all"))
    for wanted, found in zip(plain.run(None, feeds), session.run(None, feeds), strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(np.float64(found), np.float64(wanted), rtol=1e-5, atol=1e-6)
    return session


def ops(session: InferenceSession) -> list[str]:
    return [node.op for node in session.explain().nodes]


def bodies(session: InferenceSession) -> list[list[str]]:
    """The lines of the steps of each chain."""
    found = [node.attributes["body"].as_string() for node in session.model.graph if node.op_type == FUSED_ELEMENTWISE]
    return [[line.strip() for line in text.splitlines()[2:-1]] for text in found]


def test_a_chain_is_one_node_whose_body_is_onnx(chains: PluginManager) -> None:
    text = "g (float[2, n] a, float[n] b) => (float[2, n] y) { s = Add(a, b)  w = Swish<alpha = 1.5>(s)  y = Mul(w, a) }"
    session = fused(chains, text, a=f(2, 3), b=f(3))
    assert ops(session) == [FUSED]
    assert bodies(session) == [["t0 = Add (x0, x1)", "t1 = Swish <alpha: float = 1.5> (t0)", "y = Mul (t1, x0)"]]
    (change,) = [change for change in session.changes if change.graph_pass == "fuse-elementwise"]
    assert change.reason == "Add, Swish, Mul made FusedElementwise"
    assert "fuse-elementwise: Add, Swish, Mul made FusedElementwise (1)" in str(session.explain())


def test_one_op_stays_as_it_is(chains: PluginManager) -> None:
    assert ops(fused(chains, "g (float[2, 3] a) => (float[2, 3] y) { y = Tanh(a) }", a=f(2, 3))) == ["Tanh"]


def test_a_value_that_is_an_output_or_has_other_readers_ends_a_chain(chains: PluginManager) -> None:
    text = """g (float[2, 3] a, float[3, 2] m) => (float[2, 3] y, float[2, 3] e, float[2, 2] p) {
        n = Neg(a)  e = Exp(n)  s = Add(e, a)  t = Tanh(s)  p = MatMul(t, m)  y = Mul(t, s)
    }"""
    session = fused(chains, text, a=f(2, 3), m=f(3, 2))
    assert ops(session) == [FUSED, "Add", "Tanh", "MatMul", "Mul"]
    assert bodies(session) == [["t0 = Neg (x0)", "y = Exp (t0)"]]


def test_a_value_with_two_readers_in_the_group_is_taken_in(chains: PluginManager) -> None:
    text = "g (float[2, 3] a) => (float[2, 3] y) { e = Exp(a)  u = Neg(e)  v = Sqrt(e)  w = Mul(u, v)  y = Sub(w, e) }"
    assert ops(fused(chains, text, a=f(2, 3))) == [FUSED]


def test_no_path_may_leave_a_group_and_come_back(chains: PluginManager) -> None:
    text = """g (float[3, 3] a) => (float[3, 3] y) { e = Exp(a)  m = MatMul(e, a)  n = Neg(e)  s = Add(m, n)  y = Tanh(s) }"""
    session = fused(chains, text, a=f(3, 3))
    assert ops(session) == ["Exp", "MatMul", FUSED]
    assert bodies(session) == [["t0 = Neg (x1)", "t1 = Add (x0, t0)", "y = Tanh (t1)"]] or bodies(session) == [
        ["t0 = Neg (x0)", "t1 = Add (x1, t0)", "y = Tanh (t1)"]
    ]


@pytest.mark.parametrize(("shape", "together"), [("2, 3", True), ("1, 3", False), ("2, 1", False), ("n, 3", True), ("3", False)])
def test_what_is_repeated_in_the_result_is_computed_before(chains: PluginManager, shape: str, together: bool) -> None:
    text = f"g (float[{shape}] a, float[2, 3] b) => (float[2, 3] y) {{ e = Exp(a)  y = Add(e, b) }}"
    sizes = [int(size) for size in shape.replace("n", "2").split(",")]
    assert ops(fused(chains, text, a=f(*sizes), b=f(2, 3))) == ([FUSED] if together else ["Exp", "Add"])


def test_a_size_that_is_not_known_may_be_one_all_the_same(chains: PluginManager) -> None:
    text = "g (float[n, 3] a, float[m, 3] b, float[k, 2, 1] c) => (float[p, q, 3] y) { e = Exp(a)  s = Add(e, b)  y = Mul(s, c) }"
    session = fused(chains, text, a=f(1, 3), b=f(2, 3), c=f(4, 2, 1))
    assert ops(session) == [FUSED, "Mul"]
    for rows in ((2, 1), (2, 2)):
        feeds = {"a": f(rows[0], 3), "b": f(rows[1], 3), "c": f(1, 2, 1)}
        assert session.run(None, feeds)[0].shape == (1, 2, 3)


def test_numbers_are_part_of_the_body_and_other_constants_are_not(chains: PluginManager) -> None:
    constants = {
        "zero": np.array(0.0, np.float32),
        "minus_zero": np.array([-0.0], np.float32),
        "never": np.array(-np.inf, np.float32),
        "row": f(3),
        "high": np.array([[5.0]], np.float32),
    }
    text = """g (float[2, 3] a) => (float[2, 3] y) {
        b = Max(a, zero)  c = Div(b, minus_zero)  d = Max(c, never)  e = Add(d, row)  h = Min(e, high)  y = Add(h, zero)
    }"""
    session = fused(chains, text, constants=constants, a=f(2, 3))
    assert bodies(session) == [
        [
            "c0 = Constant <value: tensor = float {0.0}> ()",
            "t0 = Max (x0, c0)",
            "c1 = Constant <value: tensor = float {-0.0}> ()",
            "t1 = Div (t0, c1)",
            "t2 = Max (t1, x1)",
            "t3 = Add (t2, x2)",
            "t4 = Min (t3, x3)",
            "y = Add (t4, c0)",
        ]
    ]


def test_a_number_of_another_float_type_is_cast(chains: PluginManager) -> None:
    text = "g (float16[2, 3] a) => (float16[2, 3] y) { b = Mul(a, half)  c = Clip(b, , one)  y = Neg(c) }"
    constants = {"half": np.array(0.1, np.float16), "one": np.array(1, np.float16)}
    session = fused(chains, text, constants=constants, a=f(2, 3).astype(np.float16))
    assert bodies(session)[0][:3] == [
        "c0_wide = Constant <value: tensor = float {0.0999755859}> ()",
        "c0 = Cast <to: int = 10> (c0_wide)",
        "t0 = Mul (x0, c0)",
    ]
    assert bodies(session)[0][5] == "t1 = Clip (t0, , c1)"


def test_values_of_few_axes_may_be_shapes_and_stay(chains: PluginManager) -> None:
    text = (
        "g (float[3] a, float[2, n] b) => (float[3] y, int64[2] z) { e = Exp(a)  y = Neg(e)  s = Shape(b)  t = Add(s, s)  z = Mul(t, s) }"
    )
    assert FUSED not in ops(fused(chains, text, a=f(3), b=f(2, 3)))


def test_only_what_the_provider_takes_is_in_a_chain(chains: PluginManager) -> None:
    text = "g (float[2, 3] a) => (float[2, 3] y) { b = Neg(a)  c = Exp(b)  d = Ceil(c)  e = Sqrt(d)  y = Tanh(e) }"
    assert ops(fused(chains, text, a=f(2, 3))) == [FUSED, "Ceil", FUSED]


def test_bodies_of_control_flow_have_chains_of_their_own(chains: PluginManager) -> None:
    text = """g (bool c, float[2, 3] a) => (float[2, 3] y) {
        n = Neg(a)
        y = If (c) <
            then_branch = t () => (float[2, 3] p) { e = Exp(n)  p = Add(e, a) },
            else_branch = u () => (float[2, 3] q) { q = Tanh(n) }
        >
    }"""
    for flag in (True, False):
        assert ops(fused(chains, text, c=np.array(flag), a=f(2, 3))) == ["Neg", "If", FUSED, "Tanh"]


def test_a_chain_grows_no_further_than_its_bounds(chains: PluginManager) -> None:
    steps = "".join(f"v{i + 1} = Tanh(v{i})  " for i in range(MOST_STEPS + 5))
    session = fused(chains, f"g (float[2, 3] v0) => (float[2, 3] y) {{ {steps} y = Neg(v{MOST_STEPS + 5}) }}", v0=f(2, 3))
    assert [len(body) for body in bodies(session)] == [6, MOST_STEPS]
    names = [f"x{index}" for index in range(MOST_INPUTS + 4)]
    inputs = ", ".join(f"float[2, 3] {name}" for name in names)
    sums = "".join(f"s{i + 1} = Add({'x0' if i == 0 else f's{i}'}, {name})  " for i, name in enumerate(names[1:]))
    text = f"g ({inputs}) => (float[2, 3] y) {{ {sums} y = Neg(s{len(names) - 1}) }}"
    session = fused(chains, text, **{name: f(2, 3, seed=index) for index, name in enumerate(names)})
    assert [len(node.inputs) for node in session.model.graph] == [5, MOST_INPUTS]


def test_nothing_is_fused_for_a_provider_without_the_op() -> None:
    text = "g (float[2, 3] a) => (float[2, 3] y) { b = Neg(a)  y = Exp(b) }"
    alone = create_plugin_manager(allow=["cpu"], deny=[])
    assert ops(fused(alone, text, a=f(2, 3))) == ["Neg", "Exp"]
    model = load_model(parser.parse_model(f'<ir_version: 10, opset_import: ["": 24]> {text}'))
    context = PassContext(
        lambda *_: True, lambda *_: None, WeightStore(), model.opset_imports, provider_of=lambda node: node.domain or "another"
    )
    assert not run_passes(model, [INFER_TYPES, FUSE_ELEMENTWISE], Level.ALL, context)
    assert [node.op_type for node in model.graph] == ["Neg", "Exp"]


def test_the_level_extended_makes_no_chains(chains: PluginManager) -> None:
    proto = parser.parse_model('<ir_version: 10, opset_import: ["": 24]> g (float[2, 3] a) => (float[2, 3] y) { b = Neg(a)  y = Exp(b) }')
    assert ops(InferenceSession(proto, SessionOptions("extended"), ["cpu"], plugins=chains)) == ["Neg", "Exp"]


def test_passes_of_plugins_see_the_ops_that_are_fused_afterwards(with_chains: Callable[..., PluginManager]) -> None:
    seen: list[str] = []

    class Looks:
        @hookimpl
        def miniort_graph_passes(self) -> list[GraphPass]:
            return [GraphPass("looks", Level.ALL, lambda model, context: seen.extend(node.op_type for node in model.graph))]

    assert ops(fused(with_chains(Looks()), "g (float[2, 3] a) => (float[2, 3] y) { b = Neg(a)  y = Exp(b) }", a=f(2, 3))) == [FUSED]
    assert seen == ["Neg", "Exp"]


def test_the_result_keeps_its_name_and_its_size_is_known(chains: PluginManager) -> None:
    class Keeps(Observer):
        wants = ("h",)

        def __init__(self) -> None:
            self.values: dict[str, Any] = {}

        def on_value(self, name: str, value: Any) -> None:
            self.values[name] = value

    text = "g (float[n, 3] a, float[3, 3] m) => (float[n, 3] y) { e = Exp(a)  h = Neg(e)  y = MatMul(h, m) }"
    session = fused(chains, text, a=f(2, 3), m=f(3, 3))
    keeps = Keeps()
    session.observe(keeps).run(None, {"a": f(2, 3), "m": f(3, 3)})
    np.testing.assert_allclose(keeps.values["h"], -np.exp(f(2, 3)), rtol=1e-6)
    assert [(each.name, each.nbytes) for each in session.memory_plan({"n": 100}).lifetimes] == [("h", 1200), ("y", 1200)]


def test_a_model_with_chains_is_written_and_read_again(chains: PluginManager, tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 24]> g (float[n, 3] a) => (float[n, 3] y) { b = Neg(a)  y = Exp(b) }'
    optimised = optimise_model(parser.parse_model(text), "all", providers=["cpu"], plugins=chains)
    optimised.save(tmp_path / "model.onnx")
    session = InferenceSession(tmp_path / "model.onnx", providers=["cpu"], plugins=chains)
    assert ops(session) == [FUSED]
    np.testing.assert_allclose(session.run(None, {"a": f(2, 3)})[0], np.exp(-f(2, 3)), rtol=1e-6)


def test_nodes_of_two_opsets_are_not_mixed(with_chains: Callable[..., PluginManager]) -> None:
    def one_is_older(model: ir.Model, context: PassContext) -> None:
        next(node for node in model.graph if node.op_type == "Exp").version = 12

    class Ages:
        @hookimpl
        def miniort_graph_passes(self) -> list[GraphPass]:
            return [GraphPass("ages", Level.ALL, one_is_older)]

    text = "g (float[2, 3] a) => (float[2, 3] y) { b = Neg(a)  c = Exp(b)  d = Tanh(c)  y = Sqrt(d) }"
    assert ops(fused(with_chains(Ages()), text, a=f(2, 3))) == ["Neg", "Exp", FUSED]


def test_a_body_is_read_as_it_was_written() -> None:
    body = Body(
        ("x0", "x1"),
        (
            Step("Constant", 24, (), "c0", {"value": float(np.float32(1.00000012e-05))}),
            Step("Clip", 13, ("x0", "", "c0"), "t0"),
            Step("Gelu", 20, ("t0",), "t1", {"approximate": "tanh"}),
            Step("Cast", 24, ("t1",), "t2", {"to": 10}),
            Step("LeakyRelu", 16, ("t2",), "t3", {"alpha": float(np.float32(0.1))}),
            Step("Where", 16, ("x1", "t3", "t2"), "y"),
        ),
    )
    assert read_body(body_text(body, 24)) == body
    dtypes = body.dtypes([np.dtype(np.float32), np.dtype(np.bool_)])
    assert {name: str(dtype) for name, dtype in dtypes.items()} == {
        **{"x0": "float32", "x1": "bool", "c0": "float32", "t0": "float32", "t1": "float32"},
        **dict.fromkeys(("t2", "t3", "y"), "float16"),
    }


HEAD = '<domain: "miniort", opset_import: ["": 20]>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "can't be read"),
        ('<domain: "miniort"> body (x) => (y) { y = Neg(x) }', "must import an opset"),
        (f"{HEAD} body (x) => (t) {{ t = Neg(x)  y = Neg(t) }}", "give the one output of its last node"),
        (f"{HEAD} body (x) => (y) {{ y = Softmax(x) }}", "can't have the op Softmax of version 13"),
        (f"{HEAD} body (x) => (y) {{ y = Swish(x) }}", "can't have the op Swish of version 20"),
        (f"{HEAD} body (x) => (y) {{ y = Elu<alpha: floats = [1.0]>(x) }}", "can't have the attribute alpha"),
    ],
)
def test_what_is_no_body_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_body(text)
