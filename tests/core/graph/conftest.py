"""What tests of raising share: both forms of a graph are run, and what is left of it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from onnx import parser

from miniort import InferenceSession, SessionOptions

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
