"""The ONNX project's own test cases for single nodes, of every op that the provider has."""

from __future__ import annotations

import warnings

import onnx
import pytest
from onnx import TensorProto

from miniort import InferenceSession
from miniort.runtime.session import SessionOptions
from miniort_cpu.kernels import all_kernels

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the cases are computed by NumPy when they are loaded
    from onnx.backend.test.loader import load_model_tests

    CASES = {case.name: case for case in load_model_tests(kind="node") if case.model is not None}

TABLE = all_kernels()


def nodes_of(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes_of(attribute.g)


def is_covered(case):
    nodes = list(nodes_of(case.model.graph))
    return len(case.model.graph.node) == 1 and all(TABLE.find(node.domain, node.op_type) for node in nodes)


UNSPECIFIED = frozenset({"test_bernoulli", "test_bernoulli_double", "test_bernoulli_seed"})
"""Cases that want one random generator's draws, where the specification says that implementations may differ."""

COVERED = sorted(name for name, case in CASES.items() if is_covered(case) and name not in UNSPECIFIED)


def as_value(data):
    return onnx.numpy_helper.to_array(data) if isinstance(data, TensorProto) else data


def test_that_there_are_cases():
    assert len(COVERED) > 800


@pytest.mark.parametrize("name", COVERED)
def test_backend_node(name, cpu_plugins, same):
    case = CASES[name]
    session = InferenceSession(case.model, SessionOptions(graph_optimization_level="none"), ["cpu"], plugins=cpu_plugins)
    for inputs, outputs in case.data_sets:
        feed = {info.name: as_value(value) for info, value in zip(case.model.graph.input, inputs, strict=False)}
        for got, expected in zip(session.run(None, feed), outputs, strict=True):
            pairs = zip(got, expected, strict=True) if isinstance(expected, list) else [(got, expected)]
            for found, wanted in pairs:
                want = as_value(wanted)
                want = want.astype(object) if want.dtype.kind in "US" else want
                narrow = want.dtype.name == "bfloat16"  # two places, as the ONNX project's own runner allows
                same(found, want, rtol=max(case.rtol, 2**-6) if narrow else case.rtol, atol=case.atol)
