"""Activations, matrix products, normalizations and small ops of com.microsoft against onnxruntime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

NARROW = (np.float16, ml_dtypes.bfloat16)


def floats(*shape, seed=0, dtype=np.float32):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


SHAPES = [(3, 4), (0, 4), (300, 200)]


@pytest.mark.parametrize("op", ["Gelu", "FastGelu", "QuickGelu"])
def test_of_one_input(op, agree):
    for shape in SHAPES:
        agree(op, [floats(*shape) * 3])
    agree(op, [np.array([np.nan, np.inf, 0, -0.0], np.float32)])
    agree("QuickGelu", [floats(3, 4)], alpha=0.5)


@pytest.mark.parametrize("op", ["FastGelu", "BiasGelu"])
def test_with_bias(op, agree):
    for shape in SHAPES:
        agree(op, [floats(*shape), floats(shape[1], seed=1)])


def narrow_agrees(contrib, op, inputs, **attributes):
    """Narrow floats against the same op on float32: computed there, rounded once."""
    for dtype in NARROW:
        given = [None if x is None else x.astype(dtype) if x.dtype == np.float32 else x for x in inputs]
        wide = [x.astype(np.float32) if x is not None and x.dtype == dtype else x for x in given]
        got = contrib(op, given, **attributes).run()[0]
        assert got.dtype == dtype
        want = contrib(op, wide, **attributes).run()[0]
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(dtype).astype(np.float32))


def test_narrow_activations(contrib):
    x, bias = floats(3, 4), floats(4, seed=1)
    for op, inputs in (("Gelu", [x]), ("FastGelu", [x, bias]), ("FastGelu", [x, None]), ("BiasGelu", [x, bias]), ("QuickGelu", [x])):
        narrow_agrees(contrib, op, inputs)


def test_bias_split_gelu(contrib):
    """onnxruntime has it on other devices only: by its words."""
    x, bias = floats(2, 3, 8), floats(8, seed=1)
    left, right = np.split(x + bias, 2, axis=-1)
    want = left * contrib("Gelu", [np.ascontiguousarray(right)]).onnxruntime()[0]
    np.testing.assert_allclose(contrib("BiasSplitGelu", [x, bias]).run()[0], want, rtol=1e-5, atol=1e-6)


class TestMatrix:
    @pytest.mark.parametrize("transpose", [(0, 0), (1, 0), (0, 1), (1, 1)])
    def test_transposed(self, transpose, agree):
        for batch in ((), (2,), (2, 3)):
            a = floats(*batch, *((5, 4) if transpose[0] else (4, 5)))
            b = floats(*batch, *((6, 5) if transpose[1] else (5, 6)), seed=1)
            agree("FusedMatMul", [a, b], transA=transpose[0], transB=transpose[1], alpha=0.5)
            agree("TransposeMatMul", [a, b], transA=transpose[0], transB=transpose[1])

    @pytest.mark.parametrize("transpose", [(0, 0), (1, 0), (0, 1), (1, 1)])
    def test_transposed_batch(self, transpose, agree):
        """The first axis is M (or K), and the batch stands between it and the last one."""
        a = floats(*((5, 2, 3, 4) if transpose[0] else (4, 2, 3, 5)))
        b = floats(*((6, 2, 3, 5) if transpose[1] else (5, 2, 3, 6)), seed=1)
        agree("FusedMatMul", [a, b], transA=transpose[0], transB=transpose[1], transBatchA=1, transBatchB=1)

    def test_vectors_and_double(self, agree):
        agree("FusedMatMul", [floats(5), floats(5, 6)], alpha=2.0)
        agree("FusedMatMul", [floats(2, 4, 5, dtype=np.float64), floats(5, 6, dtype=np.float64)], constants=[1])

    def test_narrow(self, contrib):
        narrow_agrees(contrib, "FusedMatMul", [floats(4, 5), floats(5, 6)], alpha=0.3)

    @pytest.mark.parametrize("activation", ["Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid", "Elu", "Softplus", "ThresholdedRelu"])
    def test_fused_gemm(self, activation, agree):
        parameters = {"LeakyRelu": {"activation_alpha": 0.3}, "HardSigmoid": {"activation_alpha": 0.3, "activation_beta": 0.4}}
        if activation in ("Elu", "ThresholdedRelu"):
            parameters[activation] = {"activation_alpha": 0.6}
        inputs = [floats(5, 4), floats(6, 5, seed=1), floats(6, seed=2)]
        agree("FusedGemm", inputs, transA=1, transB=1, alpha=0.5, beta=2.0, activation=activation, **parameters.get(activation, {}))

    def test_unknown_activation(self, contrib):
        with pytest.raises(Exception, match="Sine"):
            contrib("FusedGemm", [floats(4, 5), floats(5, 6)], activation="Sine").run()

    @pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
    def test_distances(self, metric, agree):
        for dtype in (np.float32, np.float64):
            agree("CDist", [floats(4, 5, dtype=dtype), floats(3, 5, seed=1, dtype=dtype)], metric=metric)

    def test_inverse(self, agree, contrib):
        x = floats(2, 4, 4) + 4 * np.eye(4, dtype=np.float32)
        for given in (x, x[0], x.astype(np.float64)):
            agree("Inverse", [given])
        narrow_agrees(contrib, "Inverse", [x])


class TestNormalization:
    x, skip, gamma, beta, bias = floats(2, 3, 8), floats(2, 3, 8, seed=1), floats(8, seed=2), floats(8, seed=3), floats(8, seed=4)
    SUM = (np.float32, None, None, np.float32)

    @pytest.mark.parametrize("outputs", [1, SUM])
    def test_skip(self, outputs, agree):
        for skip in (self.skip, self.skip[:1], self.skip[0]):
            for beta in (None, self.beta):
                for bias in (None, self.bias):
                    inputs = [self.x, skip, self.gamma, beta, bias]
                    agree("SkipLayerNormalization", inputs, outputs, epsilon=1e-3)
        agree("SkipLayerNormalization", [self.x, self.skip, self.gamma], outputs)

    @pytest.mark.parametrize("outputs", [1, SUM])
    def test_simplified_skip(self, outputs, agree):
        for bias in (None, self.bias):
            agree("SkipSimplifiedLayerNormalization", [self.x, self.skip, self.gamma, bias], outputs, epsilon=1e-3)
        agree("SkipSimplifiedLayerNormalization", [self.x[0], self.skip[0], self.gamma], outputs)

    @pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
    def test_statistics(self, op, contrib):
        """onnxruntime's CPU kernel doesn't compute them: by their words."""
        got = contrib(op, [self.x, self.skip, self.gamma], [np.float32] * 4, epsilon=1e-3).run()
        total = self.x + self.skip
        mean = total.mean(-1, keepdims=True) if op == "SkipLayerNormalization" else np.zeros((2, 3, 1), np.float32)
        np.testing.assert_allclose(got[3], total)
        np.testing.assert_allclose(got[2], 1 / np.sqrt(np.square(total - mean).mean(-1, keepdims=True) + 1e-3), rtol=1e-5)
        if op == "SkipLayerNormalization":
            np.testing.assert_allclose(got[1], mean, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("domain", ["", "com.microsoft"])
    def test_simplified(self, domain, agree, contrib):
        agree("SimplifiedLayerNormalization", [self.x, self.gamma], domain="", epsilon=1e-3, axis=-1)
        agree("SimplifiedLayerNormalization", [self.x, floats(3, 8)], domain="", axis=1)
        got = contrib("SimplifiedLayerNormalization", [self.x, self.gamma], 2, domain=domain, epsilon=1e-3).run()
        root = 1 / np.sqrt(np.square(self.x).mean(-1, keepdims=True) + 1e-3)
        np.testing.assert_allclose(got[0], self.x * root * self.gamma, rtol=1e-5)
        np.testing.assert_allclose(got[1], root, rtol=1e-5)

    def test_narrow(self, contrib):
        for op, inputs in (
            ("SkipLayerNormalization", [self.x, self.skip, self.gamma, self.beta, self.bias]),
            ("SkipSimplifiedLayerNormalization", [self.x, self.skip, self.gamma, self.bias]),
        ):
            narrow_agrees(contrib, op, inputs)

    @pytest.mark.parametrize("segmented", [False, True])
    @pytest.mark.parametrize("positioned", [None, 1, 2])
    def test_embedding(self, segmented, positioned, agree):
        generator = np.random.default_rng(0)
        ids, segments = generator.integers(0, 9, (2, 3)).astype(np.int32), generator.integers(0, 2, (2, 3)).astype(np.int32)
        positions = None if positioned is None else generator.integers(0, 5, (positioned, 3)).astype(np.int32)
        mask = np.array([[1, 1, 1], [1, 1, 0]], np.int32)
        tables = floats(9, 8), floats(5, 8, seed=1)
        inputs = [ids, segments if segmented else None, *tables, floats(2, 8, seed=2) if segmented else None, self.gamma, self.beta]
        constants = [2, 3, *([4] if segmented else []), 5, 6]
        agree("EmbedLayerNormalization", [*inputs, mask, positions], 3, constants, epsilon=1e-3)
        agree("EmbedLayerNormalization", [*inputs, None, positions], 2, constants)

    def test_mask_index_is_the_place_of_the_first_zero(self, contrib):
        """So says the documentation; onnxruntime's kernel counts the ones, which is the same only where no 1 follows a 0."""
        mask = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 1]], np.int32)
        inputs = [np.zeros((3, 3), np.int32), None, floats(9, 8), floats(5, 8), None, self.gamma, self.beta, mask]
        assert contrib("EmbedLayerNormalization", inputs, 2).run()[1].tolist() == [1, 0, 3]


class TestSmallOps:
    @pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float64])
    def test_trilu(self, dtype, agree):
        for upper in (0, 1):
            agree("Trilu", [floats(2, 3, 4).astype(dtype), np.array(1)], upper=upper)

    def test_unique(self, agree):
        agree("Unique", [np.array([2, 1, 1, 3, 4, 3], np.float32)], 3)
        agree("Unique", [np.zeros(0, np.float32)], 3)

    def test_expand_dims(self, agree):
        for axis in (0, 1, 2, -1, -3):
            agree("ExpandDims", [floats(3, 4), np.array(axis, np.int32)])
        agree("ExpandDims", [floats(), np.array(0, np.int32)])

    @pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.float32, np.float64])
    def test_range(self, dtype, agree):
        agree("Range", [np.array(x, dtype) for x in (1, 8, 2)])
        agree("Range", [np.array([x], dtype) for x in (3, 0, -1)])
        agree("Range", [np.array(x, dtype) for x in (1, 5)])

    def test_gather_nd(self, agree):
        x = floats(2, 3, 4)
        for indices in ([[0, 1], [1, 2]], [[1]], [[[0, 0, 3]]]):
            agree("GatherND", [x, np.array(indices)])
            agree("GatherND", [x, np.array(indices, np.int32)])

    @pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
    def test_pad(self, mode, agree):
        for pads in ([1, 0, 0, 2], [[0, 1, 1, 0]]):
            agree("Pad", [floats(3, 4), np.array(pads), np.array([2.5], np.float32)], mode=mode)
        agree("Pad", [floats(3, 4), np.array([1, 0, 0, 2])], mode=mode)
        agree("Pad", [floats(3, 4), np.array([-1, 0, 0, 2])])

    def test_repeated_ngrams(self, agree):
        ids = np.array([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]])
        for size in (1, 2, 3, 6):
            agree("NGramRepeatBlock", [ids, floats(2, 6)], ngram_size=size)


class TestConvolution:
    @pytest.mark.parametrize("activation", ["", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Clip", "HardSigmoid"])
    def test_fused(self, activation, agree):
        parameters = {"LeakyRelu": [0.2], "Clip": [0.0, 1.0], "HardSigmoid": [0.3, 0.4]}.get(activation)
        attributes = {"activation": activation} if activation else {}
        if parameters:
            attributes["activation_params"] = parameters
        inputs = [floats(2, 4, 7, 7), floats(6, 2, 3, 3, seed=1), floats(6, seed=2)]
        agree("FusedConv", inputs, tolerance=1e-4, group=2, strides=[2, 2], pads=[1, 1, 1, 1], **attributes)

    def test_addend(self, agree):
        inputs = [floats(2, 4, 7, 7), floats(6, 4, 3, 3, seed=1), None, floats(2, 6, 5, 5, seed=2)]
        agree("FusedConv", inputs, tolerance=1e-4, activation="Relu")

    @pytest.mark.parametrize("dtype", [np.int8, np.uint8])
    def test_nhwc_max_pool(self, dtype, agree):
        x = np.random.default_rng(0).integers(-100, 100, (2, 7, 6, 3)).astype(dtype)
        agree("NhwcMaxPool", [x], kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])
        agree("NhwcMaxPool", [x], kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1)
        agree("NhwcMaxPool", [x], kernel_shape=[2, 2], dilations=[2, 2])
