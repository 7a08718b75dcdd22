"""The ONNX project's own backend tests, and the page that says what doesn't pass."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from onnx.backend.test.loader import load_model_tests

import miniort.backend

ROOT = Path(__file__).parents[2]


ROUNDED = {"test_squeezenet"}
"""Tests that pass or not by the processor: this one's weights are made up and its logits 7.6e9, all equal if BLAS rounds each alike, and
one that's a last digit (512) above the rest takes all of the probability."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/backend_conformance.py, which made the page."""
    spec = importlib.util.spec_from_file_location("backend_conformance", ROOT / "tools" / "backend_conformance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["backend_conformance"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_backend_suite(tool: ModuleType) -> None:
    outcome = tool.run_suite(miniort.backend)
    passed, failed = set(outcome.passed) | ROUNDED, {name: error for name, error in outcome.failed.items() if name not in ROUNDED}
    unexplained = {name: error for name, error in failed.items() if tool.reason_for(name) is None}
    assert unexplained == {}
    assert len(passed) >= 2024
    page = (ROOT / "docs" / "conformance.md").read_text()
    assert set(re.findall(r"^\| `(test_\w+)` \|", page, re.M)) == set(failed)
    assert f"| {len(passed):,} | {len(failed):,} |" in page


def test_what_the_runner_cannot_compare() -> None:
    """`test_loop16_seq_none` expects a sequence with a scalar in it, of which the runner takes the length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = next(case for case in load_model_tests(kind="node") if case.name == "test_loop16_seq_none")
    inputs, [expected] = case.data_sets[0]
    [found] = miniort.backend.prepare(case.model).run(inputs)
    assert [(each.dtype, each.tolist()) for each in found] == [(each.dtype, each.tolist()) for each in expected]
    assert found[0].shape == ()


def test_every_listed_failure_has_a_reason(tool: ModuleType) -> None:
    page = (ROOT / "docs" / "conformance.md").read_text()
    listed = re.findall(r"^\| `(test_\w+)` \| (.+) \|$", page, re.M)
    assert listed
    assert [name for name, reason in listed if tool.reason_for(name) != reason] == []
