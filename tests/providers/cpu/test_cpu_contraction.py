"""Einsum, Det, BitCast, TensorScatter, LinearAttention, CausalConvWithState."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from miniort.types import dtype_to_onnx

F32 = np.float32


def floats(*shape, seed=0, dtype=F32):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


EQUATIONS = [
    ("ij,jk->ik", [(2, 3), (3, 4)]),
    ("ij,jk", [(2, 3), (3, 4)]),
    ("ij , jk -> ki", [(2, 3), (3, 4)]),
    ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
    ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    ("bhid,bjd->bhij", [(2, 3, 4, 5), (2, 6, 5)]),
    ("i,j->ij", [(3,), (4,)]),
    ("i,i->", [(3,), (3,)]),
    ("i,i", [(3,), (3,)]),
    ("ij->ji", [(2, 3)]),
    ("ij->", [(2, 3)]),
    ("ij->i", [(2, 3)]),
    ("ii->i", [(3, 3)]),
    ("ii", [(3, 3)]),
    ("...ii->...i", [(2, 3, 3)]),
    ("iji->j", [(3, 2, 3)]),
    ("iiij->ij", [(2, 2, 2, 3)]),
    ("ii,ij->j", [(3, 3), (3, 2)]),
    ("...ij,...jk->...ik", [(2, 5, 3, 4), (2, 5, 4, 6)]),
    ("...ij,...jk->...ik", [(1, 5, 3, 4), (2, 1, 4, 6)]),
    ("...ij,...jk", [(2, 3, 4), (4, 6)]),
    ("i...,j...->ij...", [(2, 5), (3, 5)]),
    ("...,...", [(2, 3), (2, 3)]),
    ("...,->...", [(2, 3), ()]),
    (",->", [(), ()]),
    ("ij,kl->ijkl", [(2, 3), (4, 5)]),
    ("ij,kl->il", [(2, 3), (4, 5)]),
    ("ij,ij->ij", [(2, 3), (2, 3)]),
    ("ab,bc,cd->ad", [(2, 3), (3, 4), (4, 5)]),
    ("ab,cd,bc,a->ad", [(2, 3), (4, 5), (3, 4), (2,)]),
    ("ab,ac,ad->bcd", [(2, 3), (2, 4), (2, 5)]),
    ("a,a,a,a,a->", [(3,)] * 5),
    ("bA,Ba->aAbB", [(2, 3), (4, 5)]),
    ("bA,Ba", [(2, 3), (4, 5)]),
    ("ij,jk->ik", [(0, 3), (3, 4)]),
    ("ij,jk->ik", [(2, 0), (0, 4)]),
]


class TestEinsum:
    @pytest.mark.parametrize(("equation", "shapes"), EQUATIONS, ids=lambda value: str(value))
    def test_equations(self, equation, shapes, node, same):
        xs = [floats(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        for version in (12, 28):
            same(node("Einsum", version, xs, equation=equation)(*xs)[0], np.asarray(np.einsum(equation, *xs), F32), rtol=1e-5)

    def test_types(self, node, same, versions, types_of):
        for schema in versions("Einsum"):
            for dtype in types_of(schema, "T"):
                a, b = (np.random.default_rng(seed).integers(0, 4, shape).astype(dtype) for seed, shape in enumerate(((2, 3), (3, 4))))
                want = (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)
                same(node("Einsum", schema.since_version, [a, b], equation="ij,jk->ik")(a, b)[0], want)

    def test_int8_wraps(self, node, same):
        a = np.full((1, 3), 100, np.int8)
        same(node("Einsum", 12, [a, a], equation="ij,ij->i")(a, a)[0], np.array([30000], np.int64).astype(np.int8))

    def test_nan_and_infinity(self, node):
        a, b = np.array([[np.inf, 1], [np.nan, 0]], F32), np.array([[0, 1], [1, 1]], F32)
        got = node("Einsum", 12, [a, b], equation="ij,jk->ik")(a, b)[0]
        np.testing.assert_array_equal(got, np.array([[np.nan, np.inf], [np.nan, np.nan]], F32))

    def test_ellipsis_that_the_output_lacks_is_summed(self, node, same):
        """The specification sums over all that the output term doesn't have; NumPy refuses such an equation."""
        x = floats(2, 3, 4)
        same(node("Einsum", 12, [x], equation="...i->i")(x)[0], x.sum((0, 1)), rtol=1e-5)

    def test_wrong_counts(self, node):
        a = floats(2, 3)
        with pytest.raises(Exception, match="2 terms"):
            node("Einsum", 12, [a], equation="ij,jk->ik")(a)
        with pytest.raises(Exception, match="rank 2"):
            node("Einsum", 12, [a], equation="ijk->i")(a)


def test_determinants(node, same, versions, types_of):
    for schema in versions("Det"):
        for dtype in types_of(schema, "T"):
            for shape in ((2, 2), (3, 3), (2, 4, 3, 3), (0, 2, 2)):
                x = floats(*shape, dtype=dtype)
                want = np.asarray(np.linalg.det(x.astype(np.float64)))
                got = node("Det", schema.since_version, [x])(x)[0]
                assert (got.shape, got.dtype) == (shape[:-2], dtype)
                np.testing.assert_allclose(
                    got.astype(np.float64),
                    want,
                    rtol=1e-2 if np.dtype(dtype).itemsize == 2 else 1e-4,
                    atol=1e-2 if np.dtype(dtype).itemsize == 2 else 1e-5,
                )
    singular = np.ones((2, 2), F32)
    same(node("Det", 11, [singular])(singular)[0], np.array(0, F32))


class TestBitCast:
    def cast(self, node, x, dtype):
        return node("BitCast", 26, [x], to=dtype_to_onnx(np.dtype(dtype)))(x)[0]

    def test_all_pairs_of_a_width(self, node, versions, types_of):
        (schema,) = versions("BitCast", 26)[-1:]
        bits = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
        kinds = [np.dtype(each) for each in types_of(schema, "T1")]
        for source in kinds:
            for target in [each for each in kinds if bits.get(each.name, 8) < 8 or "float" in each.name or source == np.uint8]:
                width = bits.get(source.name, source.itemsize * 8)
                if bits.get(target.name, target.itemsize * 8) != width or "bool" in (source.name, target.name):
                    continue
                x = np.array([0, 1, 1, 0]).astype(source)
                there = self.cast(node, x, target)
                assert (there.shape, there.dtype) == (x.shape, target)
                back = self.cast(node, there, source)
                assert back.view(np.uint8).tolist() == x.view(np.uint8).tolist()

    def test_signs_of_narrow_integers(self, node, same):
        same(self.cast(node, np.array([-1, -8, 7], ml_dtypes.int4), ml_dtypes.uint4), np.array([15, 8, 7], ml_dtypes.uint4))
        same(self.cast(node, np.array([15, 8, 7], ml_dtypes.uint4), ml_dtypes.int4), np.array([-1, -8, 7], ml_dtypes.int4))
        same(self.cast(node, np.array([-1, -2, 1], ml_dtypes.int2), ml_dtypes.uint2), np.array([3, 2, 1], ml_dtypes.uint2))

    def test_bool_scalars_and_strides(self, node, same):
        same(self.cast(node, np.array([True, False]), np.uint8), np.array([1, 0], np.uint8))
        same(self.cast(node, np.array(1.0, F32), np.int32), np.array(0x3F800000, np.int32))
        with pytest.raises(Exception, match="bits"):
            self.cast(node, np.array(1.0, F32), np.int64)


class TestTensorScatter:
    @pytest.mark.parametrize("axis", [1, 2, -1, -2])
    @pytest.mark.parametrize("mode", ["linear", "circular"])
    def test_against_the_definition(self, axis, mode, node, same):
        shape = (2, 5, 6, 7)
        cache = floats(*shape)
        sizes = list(shape)
        sizes[axis] = 3
        update = floats(*sizes, seed=1)
        for indices in (None, np.array([1, 2]), np.array([4, 9]) if mode == "circular" else np.array([0, 0])):
            want = cache.copy()
            moved, new = np.moveaxis(want, axis, 1), np.moveaxis(update, axis, 1)
            for row in range(2):
                for step in range(3):
                    moved[row, ((0 if indices is None else indices[row]) + step) % shape[axis]] = new[row, step]
            given = [cache, update] if indices is None else [cache, update, indices]
            same(node("TensorScatter", 24, given, axis=axis, mode=mode)(*given)[0], want)

    def test_types(self, node, same, versions, types_of, sample):
        (schema,) = versions("TensorScatter", 24)[-1:]
        for dtype in types_of(schema, "T"):
            cache, update, indices = sample(dtype, (2, 4, 3)), sample(dtype, (2, 1, 3), seed=1), np.array([3, 0])
            want = cache.copy()
            want[[0, 1], [3, 0]] = update[:, 0]
            same(node("TensorScatter", 24, [cache, update, indices])(cache, update, indices)[0], want)

    def test_past_the_end(self, node):
        cache, update = floats(2, 4, 3), floats(2, 2, 3)
        with pytest.raises(Exception, match="outside"):
            node("TensorScatter", 24, [cache, update, np.int64])(cache, update, np.array([0, 3]))


class TestLinearAttention:
    @pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
    @pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
    @pytest.mark.parametrize("with_past", [False, True])
    def test_against_reference(self, rule, heads, with_past, node, same):
        q_heads, kv_heads = heads
        q, k, v = floats(2, 5, q_heads * 4), floats(2, 5, kv_heads * 4, seed=1) / 2, floats(2, 5, kv_heads * 3, seed=2)
        past = floats(2, kv_heads, 4, 3, seed=3) if with_past else None
        for by_key in (1, 4):
            decay = -np.abs(floats(2, 5, kv_heads * by_key, seed=4)) if "gated" in rule else None
            beta = np.abs(floats(2, 5, kv_heads, seed=5)) / 2 if "delta" in rule else None
            given = [q, k, v, past, decay, beta]
            made = node("LinearAttention", 27, given, 2, q_num_heads=q_heads, kv_num_heads=kv_heads, update_rule=rule)
            for got, want in zip(made(*given), made.reference(*given), strict=True):
                same(got, want, rtol=1e-4, atol=1e-5)

    def test_steps_add_up(self, node, same):
        """A prompt at once, and the same token by token with the state handed on."""
        q, k, v = floats(1, 6, 8), floats(1, 6, 8, seed=1), floats(1, 6, 8, seed=2)
        attributes = {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear"}
        whole, state = node("LinearAttention", 27, [q, k, v, None], 2, **attributes)(q, k, v)
        step = node("LinearAttention", 27, [q, k, v, F32], 2, **attributes)
        carried = np.zeros((1, 2, 4, 4), F32)
        for time in range(6):
            y, carried = step(q[:, time : time + 1], k[:, time : time + 1], v[:, time : time + 1], carried)
            same(y, whole[:, time : time + 1], rtol=1e-5, atol=1e-5)
        same(carried, state, rtol=1e-5, atol=1e-5)

    def test_missing_gate(self, node):
        x = floats(1, 2, 4)
        with pytest.raises(Exception, match="decay"):
            node("LinearAttention", 27, [x, x, x], 2, q_num_heads=1, kv_num_heads=1, update_rule="gated")(x, x, x)


class TestCausalConvolution:
    @pytest.mark.parametrize("activation", ["none", "silu", "swish"])
    @pytest.mark.parametrize("length", [1, 2, 7])
    @pytest.mark.parametrize("size", [1, 4])
    def test_against_reference(self, activation, length, size, node, same):
        for bias in (None, floats(3, seed=2)):
            for past in (None, floats(2, 3, size - 1, seed=3)):
                given = [floats(2, 3, length), floats(3, 1, size, seed=1), bias, past]
                made = node("CausalConvWithState", 27, given, 2, activation=activation)
                for got, want in zip(made(*given), made.reference(*given), strict=True):
                    same(got, want, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_narrow_floats(self, dtype, node, same):
        given = [floats(2, 3, 5, dtype=dtype), floats(3, 1, 4, seed=1, dtype=dtype)]
        wide = [x.astype(F32) for x in given]
        got = node("CausalConvWithState", 27, given, 2)(*given)
        want = node("CausalConvWithState", 27, wide, 2)(*wide)
        for found, wanted in zip(got, want, strict=True):
            same(found, wanted.astype(dtype))
