"""Linear models and support vector machines of ai.onnx.ml, against onnxruntime and textbook loops."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.errors import KernelError

TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"]


def logistic(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def floats(x):
    return np.asarray(x, np.float32)


class TestLinear:
    @pytest.mark.parametrize("transform", TRANSFORMS)
    @pytest.mark.parametrize("labels", [{"classlabels_ints": [5, 7, 9]}, {"classlabels_strings": ["a", "b", "ä"]}])
    def test_classifier(self, transform, labels, ml, same, sample):
        for dtype in (np.float32, np.float64, np.int64, np.int32):
            x = sample(dtype, (6, 2))
            x[0] = 0
            coefficients = floats([0.1, -0.2, 0.3, 0.1, -0.5, 0.2])
            attributes = {"coefficients": coefficients.tolist(), "intercepts": [0.1, 0.0, -0.2], "post_transform": transform} | labels
            model = ml("LinearClassifier", 1, [x], 2, **attributes)
            for got, want in zip(model(x), model.onnxruntime(x), strict=True):
                same(got, np.asarray(want), rtol=1e-5)

    def test_one_row_of_coefficients(self, ml, same):
        # Two labels: onnxruntime gives 1 - s for the first class where nothing is transformed, and doesn't transform at all by SOFTMAX. The
        # specification wants "the transform to apply to the scores vector"; the reference evaluator's scores are -s and s, as here.
        x = floats([[1, 2], [-1, 0.5], [-3, 0.1]])
        score = (x @ floats([0.5, 0.2]) + np.float32(0.1))[:, None]
        attributes = {"coefficients": [0.5, 0.2], "intercepts": [0.1], "classlabels_ints": [5, 7]}
        pair = np.concatenate((-score, score), 1)
        for transform, want in (("NONE", pair), ("LOGISTIC", logistic(pair)), ("SOFTMAX", softmax(pair))):
            model = ml("LinearClassifier", 1, [x], 2, post_transform=transform, **attributes)
            labels, scores = model(x)
            same(labels, model.onnxruntime(x)[0])
            same(scores, want, rtol=1e-5)
            same(scores, floats(model.reference(x)[1]), rtol=1e-5)
        labels, scores = ml("LinearClassifier", 1, [x], 2, coefficients=[0.5, 0.2], intercepts=[0.1])(x)
        same(labels, (score[:, 0] > 0).astype(np.int64))
        same(scores, score)

    @pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC"])
    def test_regressor(self, transform, ml, same, sample):
        for dtype in (np.float32, np.float64, np.int64):
            x = sample(dtype, (4, 3))
            coefficients = floats([0.1, -0.2, 0.3, 0.1, -0.5, 0.2]).reshape(2, 3)
            attributes = {"coefficients": coefficients.ravel().tolist(), "targets": 2, "post_transform": transform}
            for intercepts in ({}, {"intercepts": [0.5, -1.0]}):
                want = x.astype(np.float64) @ coefficients.T + np.array(intercepts.get("intercepts", 0.0))
                want = {"NONE": lambda y: y, "SOFTMAX": softmax, "LOGISTIC": logistic}[transform](want)
                same(ml("LinearRegressor", 1, [x], **attributes, **intercepts)(x)[0], floats(want), rtol=1e-5)
        x = np.zeros((0, 3), np.float32)
        same(ml("LinearRegressor", 1, [x], coefficients=[1.0, 2, 3])(x)[0], np.zeros((0, 1), np.float32))

    def test_probit(self, ml, same):
        from statistics import NormalDist

        x = floats([[1e-6], [0.001], [0.1], [0.5], [0.6], [0.9], [0.999999], [0], [1], [1.5]])
        want = [NormalDist().inv_cdf(float(p)) if 0 < p < 1 else {0: -np.inf, 1: np.inf}.get(float(p), np.nan) for p in x.ravel()]
        got = ml("LinearRegressor", 1, [x], coefficients=[1.0], post_transform="PROBIT")(x)[0]
        same(got, floats(want).reshape(-1, 1), rtol=1e-5)

    def test_an_unknown_transform(self, ml):
        with pytest.raises(KernelError, match="post_transform"):
            ml("LinearRegressor", 1, [np.float32], coefficients=[1.0], post_transform="CUBE")(floats([[1]]))


KERNELS = [("LINEAR", []), ("POLY", [0.5, 1.0, 3.0]), ("RBF", [0.5, 0.0, 0.0]), ("SIGMOID", [0.5, 0.1, 0.0])]


class TestSupportVectors:
    @pytest.fixture
    def machine(self, sample):
        def attributes(classes, sizes, kernel, parameters):
            count = sum(sizes)
            pairs = classes * (classes - 1) // 2
            return {
                "coefficients": sample(np.float32, (max(classes - 1, 1) * count,), seed=3, low=-1, high=1).tolist(),
                "support_vectors": sample(np.float32, (count * 3,), seed=4, low=-1, high=1).tolist(),
                "rho": sample(np.float32, (max(pairs, 1),), seed=5, low=-1, high=1).tolist(),
                "kernel_type": kernel,
                "kernel_params": parameters or [0.0, 0.0, 0.0],
            }

        return attributes

    @pytest.mark.parametrize(("kernel", "parameters"), KERNELS)
    def test_regressor(self, kernel, parameters, machine, ml, same, sample):
        x = sample(np.float32, (5, 3), low=-1, high=1)
        for one_class in (0, 1):
            model = ml("SVMRegressor", 1, [x], n_supports=4, one_class=one_class, **machine(1, [4], kernel, parameters))
            same(model(x)[0], model.onnxruntime(x)[0], rtol=1e-4, atol=1e-5)

    def test_regressor_without_vectors(self, ml, same, sample):
        x = sample(np.float32, (4, 2))
        score = x @ floats([0.5, -1]) + np.float32(0.25)
        for transform, want in (("NONE", score), ("LOGISTIC", logistic(score))):
            got = ml("SVMRegressor", 1, [x], coefficients=[0.5, -1.0], rho=[0.25], kernel_params=[0.0] * 3, post_transform=transform)(x)[0]
            same(got, want[:, None], rtol=1e-5)

    @pytest.mark.parametrize(("kernel", "parameters"), KERNELS)
    @pytest.mark.parametrize("sizes", [[2, 3], [2, 3, 1], [1, 2, 1, 2]])
    def test_classifier(self, kernel, parameters, sizes, machine, ml, same, sample):
        x = sample(np.float32, (20, 3), low=-1, high=1)
        classes = len(sizes)
        pairs = classes * (classes - 1) // 2
        attributes = machine(classes, sizes, kernel, parameters) | {"vectors_per_class": sizes}
        for labels in ({"classlabels_ints": [7, 5, 9, 1][:classes]}, {"classlabels_strings": list("abcd")[:classes]}):
            model = ml("SVMClassifier", 1, [x], 2, **attributes, **labels)
            for got, want in zip(model(x), model.onnxruntime(x), strict=True):
                same(got, np.asarray(want), rtol=1e-4, atol=1e-5)
            probabilities = {"prob_a": floats(np.linspace(-2, -1, pairs)).tolist(), "prob_b": floats(np.linspace(0, 0.3, pairs)).tolist()}
            model = ml("SVMClassifier", 1, [x], 2, **attributes, **labels, **probabilities)
            got, want = model(x), model.onnxruntime(x)
            same(got[1], want[1], rtol=1e-3)
            same(got[0], np.asarray(want[0]))
            np.testing.assert_allclose(got[1].sum(1), 1, rtol=1e-5)

    @pytest.mark.parametrize("transform", ["LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
    def test_transforms(self, transform, machine, ml, same, sample):
        x = sample(np.float32, (6, 3), low=-1, high=1)
        attributes = machine(3, [2, 3, 1], "RBF", [0.5, 0.0, 0.0]) | {"vectors_per_class": [2, 3, 1], "classlabels_ints": [1, 2, 3]}
        model = ml("SVMClassifier", 1, [x], 2, post_transform=transform, **attributes)
        same(model(x)[1], model.onnxruntime(x)[1], rtol=1e-4)

    def test_linear_scores_for_each_class(self, ml, same, sample):
        x = sample(np.float32, (8, 3))
        coefficients = sample(np.float32, (9,), seed=2).tolist()
        attributes = {"coefficients": coefficients, "rho": [0.5], "classlabels_ints": [5, 7, 9], "kernel_params": [0.0] * 3}
        model = ml("SVMClassifier", 1, [x], 2, **attributes)
        for got, want in zip(model(x), model.onnxruntime(x), strict=True):
            same(got, np.asarray(want), rtol=1e-5)
