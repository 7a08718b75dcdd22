"""One-node models, run by the CPU provider through a session, and what other runtimes give for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import miniort_cpu.plugin
from miniort import InferenceSession
from miniort.plugins import create_plugin_manager
from miniort.runtime.session import SessionOptions
from miniort.types import dtype_to_onnx, dtypes_from_type_strings

TOLERANCE = {np.dtype(np.float16): 2e-3, np.dtype(ml_dtypes.bfloat16): 2**-6, np.dtype(np.float64): 1e-12}
UNOPTIMIZED = SessionOptions(graph_optimization_level="none")


def assert_same(got: Any, want: Any, rtol: float | None = None, atol: float = 1e-6) -> None:
    """Same shape and type, and values that are equal, floats up to a rounding error."""
    assert isinstance(got, np.ndarray), f"found {type(got).__name__}, not an array"
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if got.dtype.kind == "O":
        assert got.tolist() == want.tolist()
    elif got.dtype.kind in "fV":
        wide = np.float64 if got.dtype == np.float64 else np.float32
        rtol = TOLERANCE.get(got.dtype, 2e-6) if rtol is None else rtol
        np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=rtol, atol=atol)
    else:
        np.testing.assert_array_equal(got, want)


@dataclass
class OneNode:
    """A model of one node, of which no input's or output's shape is known."""

    op: str
    opset: int
    types: Sequence[Any]
    plugins: Any
    outputs: int = 1
    constants: dict[int, np.ndarray] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = ""

    def __post_init__(self) -> None:
        names = [f"x{i}" if dtype is not None else "" for i, dtype in enumerate(self.types)]
        while names and not names[-1]:
            names.pop()
        self.names = names
        outputs = [f"y{i}" for i in range(self.outputs)]
        attributes = {
            name: onnx.numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value for name, value in self.attributes.items()
        }
        graph = helper.make_graph(
            [helper.make_node(self.op, names, outputs, domain=self.domain, **attributes)],
            "one_node",
            [
                helper.make_tensor_value_info(name, dtype_to_onnx(np.dtype(dtype)), None)
                for i, (name, dtype) in enumerate(zip(names, self.types, strict=False))
                if name and i not in self.constants
            ],
            [onnx.helper.make_empty_tensor_value_info(name) for name in outputs],
            [onnx.numpy_helper.from_array(array, f"x{i}") for i, array in self.constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        self.model = onnx.shape_inference.infer_shapes(model)
        for output in self.model.graph.output:
            output.type.tensor_type.ClearField("shape")

    @cached_property
    def session(self) -> InferenceSession:
        """The model's session, built when it's first needed."""
        return InferenceSession(self.model, UNOPTIMIZED, ["cpu"], plugins=self.plugins)

    def _feed(self, inputs: Sequence[Any]) -> dict[str, Any]:
        return {name: x for i, (name, x) in enumerate(zip(self.names, inputs, strict=False)) if name and i not in self.constants}

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run it with inputs that nobody may write into; what comes out must be arrays."""
        arrays = [x.copy() if isinstance(x, np.ndarray) else x for x in inputs]
        for x in arrays:
            if isinstance(x, np.ndarray):
                x.flags.writeable = False
        return self.session.run(None, self._feed(arrays))

    def reference(self, *inputs: Any) -> list[Any]:
        """What the ONNX project's reference evaluator gives, in arrays of miniort's kinds."""
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(self.model).run(None, self._feed(inputs))
        return [self._text(np.asarray(x)) for x in results]

    def onnxruntime(self, *inputs: Any) -> list[Any]:
        """What onnxruntime gives on the CPU."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(self.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return [np.asarray(x) for x in session.run(None, self._feed(inputs))]

    @staticmethod
    def _text(x: np.ndarray) -> np.ndarray:
        return x.astype(object) if x.dtype.kind in "US" else x


@pytest.fixture(scope="session")
def cpu_plugins() -> Any:
    """A plugin manager that knows the CPU provider and nothing else."""
    manager = create_plugin_manager(points=[])
    manager.register(miniort_cpu.plugin, "cpu")
    return manager


@pytest.fixture(scope="session")
def node(cpu_plugins: Any) -> Callable[..., OneNode]:
    """Makes a model of one node, from inputs or their types (None for an absent one)."""

    def make(op: str, opset: int, types: Sequence[Any], outputs: int = 1, constants: Any = None, **attributes: Any) -> OneNode:
        dtypes = [x.dtype if isinstance(x, np.ndarray) else x for x in types]
        return OneNode(op, opset, dtypes, cpu_plugins, outputs, constants or {}, attributes)

    return make


@pytest.fixture(scope="session")
def same() -> Callable[..., None]:
    """`assert_same`."""
    return assert_same


@pytest.fixture(scope="session")
def versions() -> Callable[..., list[Any]]:
    """Finds the schemas of an op, from the one that an opset implies."""

    def find(op: str, opset: int = 7) -> list[Any]:
        schemas = [each for each in onnx.defs.get_all_schemas_with_history() if each.name == op and each.domain == ""]
        schemas.sort(key=lambda each: each.since_version)
        first = max(each.since_version for each in schemas if each.since_version <= opset or each is schemas[0])
        return [each for each in schemas if each.since_version >= first]

    return find


@pytest.fixture(scope="session")
def sample() -> Callable[..., np.ndarray]:
    """Makes small numbers, or words, of a type."""

    def make(dtype: Any, shape: Sequence[int], seed: int = 0, low: float = -4, high: float = 5) -> np.ndarray:
        dtype = np.dtype(dtype)
        generator = np.random.default_rng(seed)
        if dtype == np.dtype(object):
            return np.array(generator.choice(["a", "bb", "", "ä"], shape), object).reshape(shape)
        if dtype.kind == "b":
            return generator.random(shape) < 0.5
        if dtype.kind in "u" or "uint" in dtype.name or "e8m0" in dtype.name:
            low, high = (1, 3) if dtype.itemsize == 1 and dtype.kind == "V" else (max(low, 0), high)
        if dtype.kind in "iu" or "int" in dtype.name:
            low, high = (max(low, -2), min(high, 2)) if dtype.kind == "V" and "uint" not in dtype.name else (low, high)
            return generator.integers(int(low), int(high), shape).astype(dtype)
        return np.asarray(generator.uniform(low, high, shape)).astype(dtype)

    return make


@pytest.fixture(scope="session")
def types_of() -> Callable[..., list[Any]]:
    """Finds the element types that a schema allows for a type parameter and that miniort knows, but for complex ones."""

    def find(schema: Any, parameter: str) -> list[Any]:
        constraint = next(each for each in schema.type_constraints if each.type_param_str == parameter)
        known = dtypes_from_type_strings(frozenset(constraint.allowed_type_strs))
        return sorted((dtype for dtype in known if dtype.kind != "c"), key=str)

    return find
