"""Cast and CastLike: every pair of types that a version allows, and the rules for what doesn't fit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from miniort.types import STRING, dtype_to_onnx


def one_and_two(dtype):
    """1 and 2, which exist in every type but int2: there, and from it, 2 is out of range."""
    return np.array(["1", "2"], object) if dtype == STRING else np.array([1, 1 if dtype.name == "int2" else 2], np.float32).astype(dtype)


@pytest.mark.parametrize("op", ["Cast", "CastLike"])
def test_between_all_types(op, node, same, versions, types_of):
    """Every pair in the newest version; in the others every type from and to float32."""
    schemas = versions(op, 7)
    for schema in schemas:
        kinds = types_of(schema, "T1")
        for source in kinds:
            for target in kinds:
                if (schema is not schemas[-1] and np.float32 not in (source, target)) or target == STRING:
                    continue  # how numbers are spelled is another test
                x = one_and_two(source)
                want = one_and_two(target)
                if source in (np.bool_, np.dtype(ml_dtypes.int2)) or target.name == "int2":
                    x, want = x[:1], want[:1]
                if op == "Cast":
                    same(node(op, schema.since_version, [source], to=dtype_to_onnx(target))(x)[0], want)
                else:
                    same(node(op, schema.since_version, [source, target])(x, np.zeros(1, target))[0], want)


def cast(node, x, to, opset=24, **attributes):
    return node("Cast", opset, [x], to=dtype_to_onnx(np.dtype(to)), **attributes)(x)[0]


def test_rounding_and_range(node, same):
    x = np.array([2.7, -2.7, 0.2, -0.2], np.float32)
    same(cast(node, x, np.int32), np.array([2, -2, 0, 0], np.int32))
    same(cast(node, x, np.bool_), np.ones(4, bool))
    same(cast(node, np.array([200, -129], np.int16), np.int8), np.array([-56, 127], np.int8))
    same(cast(node, np.array([15, 3], ml_dtypes.uint4), ml_dtypes.int4), np.array([-1, 3], ml_dtypes.int4))
    same(cast(node, np.array([1e10, -1e10]), np.float16), np.array([np.inf, -np.inf], np.float16))
    same(cast(node, np.array([0.0, -0.0, np.nan]), np.bool_), np.array([False, False, True]))
    same(cast(node, np.array(3.9), np.int64), np.array(3, np.int64))
    same(cast(node, np.zeros((0, 2)), np.int64), np.zeros((0, 2), np.int64))
    big = np.arange(60_000, dtype=np.int64).reshape(200, 300)
    same(cast(node, big.T, np.float32), big.T.astype(np.float32))


@pytest.mark.parametrize("target", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz])
@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64])
def test_float8_saturates_unless_told_not_to(source, target, node, same):
    largest = float(ml_dtypes.finfo(target).max)
    specials = [1e6 if source != np.float16 else np.inf, -1e6 if source != np.float16 else -np.inf, largest, 3, 0]
    specials += [] if source == np.int64 else [np.inf, -np.inf, np.nan]
    x = np.array(specials).astype(source)
    want = np.clip(np.array(specials), -largest, largest).astype(target)
    same(cast(node, x, target), want)
    over = cast(node, x, target, saturate=0).astype(np.float32)
    expected = np.inf if target == ml_dtypes.float8_e5m2 else np.nan
    np.testing.assert_equal(np.abs(over[:2]), np.float32([expected, expected]))
    np.testing.assert_equal(over[2:5], np.float32([largest, 3, 0]))


def test_float8_e8m0_rounds_as_asked(node):
    x = np.array([1, 1.1, 1.5, 1.9, 3, 5, np.nan, 3e38], np.float32)

    def powers(**attributes):
        return cast(node, x, ml_dtypes.float8_e8m0fnu, **attributes).astype(np.float32).tolist()[:6]

    assert powers(round_mode="up") == [1, 2, 2, 2, 4, 8]
    assert powers(round_mode="down") == [1, 1, 1, 1, 2, 4]
    assert powers(round_mode="nearest") == [1, 1, 2, 2, 4, 4]
    last = cast(node, x, ml_dtypes.float8_e8m0fnu).astype(np.float32)[-2:]
    assert np.isnan(last[0])
    assert last[1] == 2.0**127
    assert np.isnan(cast(node, x, ml_dtypes.float8_e8m0fnu, saturate=0).astype(np.float32)[-1])


def test_to_text(node, same):
    same(cast(node, np.array([0.1, 3, -2.5, np.inf, np.nan], np.float32), STRING), np.array(["0.1", "3.0", "-2.5", "inf", "nan"], object))
    same(cast(node, np.array([1, -20], np.int64), STRING), np.array(["1", "-20"], object))
    same(cast(node, np.array([0.1], ml_dtypes.bfloat16), STRING), np.array([str(np.float32(ml_dtypes.bfloat16(0.1)))], object))


def test_from_text(node, same):
    words = np.array(["3.14", "1e-5", "1E8", "INF", "+inf", "-INF", "NaN"], object)
    want = [3.14, 1e-5, 1e8, np.inf, np.inf, -np.inf, np.nan]
    for dtype in (np.float16, np.float32, np.float64):
        with np.errstate(over="ignore"):
            same(cast(node, words, dtype), np.array(want).astype(dtype))
    same(cast(node, np.array(["9223372036854775807", "-5"], object), np.int64), np.array([2**63 - 1, -5]))
    same(cast(node, np.array(["18446744073709551615"], object), np.uint64), np.array([2**64 - 1], np.uint64))
    same(cast(node, np.array(["100.5"], object), np.int32), np.array([100], np.int32))
