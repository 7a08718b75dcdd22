"""Every op at every schema version on the CPU provider, against onnxruntime or onnx's reference evaluator."""

from __future__ import annotations

import pytest

from miniort.testing.operators import Disagreement, ProviderConformance, operators_without_builder

DISAGREEMENTS: list[Disagreement] = []
"""Where the oracles differ, which one the specification's text contradicts, and why."""


def test_every_op_and_version_has_cases() -> None:
    assert [str(operator) for operator in operators_without_builder()] == []


class TestQuick(ProviderConformance):
    disagreements = DISAGREEMENTS


@pytest.mark.slow
class TestThorough(ProviderConformance):
    disagreements = DISAGREEMENTS
    examples = 50
