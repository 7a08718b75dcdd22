"""Models of one node of the domain ai.onnx.ml, run by miniort, onnxruntime and the reference evaluator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from miniort import InferenceSession
from miniort.types import dtype_to_onnx


@dataclass
class MLNode:
    """A model of one node of ai.onnx.ml."""

    model: onnx.ModelProto
    plugins: Any

    def feed(self, inputs: Any) -> dict[str, Any]:
        return {info.name: x for info, x in zip(self.model.graph.input, inputs, strict=True)}

    def __call__(self, *inputs: Any) -> list[Any]:
        """What miniort gives for inputs that nobody may write into."""
        arrays = [x.copy() for x in inputs]
        for x in arrays:
            x.flags.writeable = False
        return InferenceSession(self.model, providers=["cpu"], plugins=self.plugins).run(None, self.feed(arrays))

    def onnxruntime(self, *inputs: Any) -> list[Any]:
        """What onnxruntime gives on the CPU."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(self.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, self.feed(inputs))

    def reference(self, *inputs: Any) -> list[Any]:
        """What the ONNX project's reference evaluator gives."""
        with np.errstate(all="ignore"):
            return ReferenceEvaluator(self.model).run(None, self.feed(inputs))


@pytest.fixture(scope="session")
def ml(cpu_plugins: Any) -> Callable[..., MLNode]:
    """Makes a model of one node of ai.onnx.ml, from its inputs, or their types."""

    def make(op: str, version: int, inputs: Any, outputs: int = 1, **attributes: Any) -> MLNode:
        dtypes = [x.dtype if isinstance(x, np.ndarray) else np.dtype(x) for x in inputs]
        names = [f"x{i}" for i in range(len(dtypes))]
        given = {name: onnx.numpy_helper.from_array(x) if isinstance(x, np.ndarray) else x for name, x in attributes.items()}
        node = helper.make_node(op, names, [f"y{i}" for i in range(outputs)], domain="ai.onnx.ml", **given)
        infos = [helper.make_tensor_value_info(name, dtype_to_onnx(dtype), None) for name, dtype in zip(names, dtypes, strict=True)]
        graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(name) for name in node.output])
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", version)]
        return MLNode(onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=imports, ir_version=8)), cpu_plugins)

    return make
