"""The optimizers of ai.onnx.preview.training, against the specification's pseudo code and the reference evaluator."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from miniort import InferenceSession
from miniort.errors import KernelError

DOMAIN = "ai.onnx.preview.training"
STATES = {"Adagrad": 1, "Adam": 2, "Momentum": 1}
ATTRIBUTES = {
    "Adagrad": [{}, {"decay_factor": 0.1, "norm_coefficient": 0.01, "epsilon": 1e-3}],
    "Adam": [{}, {"alpha": 0.8, "beta": 0.9, "norm_coefficient": 0.01, "norm_coefficient_post": 0.2, "epsilon": 1e-3}],
    "Momentum": [{"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.01, "mode": mode} for mode in ("standard", "nesterov")],
}


def model_of(op, count, dtype, attributes):
    number = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    names = [f"x{i}" for i in range(count * (2 + STATES[op]))]
    outputs = [f"y{i}" for i in range(count * (1 + STATES[op]))]
    node = helper.make_node(op, ["r", "t", *names], outputs, domain=DOMAIN, **attributes)
    inputs = [helper.make_tensor_value_info(name, 7 if name == "t" else number, None) for name in ("r", "t", *names)]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info(name, number, None) for name in outputs])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8), names


@pytest.mark.parametrize("op", STATES)
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_against_the_reference(op, steps, cpu_plugins, same, sample):
    for attributes in ATTRIBUTES[op]:
        for dtype in (np.float32, np.float64):
            for shapes in (((3, 2),), ((), (4,)), ((2, 0), (1,))):
                model, names = model_of(op, len(shapes), dtype, attributes)
                values = [sample(dtype, shapes[i % len(shapes)], seed=i, low=0.1) for i in range(len(names))]
                feed = {"r": np.array(0.1, dtype), "t": np.array(steps), **dict(zip(names, values, strict=True))}
                got = InferenceSession(model, providers=["cpu"], plugins=cpu_plugins).run(None, feed)
                for one, two in zip(got, ReferenceEvaluator(model).run(None, feed), strict=True):
                    same(one, np.asarray(two, dtype), rtol=1e-5 if dtype == np.float32 else 1e-7)


def test_an_unknown_mode(cpu_plugins):
    model, _ = model_of("Momentum", 1, np.float32, ATTRIBUTES["Momentum"][0] | {"mode": "fast"})
    with pytest.raises(KernelError, match="standard or nesterov"):
        InferenceSession(model, providers=["cpu"], plugins=cpu_plugins)
