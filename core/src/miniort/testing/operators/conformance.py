"""Running cases on a provider, and comparing with oracles."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from miniort.errors import MiniortError
from miniort.kernels import Kernel
from miniort.plugins import PluginManager, create_plugin_manager
from miniort.providers import HOST
from miniort.runtime.session import InferenceSession, SessionOptions
from miniort.testing.operators.cases import NodeCase, Operator, build_case, is_float, operator_versions
from miniort.testing.operators.disagreements import DISAGREEMENTS, Disagreement
from miniort.types import Array, DType, dtype_from_name

RELATIVE: dict[DType, float] = {
    np.dtype(np.float64): 1e-6,  # oracles compute some functions of float64 in float32 tables
    np.dtype(np.float32): 1e-4,
    np.dtype(np.complex128): 1e-6,
    np.dtype(np.complex64): 1e-4,
    np.dtype(np.float16): 4e-3,
    np.dtype(ml_dtypes.bfloat16): 2**-6,
}
"""Relative tolerance by the result's element type; other floats must be equal, or neighbours where `tolerance` says so."""


class NoOracleError(Exception):
    """Neither onnxruntime nor the reference evaluator can run a case."""


def check_case(
    case: NodeCase,
    operator: Operator,
    providers: Sequence[str] = ("cpu",),
    disagreements: Sequence[Disagreement] = DISAGREEMENTS,
    kernels: Sequence[Kernel] = (),
    plugins: PluginManager | None = None,
) -> str:
    """Run a case and compare with an oracle; returns the oracle's name. AssertionError if they differ, NoOracleError if there is none.

    The oracles are onnxruntime, then onnx's reference evaluator, then the case's own formula: the first that can run it.
    """
    model = case.model(operator)
    feeds = case.feeds()
    wrong = {each.wrong for each in disagreements if each.op == operator.op and each.when(case, operator)}
    reasons = []
    oracles = [("onnxruntime", run_onnxruntime), ("reference", run_reference)]
    if case.expected is not None:
        formula = case.expected
        oracles.append(("formula", lambda model, feeds: formula(case.inputs)))
    for name, oracle in oracles:
        if name in wrong:
            continue
        try:
            expected = oracle(model, feeds)
            break
        except Exception as error:
            # Oracles refuse what they can't run with errors of many kinds.
            reasons.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    else:
        raise NoOracleError("; ".join(reasons) or "both are known to be wrong")
    frozen = {key: _read_only(value) for key, value in feeds.items()}
    plugins = plugins or create_plugin_manager()
    for level in ("none", "all"):
        session = InferenceSession(model, SessionOptions(level, strict=True), list(providers), kernels=kernels, plugins=plugins)
        found = session.run(None, frozen)
        assert len(found) == len(expected), f"{len(found)} outputs, not {len(expected)}"
        for got, want in zip(found, expected, strict=True):
            compare(got, want, case)
        if not case.shapes_only and session.recorder is not None and session.recorder.provider.device == HOST:
            check_replay(session, frozen, found)
    return name


def check_replay(session: InferenceSession, feeds: Mapping[str, Any], wanted: Sequence[Any]) -> bool:
    """Whether a run with other contents could be noted down. If so, its replay with `feeds` must give what `wanted` says, to the bit."""
    others = {
        name: np.ascontiguousarray(value[::-1] if value.ndim else value)
        if isinstance(value, np.ndarray) and is_float(value.dtype)
        else value
        for name, value in feeds.items()
    }
    place = np.zeros(1, np.int64)
    try:
        run, _ = session.record(others, place, lambda _: None)
    except MiniortError:
        return False  # what can't be noted down is run as ever
    found = run.replay(feeds, place)
    for got, want in zip(found or (), wanted, strict=found is not None):
        one, other = (each.astype(np.float64) if is_float(each.dtype) else each for each in (got, want))  # NaN of a foreign type isn't NaN
        np.testing.assert_array_equal(one, other, "a replay differs from a run")
    return found is not None


def _read_only(value: Any) -> Any:
    """A copy that a kernel can't write into."""
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = False
    return value


def is_foreign(dtype: DType) -> bool:
    """Whether it's a type that NumPy lacks."""
    return dtype.isbuiltin != 1


def run_onnxruntime(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    """What onnxruntime gives; an exception of its own if it can't."""
    import onnxruntime

    if any(isinstance(value, np.ndarray) and is_foreign(value.dtype) for value in feeds.values()):
        raise NotImplementedError("onnxruntime takes no ml_dtypes arrays")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = session.run(None, feeds)
    if any(type(result).__name__ == "SparseTensor" for result in results):
        raise NotImplementedError("onnxruntime gives a sparse tensor where the graph has a dense one")
    return [_of_type(result, output.type) for result, output in zip(results, session.get_outputs(), strict=True)]


def _of_type(value: Any, type_string: str) -> Any:
    """An output of onnxruntime as an array of its own type: it hands some small floats out as their bytes."""
    if not isinstance(value, np.ndarray) or not type_string.startswith("tensor("):
        return value
    dtype = dtype_from_name(type_string[len("tensor(") : -1])
    return value.view(dtype) if is_foreign(dtype) and value.dtype.itemsize == dtype.itemsize else value


def run_reference(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    """What onnx's reference evaluator gives; an exception if it can't."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(ReferenceEvaluator(model).run(None, feeds))


def compare(got: Any, want: Any, case: NodeCase) -> None:
    """AssertionError unless two results are the same: type, shape and values."""
    if want is None:
        assert got is None, f"found {type(got).__name__}, not an empty optional"
        return
    if isinstance(want, dict):
        assert isinstance(got, dict), f"found {type(got).__name__}, not a map"
        assert got.keys() == want.keys()
        for key in want:
            compare(np.asarray(got[key]), np.asarray(want[key]), case)
        return
    if isinstance(want, list | tuple):
        assert isinstance(got, list | tuple), f"found {type(got).__name__}, not a sequence"
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            compare(one, other, case)
        return
    want = np.asarray(want)
    assert isinstance(got, np.ndarray), f"found {type(got).__name__}, not an array"
    if want.dtype.kind in "US":
        want = want.astype(object)
    assert got.shape == want.shape, f"shape {got.shape}, not {want.shape}"
    assert got.dtype == want.dtype, f"type {got.dtype}, not {want.dtype}"
    if case.shapes_only:
        return
    if is_float(got.dtype) or got.dtype.kind == "c":
        _compare_floats(got, want, case)
    elif got.dtype.kind == "O":
        assert got.tolist() == want.tolist()
    elif case.atol is not None:
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=0, atol=case.atol)
    else:
        np.testing.assert_array_equal(got, want)


def _compare_floats(got: Array, want: Array, case: NodeCase) -> None:
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    relative = RELATIVE.get(got.dtype, 0.0) if case.tolerance is None else case.tolerance
    absolute = (1e-6 if got.dtype.kind in "fc" else 0.0) if case.atol is None else case.atol
    if got.dtype == np.float16 and case.atol is None:
        absolute = 1e-3
    np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=relative, atol=absolute, equal_nan=True)


class ProviderConformance:
    """Tests for a provider: subclass it in a test module, name the providers, and pytest runs every op and version.

    providers: as a session takes them; ops that they lack come from those behind them. kernels: further ones, asked before theirs.
    operators: what to run; all by default. examples: cases of each. disagreements: where an oracle is
    wrong. plugins: a plugin manager, None for
    one with every installed plugin.
    """

    providers: Sequence[str] = ("cpu",)
    kernels: Sequence[Kernel] = ()
    operators: Sequence[Operator] = ()
    examples: int = 3
    disagreements: Sequence[Disagreement] = DISAGREEMENTS
    plugins: PluginManager | None = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each op and version."""
        if "operator" in metafunc.fixturenames:
            metafunc.parametrize("operator", self.operators or operator_versions(), ids=str)

    def test_operator(self, operator: Operator) -> None:
        """The provider gives what an oracle gives, for cases drawn at random; at least one must have an oracle."""
        oracles: list[str] = []

        @hypothesis.seed(zlib.crc32(str(operator).encode()))  # other draws for each operator, the same every time
        @hypothesis.settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(st.data())
        def run(data: st.DataObject) -> None:
            case = build_case(data.draw, operator)
            try:
                oracles.append(check_case(case, operator, self.providers, self.disagreements, self.kernels, self.plugins))
            except NoOracleError as error:
                hypothesis.note(str(error))
                refused.append(str(error))

        refused: list[str] = []
        run()
        assert oracles, f"no oracle could run any of {len(refused)} cases of {operator}: {refused[:1]}"
