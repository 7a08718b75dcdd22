"""Every op at every schema version on the CPU provider, against onnxruntime or onnx's reference evaluator."""

from __future__ import annotations

import pytest

from miniort.testing import ProviderConformance
from miniort.testing.operators import operators_without_builder


def test_every_op_and_version_has_cases() -> None:
    assert [str(operator) for operator in operators_without_builder()] == []


class TestQuick(ProviderConformance):
    pass


@pytest.mark.slow
class TestThorough(ProviderConformance):
    examples = 12
