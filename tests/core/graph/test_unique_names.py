"""Values that a pass called by one name get names of their own; what the model's user knows keeps its name."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnx import checker, parser

from miniort import WeightStore
from miniort.graph.passes import PassContext
from miniort.graph.unique_names import make_names_unique

TEXT = """<ir_version: 8, opset_import: ["": 18]> g (float[2] x, bool c) => (float[2] y) {
    a = Neg(x) b = Abs(a) d = If (c) <then_branch = t () => (float[2] e) { f = Exp(b) e = Neg(f) },
                                      else_branch = u () => (float[2] h) { i = Sin(b) h = Neg(i) }> y = Cos(d) }"""


@pytest.mark.parametrize("names", [("a", "b"), ("a", "f"), ("f", "i"), ("y", "a")])
def test_names(names: tuple[str, str]) -> None:
    model = ir.from_proto(parser.parse_model(TEXT))
    values = {value.name: value for node in ir.traversal.RecursiveGraphIterator(model.graph) for value in node.outputs}
    first, second = names
    values[second].name = first
    make_names_unique(model, PassContext(lambda *_: True, lambda *_: None, WeightStore(), {"": 18}))
    assert values["y"].name == "y"
    checker.check_model(ir.to_proto(model), full_check=True)
