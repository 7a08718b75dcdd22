"""Features, categories and maps of ai.onnx.ml."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from onnx import TensorProto, helper

from miniort import InferenceSession
from miniort.errors import KernelError, RunError
from miniort.types import dtype_to_onnx

NUMBERS = [np.float32, np.float64, np.int64, np.int32]


def words(*items):
    return np.array(items, object)


def ints(*values):
    return np.array(values, np.int64)


class TestFeatures:
    def test_array_feature_extractor(self, ml, same, sample):
        for dtype in (*NUMBERS, object):
            for shape in ((5,), (2, 5), (2, 3, 5)):
                x = sample(dtype, shape)
                for chosen in (ints(1), ints(4, 0, 0).reshape(1, 3), ints(1, 2, 3, 0).reshape(2, 2)):
                    model = ml("ArrayFeatureExtractor", 1, [x, chosen])
                    same(model(x, chosen)[0], model.onnxruntime(x, chosen)[0])

    def test_binarizer(self, ml, same):
        for dtype in NUMBERS:
            x = np.array([[-1, 0, 1], [2, 3, 0]], dtype)
            for threshold in (0.0, 1.0, 1.5):
                same(ml("Binarizer", 1, [x], threshold=threshold)(x)[0], (x > threshold).astype(dtype))
        x = np.array([np.nan, np.inf, -np.inf], np.float32)
        same(ml("Binarizer", 1, [x])(x)[0], np.array([0, 1, 0], np.float32))

    def test_feature_vectorizer(self, ml, same, sample):
        for dtype in NUMBERS:
            a, b = sample(dtype, (2, 3)), sample(dtype, (2, 2), seed=1)
            for widths in ((3, 2), (2, 1), (4, 3)):
                model = ml("FeatureVectorizer", 1, [a, b], inputdimensions=widths)
                same(model(a, b)[0], model.onnxruntime(a, b)[0])
            model = ml("FeatureVectorizer", 1, [a[0], b[0]], inputdimensions=(3, 2))
            same(model(a[0], b[0])[0], model.onnxruntime(a[0], b[0])[0])

    def test_imputer(self, ml, same):
        nan = np.nan
        for dtype in (np.float32, np.float64):
            x = np.array([[1, nan], [nan, 5], [-1, 1]], dtype)
            for replaced in (nan, 1.0):
                for values in ([9.0], [8.0, 7.0]):
                    model = ml("Imputer", 1, [x], imputed_value_floats=values, replaced_value_float=replaced)
                    want = np.where(np.isnan(x) if np.isnan(replaced) else x == replaced, np.array(values, dtype), x)
                    same(model(x)[0], want)
        for dtype in (np.int32, np.int64):
            x = np.array([[1, 0], [0, 5]], dtype)
            same(ml("Imputer", 1, [x], imputed_value_int64s=[7, 8])(x)[0], np.array([[1, 8], [7, 5]], dtype))
        with pytest.raises(KernelError, match="one of imputed_value_floats"):
            ml("Imputer", 1, [np.float32])(np.ones((1, 1), np.float32))

    @pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
    def test_normalizer(self, norm, ml, same):
        for dtype in NUMBERS:
            # onnxruntime's MAX is the specification's, max(x); the reference evaluator takes the largest size.
            for x in (np.array([[1, -4, 2], [0, 0, 0], [-1, -3, -2]], dtype), np.array([3, 4, 0], dtype)):
                model = ml("Normalizer", 1, [x], norm=norm)
                same(model(x)[0], model.onnxruntime(x)[0])

    def test_scaler(self, ml, same, sample):
        for dtype in NUMBERS:
            x = sample(dtype, (3, 2))
            for offset, scale in (([1.0], [2.0]), ([1.0, -1.0], [2.0, 0.5])):
                model = ml("Scaler", 1, [x], offset=offset, scale=scale)
                same(model(x)[0], model.onnxruntime(x)[0])
        x = sample(np.float32, (2, 3, 2))
        same(ml("Scaler", 1, [x], scale=[2.0])(x)[0], 2 * x)


class TestCategories:
    def test_category_mapper(self, ml, same):
        attributes = {"cats_int64s": [1, 0, 7], "cats_strings": ["q", "r", "ä"]}
        for x in (ints(0, 1, 5, 7), words("ä", "q", "", "r").reshape(2, 2)):
            for defaults in ({}, {"default_int64": -5}, {"default_string": "?"}):
                model = ml("CategoryMapper", 1, [x], **attributes, **defaults)
                same(model(x)[0], model.onnxruntime(x)[0])

    def test_label_encoder_of_classes(self, ml, same):
        for x in (words("b", "a", "z"), ints(0, 1, 5)):
            for defaults in ({}, {"default_int64": 9, "default_string": "?"}):
                model = ml("LabelEncoder", 1, [x], classes_strings=["a", "b"], **defaults)
                same(model(x)[0], model.onnxruntime(x)[0])

    KEYS: ClassVar = {"strings": ["a", "b", "ä"], "int64s": [3, 1, 2], "floats": [1.5, -2.0, float("nan")]}

    VALUES: ClassVar = {"strings": ["c", "d", "ö"], "int64s": [30, 10, 20], "floats": [0.5, -3.0, 7.0]}

    @pytest.mark.parametrize("keys", KEYS)
    @pytest.mark.parametrize("values", KEYS)
    @pytest.mark.parametrize("version", [2, 4])
    def test_label_encoder(self, keys, values, version, ml, same):
        inputs = {"strings": words("ä", "x", "a"), "int64s": ints(2, 5, 3), "floats": np.array([np.nan, 7, 1.5], np.float32)}
        x = inputs[keys].reshape(1, 3)
        listed = self.KEYS[keys]
        if version == 2 and keys == "floats":
            # Version 2 compares keys bit by bit, "so even a float NaN can be mapped"; onnxruntime doesn't find it there.
            found = ml("LabelEncoder", 2, [x], keys_floats=listed, values_int64s=[3, 4, 5])(x)[0]
            same(found, np.array([[5, -1, 3]]))
            listed, x = [1.5, -2.0, 4.0], np.array([[4, 7, 1.5]], np.float32)
        attributes = {f"keys_{keys}": listed, f"values_{values}": self.VALUES[values]}
        for defaults in ({}, {"default_string": "?", "default_int64": 9, "default_float": 2.5}):
            model = ml("LabelEncoder", version, [x], **attributes, **defaults)
            same(model(x)[0], model.onnxruntime(x)[0])

    def test_label_encoder_of_tensors(self, ml, same):
        for dtype in (np.int16, np.int32, np.int64, np.float32, np.float64, object):
            keys = words("a", "b") if dtype is object else np.array([1, 2], dtype)
            x = np.array([keys[1], keys[0], words("z")[0] if dtype is object else 9], keys.dtype).reshape(3, 1)
            for kind in (np.int16, np.int32, np.int64, np.float32, np.float64, object):
                values = words("c", "d") if kind is object else np.array([7, 8], kind)
                default = words("?") if kind is object else np.array([5], kind)
                got = ml("LabelEncoder", 4, [x], keys_tensor=keys, values_tensor=values, default_tensor=default)(x)[0]
                same(got, np.array([values[1], values[0], default[0]], kind).reshape(3, 1))
                plain = "_Unused" if kind is object else -1 if np.dtype(kind).kind == "i" else -0.0
                got = ml("LabelEncoder", 4, [x], keys_tensor=keys, values_tensor=values)(x)[0]
                same(got, np.array([values[1], values[0], plain], kind).reshape(3, 1))

    def test_the_last_of_a_repeated_key(self, ml, same):
        # The specification says the last; onnxruntime takes the first.
        x = ints(1, 2)
        same(ml("LabelEncoder", 4, [x], keys_int64s=[1, 1], values_int64s=[5, 6])(x)[0], ints(6, -1))
        x = words("a")
        same(ml("LabelEncoder", 4, [x], keys_strings=["a", "a"], values_int64s=[5, 6])(x)[0], ints(6))

    def test_lists_that_do_not_match(self, ml):
        with pytest.raises(KernelError, match="as many values as keys"):
            ml("LabelEncoder", 4, [np.int64], keys_int64s=[1, 2], values_int64s=[5])(ints(1))

    def test_one_hot_encoder(self, ml, same):
        for x in (ints(1, -1, 5), np.array([[1.7, -1.2]], np.float32), np.array([1.0, 3.9], np.float64)):
            model = ml("OneHotEncoder", 1, [x], cats_int64s=[-1, 1, 3])
            same(model(x)[0], model.onnxruntime(x)[0])
        x = np.array([[1, -1]], np.int32)  # onnxruntime has no kernel for this type
        same(ml("OneHotEncoder", 1, [x], cats_int64s=[-1, 1])(x)[0], np.array([[[0, 1], [1, 0]]], np.float32))
        x = words("a", "c").reshape(1, 2)
        same(ml("OneHotEncoder", 1, [x], cats_strings=["a", "b"])(x)[0], np.array([[[1, 0], [0, 0]]], np.float32))
        with pytest.raises(RunError, match="'c'"):
            ml("OneHotEncoder", 1, [x], cats_strings=["a", "b"], zeros=0)(x)


def map_type(key, value):
    return helper.make_map_type_proto(key, helper.make_tensor_type_proto(value, []))


class TestMaps:
    @pytest.fixture
    def run(self, cpu_plugins):
        def run_node(op, kind, given, output, **attributes):
            node = helper.make_node(op, ["x"], ["y"], domain="ai.onnx.ml", **attributes)
            outputs = [helper.make_value_info("y", output)]
            graph = helper.make_graph([node], "g", [helper.make_value_info("x", kind)], outputs)
            imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 1)]
            model = helper.make_model(graph, opset_imports=imports, ir_version=8)
            before = model.SerializeToString()
            got = InferenceSession(model, providers=["cpu"], plugins=cpu_plugins).run(None, {"x": given})[0]
            assert model.SerializeToString() == before
            return got

        return run_node

    FLOATS = map_type(TensorProto.INT64, TensorProto.FLOAT)
    TENSOR = helper.make_tensor_type_proto(TensorProto.FLOAT, None)

    def test_zip_map(self, run):
        x = np.array([[1, 2], [0.5, 4]], np.float32)
        kind = helper.make_sequence_type_proto(self.FLOATS)
        assert run("ZipMap", self.TENSOR, x, kind, classlabels_int64s=[5, 7]) == [{5: 1.0, 7: 2.0}, {5: 0.5, 7: 4.0}]
        assert run("ZipMap", self.TENSOR, x, kind, classlabels_strings=["a", "b"])[1] == {"a": 0.5, "b": 4.0}
        assert run("ZipMap", self.TENSOR, x[0], kind, classlabels_int64s=[5, 7]) == [{5: 1.0, 7: 2.0}]
        assert run("ZipMap", self.TENSOR, x[:0], kind, classlabels_int64s=[5, 7]) == []
        with pytest.raises(RunError, match="3 labels"):
            run("ZipMap", self.TENSOR, x, kind, classlabels_int64s=[5, 7, 9])

    def test_dict_vectorizer(self, run, same):
        for key, value, given, vocabulary, dtype in (
            (TensorProto.STRING, TensorProto.FLOAT, {"a": 4.0, "c": 8.5}, {"string_vocabulary": ["a", "c", "b", "z"]}, np.float32),
            (TensorProto.STRING, TensorProto.DOUBLE, {"c": 8.5}, {"string_vocabulary": ["a", "c"]}, np.float64),
            (TensorProto.STRING, TensorProto.INT64, {"a": 4}, {"string_vocabulary": ["a", "c"]}, np.int64),
            (TensorProto.INT64, TensorProto.STRING, {7: "x"}, {"int64_vocabulary": [1, 7]}, object),
            (TensorProto.INT64, TensorProto.FLOAT, {}, {"int64_vocabulary": [1, 7]}, np.float32),
        ):
            output = helper.make_tensor_type_proto(dtype_to_onnx(np.dtype(dtype)), None)
            (names,) = vocabulary.values()
            want = np.array([given.get(name, "" if dtype is object else 0) for name in names], dtype)
            same(run("DictVectorizer", map_type(key, value), given, output, **vocabulary), want)
        with pytest.raises(RunError, match="lacks the key 'q'"):
            run("DictVectorizer", map_type(TensorProto.STRING, TensorProto.FLOAT), {"q": 1.0}, self.TENSOR, string_vocabulary=["a"])

    def test_cast_map(self, run, same):
        same(run("CastMap", self.FLOATS, {3: 1.5, 1: 2.0}, self.TENSOR), np.array([[2, 1.5]], np.float32))
        sparse = run("CastMap", self.FLOATS, {3: 1.5, 1: 2.0}, self.TENSOR, map_form="SPARSE", max_map=5)
        same(sparse, np.array([[0, 2, 0, 1.5, 0]], np.float32))
        integers = helper.make_tensor_type_proto(TensorProto.INT64, None)
        same(run("CastMap", self.FLOATS, {0: 1.9, 1: -2.9}, integers, cast_to="TO_INT64"), ints(1, -2).reshape(1, 2))
        text = helper.make_tensor_type_proto(TensorProto.STRING, None)
        same(run("CastMap", self.FLOATS, {0: 1.5}, text, cast_to="TO_STRING"), words("1.5").reshape(1, 1))
        strings = map_type(TensorProto.INT64, TensorProto.STRING)
        same(run("CastMap", strings, {0: "1.5", 2: "7"}, self.TENSOR), np.array([[1.5, 7]], np.float32))
        with pytest.raises(RunError, match="max_map"):
            run("CastMap", self.FLOATS, {5: 1.5}, self.TENSOR, map_form="SPARSE", max_map=5)

    def test_the_types_are_told(self, cpu_plugins):
        node = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[1, 2])
        kind = helper.make_sequence_type_proto(self.FLOATS)
        graph = helper.make_graph([node], "g", [helper.make_value_info("x", self.TENSOR)], [helper.make_value_info("y", kind)])
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=8)
        session = InferenceSession(model, providers=["cpu"], plugins=cpu_plugins)
        assert [arg.type for arg in session.get_outputs()] == ["seq(map(int64,tensor(float)))"]
