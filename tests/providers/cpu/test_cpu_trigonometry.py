"""Trigonometry, Round and bitwise ops: each version, each type, many shapes, the edges of the domain."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

FUNCTIONS = {
    "Tan": (np.tan, -1.5, 1.5),
    "Asin": (np.arcsin, -1, 1),
    "Acos": (np.arccos, -1, 1),
    "Atan": (np.arctan, -4, 5),
    "Sinh": (np.sinh, -4, 5),
    "Cosh": (np.cosh, -4, 5),
    "Asinh": (np.arcsinh, -4, 5),
    "Acosh": (np.arccosh, 1, 5),
    "Atanh": (np.arctanh, -0.9, 0.9),
    "Round": (np.rint, -4, 5),
}
EDGES = np.array([0.0, -0.0, 1, -1, 2, -2, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_every_version_and_type(op, node, same, sample, versions, types_of):
    function, low, high = FUNCTIONS[op]
    for schema in versions(op):
        for dtype in types_of(schema, "T"):
            for shape in ((), (0, 3), (3, 5)):
                x = sample(dtype, shape, low=low, high=high)
                same(node(op, schema.since_version, [x])(x)[0], np.asarray(function(x.astype(np.float64))).astype(dtype))


@pytest.mark.parametrize("op", FUNCTIONS)
def test_edges(op, node, same):
    model = node(op, 22, [EDGES])
    with np.errstate(all="ignore"):
        want = FUNCTIONS[op][0](EDGES)
    same(model(EDGES)[0], want)
    large = np.tile(EDGES, 5000).reshape(13, -1)
    with np.errstate(all="ignore"):
        same(model(large.T)[0], FUNCTIONS[op][0](large.T))


@pytest.mark.parametrize(("op", "function"), [("BitwiseAnd", np.bitwise_and), ("BitwiseOr", np.bitwise_or), ("BitwiseXor", np.bitwise_xor)])
def test_bitwise(op, function, node, same, sample, versions, types_of):
    for schema in versions(op):
        for dtype in types_of(schema, "T"):
            for left, right in (((3, 4), (4,)), ((), ()), ((2, 0), (1,)), ((1, 200), (300, 1))):
                a, b = sample(dtype, left, low=-100, high=100), sample(dtype, right, seed=1, low=-100, high=100)
                same(node(op, 18, [a, b])(a, b)[0], np.asarray(function(a, b)))


def test_bitwise_not(node, same, sample, versions, types_of):
    for dtype in types_of(versions("BitwiseNot")[0], "T"):
        for shape in ((), (3, 4), (0,)):
            x = sample(dtype, shape, low=-100, high=100)
            same(node("BitwiseNot", 18, [x])(x)[0], np.asarray(~x))


class TestBitShift:
    def test_every_type(self, node, same, versions, types_of):
        for schema in versions("BitShift"):
            for dtype in types_of(schema, "T"):
                a, b = np.array([[1, 4, 100], [127, 3, 0]], dtype), np.array([1, 2, 0], dtype)
                same(node("BitShift", schema.since_version, [a, b], direction="LEFT")(a, b)[0], np.left_shift(a, b))
                same(node("BitShift", schema.since_version, [a, b], direction="RIGHT")(a, b)[0], np.right_shift(a, b))

    def test_the_sign_fills_up(self, node, same):
        a, b = np.array([-8, -8, -1, 8, -8, 8, -8, 8, 1], np.int8), np.array([1, 7, 3, 2, 8, 8, -1, -1, 100], np.int8)
        same(node("BitShift", 28, [a, b], direction="RIGHT")(a, b)[0], np.array([-4, -1, -1, 2, -1, 0, -1, 0, 0], np.int8))
        same(node("BitShift", 28, [a, b], direction="LEFT")(a, b)[0], np.array([-16, 0, -8, 32, 0, 0, 0, 0, 0], np.int8))

    def test_amounts_that_are_too_large(self, node, same):
        for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
            bits = np.dtype(dtype).itemsize * 8
            a, b = np.full(3, 255, dtype), np.array([bits - 1, bits, bits + 1], dtype)
            same(node("BitShift", 11, [a, b], direction="RIGHT")(a, b)[0], np.array([255 >> (bits - 1), 0, 0], dtype))
            same(node("BitShift", 11, [a, b], direction="LEFT")(a, b)[0], np.array([1 << (bits - 1), 0, 0]).astype(dtype))

    def test_an_unknown_direction(self, node):
        from miniort.errors import KernelError

        with pytest.raises(KernelError, match="LEFT or RIGHT"):
            node("BitShift", 11, [np.uint8, np.uint8], direction="UP")(np.ones(1, np.uint8), np.ones(1, np.uint8))


def test_round_keeps_ties_even_in_16_bits(node, same):
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -4.5, 1000.5], ml_dtypes.bfloat16)
    same(node("Round", 22, [x])(x)[0], np.rint(x.astype(np.float32)).astype(ml_dtypes.bfloat16))
