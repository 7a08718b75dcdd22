"""FlexAttention against the reference evaluator: types, shared key heads, and graphs at both places."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from miniort import InferenceSession

NUMBERS = {np.float32: 1, np.float16: 10, np.float64: 11, ml_dtypes.bfloat16: 16}


def graph_of(op, constant, number):
    kind = [helper.make_tensor_value_info(name, number, ["b", "h", "n", "t"]) for name in ("p", "q")]
    value = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", number, [], [constant]))
    return helper.make_graph([value, helper.make_node(op, ["p", "c"], ["q"])], "mod", kind[:1], kind[1:])


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("mods", [(), ("score_mod",), ("prob_mod",), ("score_mod", "prob_mod")])
def test_against_the_reference(dtype, mods, cpu_plugins, same, sample):
    inside = TensorProto.DOUBLE if dtype == np.float64 else TensorProto.FLOAT
    for heads, kv_heads, extra in ((2, 2, {}), (4, 2, {"scale": 0.3}), (3, 1, {"softmax_precision": inside})):
        attributes = {name: graph_of("Mul" if name == "prob_mod" else "Min", 0.7, inside) for name in mods} | extra
        shapes = {"q": (2, heads, 3, 4), "k": (2, kv_heads, 5, 4), "v": (2, kv_heads, 5, 6)}
        feed = {name: sample(dtype, shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
        # The reference evaluator rounds 16-bit floats after each step, so it's asked about their values in float32.
        wide = {name: x.astype(np.float64 if dtype == np.float64 else np.float32) for name, x in feed.items()}
        want = ReferenceEvaluator(model_of(wide, attributes)).run(None, wide)[0].astype(dtype)
        session = InferenceSession(model_of(feed, attributes), providers=["cpu"], plugins=cpu_plugins)
        same(session.run(None, feed)[0], want, atol=2e-5)


def model_of(feed, attributes):
    node = helper.make_node("FlexAttention", ["q", "k", "v"], ["y"], domain="ai.onnx.preview", **attributes)
    number = NUMBERS[feed["q"].dtype.type]
    inputs = [helper.make_tensor_value_info(name, number, x.shape) for name, x in feed.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", number, None)])
    imports = [helper.make_opsetid("", 26), helper.make_opsetid("ai.onnx.preview", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)
