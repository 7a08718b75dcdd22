"""Writing an ONNX graph down: nodes in the order in which they run, values known by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx import TensorProto, helper, numpy_helper

from miniort.types import Array

MICROSOFT = "com.microsoft"


class GraphWriter:
    """A graph while it is written. `opset` is the version of the standard operators that it may use."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._known: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._written: set[str] = set()

    def input(self, name: str, dtype: DTypeLike, shape: Sequence[str | int]) -> str:
        """Declare a graph input; an axis that is known by name may have any length."""
        self._inputs.append(_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: DTypeLike, shape: Sequence[str | int]) -> None:
        """Declare that a value, written now or later, is a graph output."""
        self._outputs.append(_value_info(name, dtype, shape))

    def shape(self, name: str, dtype: DTypeLike, shape: Sequence[str | int]) -> None:
        """Declare the type and shape of a value that comes out of an operator whose results nobody can infer."""
        self._known.append(_value_info(name, dtype, shape))

    def add(self, op: str, *inputs: str, to: str | Sequence[str], domain: str = "", **attributes: Any) -> str:
        """Append a node that writes to the value, or values, named `to`; returns the name of the first. An input "" is left out."""
        outputs = [to] if isinstance(to, str) else list(to)
        self._nodes.append(helper.make_node(op, inputs, outputs, name=f"{outputs[0]}/{op}", domain=domain, **attributes))
        self._written.update(outputs)
        return outputs[0]

    def cast(self, x: str, dtype: DTypeLike, to: str) -> str:
        """Append a Cast, whose attribute for the type happens to be called `to` as well; nothing where `to` is written already."""
        if to not in self._written:
            data_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            self._nodes.append(helper.make_node("Cast", [x], [to], name=f"{to}/Cast", to=data_type))
            self._written.add(to)
        return to

    def is_written(self, name: str) -> bool:
        """Whether a node writes to a value of this name."""
        return name in self._written

    def integer(self, value: int) -> str:
        """A constant int64, as a scalar."""
        return self.constant(f"{value}", np.array(value, np.int64))

    def integers(self, values: Sequence[int]) -> str:
        """Constant int64s: [N]."""
        return self.constant(f"{list(values)}", np.array(values, np.int64))

    def number(self, value: float) -> str:
        """A constant float32, as a scalar."""
        return self.constant(f"{value!r}f", np.array(value, np.float32))

    def constant(self, name: str, value: Array) -> str:
        """A constant that is kept in the graph itself; one name stands for one value."""
        self._initializers[name] = numpy_helper.from_array(value, name)
        return name

    def stored(self, tensor: TensorProto) -> str:
        """A constant that is kept in a file: `tensor` says where."""
        self._initializers[tensor.name] = tensor
        return tensor.name

    def model(self, name: str) -> onnx.ModelProto:
        """The graph as a model that is valid for the opset, in the oldest file format that has it."""
        opsets = [helper.make_opsetid("", self.opset)]
        if any(node.domain == MICROSOFT for node in self._nodes):
            opsets.append(helper.make_opsetid(MICROSOFT, 1))
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, list(self._initializers.values()), value_info=self._known)
        ir_version = helper.find_min_ir_version_for(opsets, ignore_unknown=True)
        return helper.make_model(graph, ir_version=ir_version, opset_imports=opsets, producer_name="miniort")


def _value_info(name: str, dtype: DTypeLike, shape: Sequence[str | int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
