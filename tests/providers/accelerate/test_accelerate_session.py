"""A session with the provider on the stand-in before the CPU's: what each gets, and what `explain()` says of it."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import miniort_cpu.plugin
from miniort import InferenceSession, SessionOptions, create_plugin_manager, hookimpl
from miniort.providers import Availability, ProviderInfo
from miniort_accelerate.library import Accelerate
from miniort_accelerate.provider import AccelerateProvider


class OnTheStandIn:
    """A plugin whose provider `accelerate` calls the stand-in."""

    def __init__(self, library: Accelerate) -> None:
        self.library = library

    @hookimpl
    def miniort_providers(self) -> list[ProviderInfo]:
        return [ProviderInfo("accelerate", 200, lambda: Availability(True, "stand-in"), lambda _: AccelerateProvider(self.library))]


def test_what_a_routine_does_not_take_goes_to_the_cpu_with_the_reason(accelerate: Accelerate) -> None:
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["product"], name="multiply"),
        helper.make_node("Add", ["product", "row"], ["shifted"], name="add_row"),
        helper.make_node("Mul", ["shifted", "shifted"], ["squared"], name="square"),
        helper.make_node("Sigmoid", ["squared"], ["y"], name="squash"),
    ]
    shapes: dict[str, list[int | str]] = {"a": ["n", 4], "b": [4, 5], "row": [5]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    manager = create_plugin_manager(points=[])
    manager.register(OnTheStandIn(accelerate))
    manager.register(miniort_cpu.plugin)
    session = InferenceSession(model, SessionOptions("none"), providers=["accelerate", "cpu"], plugins=manager)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal([3 if size == "n" else size for size in shape]).astype(np.float32) for name, shape in shapes.items()}
    (found,) = session.run(None, feeds)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    explanation = session.explain()
    assert {node.name: node.provider for node in explanation.nodes} == {
        "multiply": "accelerate",
        "add_row": "cpu",
        "square": "accelerate",
        "squash": "accelerate",
    }
    assert "accelerate: its kernel takes operands of one known shape, the node has [n, 5] and [5]" in str(explanation)
    assert not explanation.copies
