"""One-node models of every op and schema version, drawn at random, and what other runtimes give for them.

A *builder* draws a node of one op: its inputs, attributes and types, for whatever schema version it's asked for. `ProviderConformance`
runs each on a provider and compares with onnxruntime or onnx's reference evaluator.
"""

from miniort.testing.operators.cases import (
    Draws,
    NodeCase,
    Operator,
    build_case,
    builds,
    operator_versions,
    operators_of,
    operators_without_builder,
)
from miniort.testing.operators.conformance import NoOracleError, ProviderConformance, check_case
from miniort.testing.operators.disagreements import DISAGREEMENTS, Disagreement

__all__ = [
    "DISAGREEMENTS",
    "Disagreement",
    "Draws",
    "NoOracleError",
    "NodeCase",
    "Operator",
    "ProviderConformance",
    "build_case",
    "builds",
    "check_case",
    "operator_versions",
    "operators_of",
    "operators_without_builder",
]
