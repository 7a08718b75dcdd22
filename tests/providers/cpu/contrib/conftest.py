"""Models of one node of com.microsoft, run by the CPU provider and by onnxruntime, whose documentation says what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from miniort import InferenceSession
from miniort.runtime.session import SessionOptions
from miniort.types import dtype_to_onnx

UNOPTIMIZED = SessionOptions(graph_optimization_level="none")


@dataclass
class ContribNode:
    """One node; inputs are given as arrays or None, and `constants` says which of them are initializers.

    `outputs` is their count, or a type for each, None for one that isn't wanted.
    """

    op: str
    inputs: Sequence[np.ndarray | None]
    plugins: Any
    outputs: Sequence[Any] | int = 1
    constants: Sequence[int] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = "com.microsoft"

    def __post_init__(self) -> None:
        names = ["" if x is None else f"x{i}" for i, x in enumerate(self.inputs)]
        types = [None] * self.outputs if isinstance(self.outputs, int) else list(self.outputs)
        untyped = isinstance(self.outputs, int)
        outputs = [f"y{i}" if untyped or dtype is not None else "" for i, dtype in enumerate(types)]
        given = {name: x for name, x in zip(names, self.inputs, strict=True) if x is not None}
        constant = {f"x{i}" for i in self.constants}
        self.feed = {name: x for name, x in given.items() if name not in constant}
        graph = helper.make_graph(
            [helper.make_node(self.op, names, outputs, domain=self.domain, **self.attributes)],
            "contrib",
            [helper.make_tensor_value_info(name, dtype_to_onnx(x.dtype), x.shape) for name, x in self.feed.items()],
            [
                helper.make_empty_tensor_value_info(name)
                if untyped
                else helper.make_tensor_value_info(name, dtype_to_onnx(np.dtype(dtype)), None)
                for name, dtype in zip(outputs, types, strict=True)
                if name
            ],
            [onnx.numpy_helper.from_array(given[name], name) for name in sorted(constant)],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        self.model = helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def run(self) -> list[Any]:
        """What miniort gives; the inputs can't be written into."""
        session = InferenceSession(self.model, UNOPTIMIZED, ["cpu"], plugins=self.plugins)
        feed = {name: x.copy() for name, x in self.feed.items()}
        for x in feed.values():
            x.flags.writeable = False
        return session.run(None, feed)

    def onnxruntime(self) -> list[Any]:
        """What onnxruntime gives on the CPU, its graph left as it is, in one thread: with more, DynamicQuantizeLSTM rounds by thread."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(self.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, self.feed)


@pytest.fixture(scope="session")
def contrib(cpu_plugins: Any) -> Callable[..., ContribNode]:
    """A maker of models: (op, inputs, outputs=1, constants=(), domain="com.microsoft", **attributes) -> one node."""

    def make(op: str, inputs: Any, outputs: Any = 1, constants: Any = (), domain: str = "com.microsoft", **attributes: Any) -> ContribNode:
        return ContribNode(op, inputs, cpu_plugins, outputs, constants, attributes, domain)

    return make


@pytest.fixture(scope="session")
def agree(contrib: Any) -> Callable[..., list[Any]]:
    """As `contrib`, and then: what miniort gives, after it was found to be what onnxruntime gives, up to `tolerance`."""

    def check(op: str, inputs: Any, *args: Any, tolerance: float = 1e-5, **attributes: Any) -> list[Any]:
        made = contrib(op, inputs, *args, **attributes)
        got, want = made.run(), made.onnxruntime()
        for found, wanted in zip(got, want, strict=True):
            assert isinstance(found, np.ndarray)
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            if found.dtype.kind in "fV":
                np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=tolerance, atol=tolerance)
            elif tolerance >= 1 and found.dtype.kind in "iu":
                assert np.abs(found.astype(np.int64) - wanted.astype(np.int64)).max(initial=0) <= tolerance
            else:
                np.testing.assert_array_equal(found, wanted)
        return got

    return check
