"""What tests of passes share: both forms of a graph are run and what is left of it is told; a provider that computes chains of ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from onnx import helper, parser
from onnx.reference import ReferenceEvaluator

from miniort import InferenceSession, SessionOptions, create_plugin_manager, hookimpl
from miniort.graph.elementwise_body import DOMAIN, FUSED_ELEMENTWISE
from miniort.kernels import Kernel, NodeContext, NodeView, Run
from miniort.plugins import PluginManager
from miniort.types import dtype_to_onnx

Raise: TypeAlias = Callable[..., list[str]]


@pytest.fixture(scope="session")
def raised() -> Raise:
    """f(text of a graph, opset=…, tolerance=…, **feeds): the ops of the optimised graph, which gives what the unoptimised one gives."""

    def run(text: str, opset: int = 18, tolerance: float = 1e-5, **feeds: Any) -> list[str]:
        proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')
        plain, optimised = (InferenceSession(proto, SessionOptions(level, strict=True)) for level in ("none", "all"))
        assert optimised.get_outputs() == plain.get_outputs()
        assert optimised.get_inputs() == plain.get_inputs()
        names = [output.name for output in proto.graph.output]
        for name, wanted, actual in zip(names, plain.run(None, feeds), optimised.run(None, feeds), strict=True):
            assert actual.dtype == wanted.dtype
            assert actual.shape == wanted.shape
            np.testing.assert_allclose(np.float64(actual), np.float64(wanted), rtol=tolerance, atol=tolerance, err_msg=name)
        return [node.op for node in optimised.explain().nodes]

    return run


class Chains:
    """A plugin by which the provider `cpu` computes `FusedElementwise`, with ONNX's reference evaluator, but for chains with a Ceil."""

    @hookimpl
    def miniort_kernels(self, provider: str) -> list[Kernel]:
        def compile_chain(node: NodeContext) -> Run:
            function = parser.parse_function(node.attribute("body"))
            given = zip(function.input, node.inputs, strict=True)
            infos = [helper.make_tensor_value_info(name, dtype_to_onnx(x.dtype), None) for name, x in given if x is not None and x.dtype]
            graph = helper.make_graph(function.node, "chain", infos, [helper.make_empty_tensor_value_info(function.output[0])])
            evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=function.opset_import))
            return lambda *inputs: evaluator.run(None, dict(zip(function.input, inputs, strict=True)))[0]

        def refuse(node: NodeView) -> str | None:
            return "no Ceil" if "Ceil" in node.attribute("body") else None

        if provider != "cpu":
            return []
        return [Kernel("cpu", FUSED_ELEMENTWISE, DOMAIN, 1, 1, compile_chain, refuse=refuse)]


@pytest.fixture(scope="session")
def with_chains() -> Callable[..., PluginManager]:
    """f(plugin, …): the provider `cpu`, which takes chains as well, and these plugins."""

    def make(*plugins: object) -> PluginManager:
        manager = create_plugin_manager(allow=["cpu"], deny=[])
        for plugin in (Chains(), *plugins):
            manager.register(plugin)
        return manager

    return make


@pytest.fixture(scope="session")
def chains(with_chains: Callable[..., PluginManager]) -> PluginManager:
    """The provider `cpu`, which takes chains as well."""
    return with_chains()
