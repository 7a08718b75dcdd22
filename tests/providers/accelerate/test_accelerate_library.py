"""The ctypes binding, called as kernels call it, on the stand-in."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from miniort.errors import ProviderError
from miniort_accelerate import library as binding
from miniort_accelerate.library import NO_TRANSPOSE, ROW_MAJOR, TRANSPOSE, Accelerate
from miniort_accelerate.operands import address


def values(*shape: int, dtype: str = "f4", seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(0.5, 2, shape).astype(dtype)


@pytest.mark.parametrize("name", ["cblas_sgemm", "cblas_dgemm", "vDSP_vadd", "vDSP_vmul", "vDSP_vsub", "vDSP_vdiv", "vvexpf", "vvtanh"])
def test_prototypes_are_complete(stand_in: ctypes.CDLL, accelerate: Accelerate, name: str) -> None:
    function = getattr(stand_in, name)
    assert function.restype is None
    arity = {"c": 14, "vD": 7, "vv": 3}
    assert len(function.argtypes) == next(count for prefix, count in arity.items() if name.startswith(prefix))


def test_a_call_of_wrong_types_is_refused_by_ctypes(accelerate: Accelerate) -> None:
    with pytest.raises(ctypes.ArgumentError):
        accelerate.vadd(1.5, 1, 0, 1, 0, 1, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "formula"),
    [("vadd", np.add), ("vsub", np.subtract), ("vmul", np.multiply), ("vdiv", np.divide)],
)
@pytest.mark.parametrize("strides", [(1, 1, 1), (2, 3, 1), (1, 0, 2), (-1, 1, 1)])
def test_vdsp_computes_first_with_second_whatever_apple_s_order(
    accelerate: Accelerate, name: str, formula: np.ufunc, strides: tuple[int, int, int]
) -> None:
    count = 7
    x, y, z = (np.full(count * 3, np.nan, np.float32) for _ in range(3))
    x[:], y[:] = values(x.size, seed=1), values(y.size, seed=2)
    steps_x, steps_y, steps_z = ((np.arange(count) * step) for step in strides)
    start_x = -int(steps_x.min())
    getattr(accelerate, name)(address(x[start_x:]), strides[0], address(y), strides[1], address(z), strides[2], count)
    np.testing.assert_allclose(z[steps_z], formula(x[start_x + steps_x], y[steps_y]), rtol=1e-6)
    untouched = np.setdiff1d(np.arange(z.size), steps_z)
    assert np.isnan(z[untouched]).all()


@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "tanh", "rec"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("count", [0, 1, 1001])
def test_vforce(accelerate: Accelerate, name: str, dtype: str, count: int) -> None:
    x = values(count, dtype=dtype)
    y = np.full(count + 1, np.nan, dtype)
    formula = np.reciprocal if name == "rec" else getattr(np, name)
    getattr(accelerate, f"v{name}" + ("f" if dtype == "f4" else ""))(address(y), address(x), count)
    np.testing.assert_allclose(y[:count], formula(x), rtol=1e-6 if dtype == "f4" else 1e-14)
    assert np.isnan(y[count])


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_vector_longer_than_an_int_counts_goes_in_pieces(stand_in: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(binding, "INT_MAX", 10)
    x = values(37, dtype=dtype)
    y = np.empty_like(x)
    accelerate = Accelerate(stand_in)
    (accelerate.vsqrtf if dtype == "f4" else accelerate.vsqrt)(address(y), address(x), x.size)
    np.testing.assert_allclose(y, np.sqrt(x), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_gemm(accelerate: Accelerate, dtype: str, transpose_a: bool, transpose_b: bool) -> None:
    m, k, n = 3, 5, 4
    a, b, c = values(m, k, dtype=dtype, seed=1), values(k, n, dtype=dtype, seed=2), values(m, n, dtype=dtype, seed=3)
    stored_a = np.ascontiguousarray(a.T if transpose_a else a)
    stored_b = np.ascontiguousarray(b.T if transpose_b else b)
    wanted = 0.5 * (a @ b) + 2 * c
    (accelerate.sgemm if dtype == "f4" else accelerate.dgemm)(
        ROW_MAJOR,
        TRANSPOSE if transpose_a else NO_TRANSPOSE,
        TRANSPOSE if transpose_b else NO_TRANSPOSE,
        m,
        n,
        k,
        0.5,
        address(stored_a),
        stored_a.shape[1],
        address(stored_b),
        stored_b.shape[1],
        2.0,
        address(c),
        n,
    )
    np.testing.assert_allclose(c, wanted, rtol=1e-6)


def test_a_library_without_a_function_is_named() -> None:
    with pytest.raises(ProviderError, match="has no function cblas_sgemm"):
        Accelerate(ctypes.CDLL(None))
