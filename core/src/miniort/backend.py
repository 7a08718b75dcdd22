"""miniort as an ONNX backend: what `onnx.backend` asks of a runtime, so that the ONNX project's own tests run on it.

    onnx.backend.test.BackendTest(miniort.backend, __name__)

The module itself is the backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import BackendRep, namedtupledict

from miniort.errors import MiniortError, ProviderError
from miniort.plugins import create_plugin_manager
from miniort.providers import check_provider, list_providers
from miniort.runtime.session import InferenceSession, SessionOptions
from miniort.types import dtype_to_onnx

_PROVIDER_OF_DEVICE = {"CPU": "cpu", "CUDA": "cuda"}


class MiniortBackendRep(BackendRep):
    """A model that was prepared: runs a session."""

    def __init__(self, session: InferenceSession) -> None:
        self.session = session

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """All outputs, in order. `inputs` is a list in the graph's order, a mapping by name, or the value of the only input."""
        names = [each.name for each in self.session.get_inputs()]
        feed = inputs if isinstance(inputs, Mapping) else dict(zip(names, _as_list(inputs, len(names)), strict=False))
        return tuple(self.session.run(None, feed))


def _as_list(inputs: Any, count: int) -> list[Any]:
    return [inputs] if isinstance(inputs, np.ndarray) and count == 1 else list(inputs)


def _providers(device: str) -> list[str]:
    """The providers for a device as onnx writes it, `CPU` or `CUDA:1`: its own, then the CPU for what that lacks."""
    kind, _, index = device.partition(":")
    if kind not in _PROVIDER_OF_DEVICE:
        raise ProviderError(f"device {device!r} is unknown; there is: {', '.join(_PROVIDER_OF_DEVICE)}")
    if index not in ("", "0"):
        raise ProviderError(f"device {device!r}: only the first device of a kind can be named here")
    return list(dict.fromkeys([_PROVIDER_OF_DEVICE[kind], "cpu"]))


def prepare(model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> MiniortBackendRep:
    """A session over the model, that refuses it at once if some node has no kernel."""
    return MiniortBackendRep(InferenceSession(model, SessionOptions(strict=True), _providers(device)))


def run_model(model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
    """All outputs of one run of a model."""
    return prepare(model, device, **kwargs).run(inputs)


def run_node(
    node: onnx.NodeProto,
    inputs: Sequence[Any],
    device: str = "CPU",
    outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """All outputs of one run of a node, by name and by position. `opset_version` among the keywords: the newest by default."""
    arrays = [np.asarray(each) for each in inputs]
    names = [name for name in node.input if name]
    graph_inputs = [
        helper.make_tensor_value_info(name, dtype_to_onnx(array.dtype), array.shape) for name, array in zip(names, arrays, strict=True)
    ]
    graph_outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    if outputs_info is not None:
        graph_outputs = [
            helper.make_tensor_value_info(name, dtype_to_onnx(np.dtype(dtype)), shape)
            for name, (dtype, shape) in zip([name for name in node.output if name], outputs_info, strict=True)
        ]
    opset = kwargs.get("opset_version", onnx.defs.onnx_opset_version() if node.domain in ("", "ai.onnx") else 1)
    graph = helper.make_graph([node], "node", graph_inputs, graph_outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(node.domain, opset)])
    results = run_model(model, dict(zip(names, arrays, strict=True)), device)
    return namedtupledict("Outputs", [name for name in node.output if name])(*results)


def is_compatible(model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
    """Whether a session over the model can be built on the device, with a kernel for every node."""
    try:
        prepare(model, device)
    except MiniortError:
        return False
    return True


def supports_device(device: str) -> bool:
    """Whether the providers for a device are installed and can be used here."""
    try:
        wanted = _providers(device)
    except ProviderError:
        return False
    known = list_providers(create_plugin_manager())
    return all(name in known and check_provider(known[name]).ok for name in wanted)
