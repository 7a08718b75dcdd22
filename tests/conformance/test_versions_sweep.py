"""Every op at every schema version on the CPU provider, against onnxruntime or onnx's reference evaluator."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.testing.operators import Disagreement, ProviderConformance, operators_without_builder

DISAGREEMENTS: list[Disagreement] = [
    *(
        Disagreement(
            "Attention",
            oracle,
            "mode 0 of its last output has the scores after the soft cap; by the attribute's text they're those before",
            lambda case, operator: (
                case.outputs == 4 and bool(case.attributes.get("softcap")) and not case.attributes.get("qk_matmul_output_mode")
            ),
        )
        for oracle in ("onnxruntime", "reference")
    ),
    Disagreement(
        "BatchNormalization",
        "reference",
        "running statistics have the type of the input; by the schema it's that of the statistics",
        lambda case, operator: case.outputs > 1 and case.inputs[0].dtype != case.inputs[3].dtype,
    ),
    Disagreement(
        "Bernoulli",
        "onnxruntime",
        "expands the schema's function for types that it has no kernel for; that gives 1 with probability 1 - p, against the op's text",
    ),
    Disagreement(
        "Det",
        "reference",
        "the output has NumPy's wider type; by the schema it's that of the input",
        lambda case, operator: case.inputs[0].dtype.itemsize == 2,
    ),
    Disagreement(
        "Constant",
        "reference",
        "gives the values of a sparse tensor in a structure of its own, not as a dense tensor",
        lambda case, operator: "sparse_value" in case.attributes,
    ),
    Disagreement(
        "Dropout",
        "onnxruntime",
        "the mask of version 10 is all false where nothing is dropped; it says what is kept, as the texts from version 12 on make plain",
        lambda case, operator: operator.version == 10 and case.outputs == 2,
    ),
    Disagreement(
        "Dropout",
        "reference",
        "the output of a training-mode Dropout has the type of its ratio; by the schema it's that of the data",
        lambda case, operator: case.shapes_only and case.inputs[0].dtype.kind == "V",
    ),
    Disagreement(
        "Gather",
        "onnxruntime",
        "loses strings where several of them are taken in a row",
        lambda case, operator: case.inputs[0].dtype == object,
    ),
    *(
        Disagreement(
            op,
            "reference",
            "knows only version 13, with one axis; earlier ones flatten all axes from that one on",
            lambda case, operator: operator.version < 13,
        )
        for op in ("Hardmax", "LogSoftmax", "Softmax")
    ),
    Disagreement(
        "LRN",
        "reference",
        "takes no more channels than there are rows in the batch",
        lambda case, operator: case.inputs[0].shape[0] < case.inputs[0].shape[1],
    ),
    Disagreement(
        "NonZero",
        "onnxruntime",
        "a scalar gives [1, count]; by the op's text it's [0, count]",
        lambda case, operator: case.inputs[0].ndim == 0,
    ),
    Disagreement(
        "ReduceSumSquare",
        "reference",
        "the output has NumPy's wider type of sums; by the schema it's that of the input",
        lambda case, operator: case.inputs[0].dtype in (np.int32, np.uint32),
    ),
]
"""Where the oracles differ, which one the specification's text contradicts, and why."""


def test_every_op_and_version_has_cases() -> None:
    assert [str(operator) for operator in operators_without_builder()] == []


class TestQuick(ProviderConformance):
    disagreements = DISAGREEMENTS


@pytest.mark.slow
class TestThorough(ProviderConformance):
    disagreements = DISAGREEMENTS
    examples = 50
