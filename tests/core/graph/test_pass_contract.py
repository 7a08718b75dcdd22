"""What a graph pass of a plugin may rely on, and what it may not do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

from miniort import InferenceSession, SessionOptions, create_plugin_manager
from miniort.errors import KernelError, ModelError, PluginError
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.plugins import PluginManager, hookimpl

TEXT = """<ir_version: 10, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { h = Neg(x)  y = Abs(h) }"""

Change = Callable[[ir.Model, PassContext], None]


class Passes:
    def __init__(self, passes: Sequence[GraphPass]) -> None:
        self._passes = list(passes)

    @hookimpl
    def miniort_graph_passes(self) -> list[GraphPass]:
        return self._passes


def plugins(*passes: GraphPass) -> PluginManager:
    manager = create_plugin_manager(allow=["cpu"], deny=[])
    manager.register(Passes(passes), name="test_passes")
    return manager


def build(*passes: GraphPass, level: str = "all") -> InferenceSession:
    return InferenceSession(parser.parse_model(TEXT), SessionOptions(graph_optimization_level=level), plugins=plugins(*passes))


def test_a_pass_may_change_the_graph_and_its_reasons_are_told() -> None:
    def negate_nothing(model: ir.Model, context: PassContext) -> None:
        for node in list(model.graph):
            if node.op_type == "Neg":
                node.outputs[0].replace_all_uses_with(node.inputs[0])
                model.graph.remove(node, safe=True)
                context.changed(node, "Abs doesn't see the sign")

    session = build(GraphPass("drop-neg", Level.EXTENDED, negate_nothing))
    assert [node.op for node in session.explain().nodes] == ["Abs"]
    assert ("drop-neg", "Neg_0", "Abs doesn't see the sign") in [
        (change.graph_pass, change.node, change.reason) for change in session.explain().changes
    ]
    assert "drop-neg: Abs doesn't see the sign (1)" in str(session.explain())
    assert session.run(None, {"x": np.array([-1, 2], np.float32)})[0].tolist() == [1, 2]


def test_levels_and_order() -> None:
    """By level, then priority (higher first), then name; a level above the session's isn't run."""
    ran: list[str] = []

    def note(name: str) -> Change:
        return lambda model, context: ran.append(name)

    passes = [
        GraphPass("e-late", Level.EXTENDED, note("e-late"), priority=-1),
        GraphPass("e-b", Level.EXTENDED, note("e-b")),
        GraphPass("e-a", Level.EXTENDED, note("e-a")),
        GraphPass("e-first", Level.EXTENDED, note("e-first"), priority=9),
        GraphPass("basic", Level.BASIC, note("basic"), priority=-5),
        GraphPass("required", Level.REQUIRED, note("required"), priority=-9),
    ]
    expected = ["required", "basic", "e-first", "e-a", "e-b", "e-late"]
    for level, count in (("none", 1), ("basic", 2), ("extended", 6), ("all", 6)):
        for order in (passes, passes[::-1]):
            ran.clear()
            build(*order, level=level)
            assert ran == expected[:count], level


def test_an_unknown_level() -> None:
    with pytest.raises(ModelError, match=r"one of none, basic, extended, all; found 'O3'"):
        build(level="O3")


def rename_output(model: ir.Model, context: PassContext) -> None:
    model.graph.outputs[0].name = "z"


def drop_output(model: ir.Model, context: PassContext) -> None:
    model.graph.outputs.clear()


def add_input(model: ir.Model, context: PassContext) -> None:
    model.graph.inputs.append(ir.Value(name="more", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1])))


def change_type(model: ir.Model, context: PassContext) -> None:
    model.graph.outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)


@pytest.mark.parametrize("change", [rename_output, drop_output, add_input, change_type])
def test_a_pass_that_changes_the_signature_is_named(change: Change) -> None:
    with pytest.raises(ModelError, match="graph pass 'guilty' changed the graph's inputs or outputs"):
        build(GraphPass("innocent", Level.BASIC, lambda model, context: None), GraphPass("guilty", Level.EXTENDED, change))


def test_a_pass_that_raises_is_named() -> None:
    def fail(model: ir.Model, context: PassContext) -> None:
        raise LookupError("no pattern")

    with pytest.raises(ModelError, match="graph pass 'guilty' failed: LookupError: no pattern; a lower graph_optimization_level"):
        build(GraphPass("guilty", Level.EXTENDED, fail))
    assert build(GraphPass("guilty", Level.EXTENDED, fail), level="basic")


def test_two_passes_of_one_name() -> None:
    manager = plugins(GraphPass("same", Level.BASIC, lambda model, context: None))
    manager.register(Passes([GraphPass("same", Level.BASIC, lambda model, context: None)]), name="other")
    with pytest.raises(PluginError, match="both offer 'same'"):
        InferenceSession(parser.parse_model(TEXT), plugins=manager)


def test_a_pass_asks_whether_a_provider_has_an_op() -> None:
    f32 = np.dtype(np.float32)
    answers: list[bool] = []

    def ask(model: ir.Model, context: PassContext) -> None:
        answers.extend(
            [
                context.supports("Add", "", 14, [f32, f32]),
                context.supports("Add", "", 14, [None, None]),
                context.supports("Add", "", 14, []),
                context.supports("Add", "elsewhere", 1, [f32, f32]),
                context.supports("NoSuchOp", "", 18, [f32]),
                context.supports("Add", "", 999, [f32, f32]),
            ]
        )

    build(GraphPass("ask", Level.BASIC, ask))
    assert answers == [True, True, True, False, False, False]


def test_types_are_inferred_for_what_a_pass_made() -> None:
    def through_double(model: ir.Model, context: PassContext) -> None:
        (neg, absolute) = list(model.graph)
        up = ir.node("Cast", [neg.outputs[0]], {"to": int(ir.DataType.DOUBLE)})
        down = ir.node("Cast", [up.outputs[0]], {"to": int(ir.DataType.FLOAT)})
        model.graph.insert_before(absolute, [up, down])
        absolute.replace_input_with(0, down.outputs[0])
        context.changed(neg, "because")

    seen = [node.name for node in build(GraphPass("cast", Level.BASIC, through_double)).explain().nodes]
    assert len(seen) == 4
    session = build(GraphPass("cast", Level.BASIC, through_double))
    assert session.run(None, {"x": np.array([-1, 2], np.float32)})[0].tolist() == [1, 2]


def test_a_pass_may_make_ops_that_nobody_has_at_its_own_risk() -> None:
    def exotic(model: ir.Model, context: PassContext) -> None:
        next(iter(model.graph)).op_type = "Exotic"

    with pytest.raises(KernelError, match="Exotic"):
        InferenceSession(parser.parse_model(TEXT), SessionOptions(strict=True), plugins=plugins(GraphPass("exotic", Level.BASIC, exotic)))
