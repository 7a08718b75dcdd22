"""Ops on text, and TfIdfVectorizer, against onnxruntime and the reference evaluator."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from miniort.errors import KernelError, RunError


def words(*items):
    return np.array(items, object)


class TestStringConcat:
    def test_shapes(self, node, same, sample):
        for left, right in (((2, 3), (2, 3)), ((), ()), ((2, 1), (3,)), ((0, 2), (1,)), ((200, 100), (100,))):
            a, b = sample(object, left), sample(object, right, seed=1)
            want = np.array([x + y for x, y in zip(*(each.ravel() for each in np.broadcast_arrays(a, b)), strict=True)], object)
            same(node("StringConcat", 20, [a, b])(a, b)[0], want.reshape(np.broadcast_shapes(left, right)))


class TestStringSplit:
    @pytest.mark.parametrize("delimiter", [None, "", ".", ", ", "aa"])
    @pytest.mark.parametrize("maxsplit", [None, 0, 1, 2, 10])
    def test_against_the_reference(self, delimiter, maxsplit, node, same):
        x = words("a.b.c", "", "  a  b c ", "x, y, ", "aaaa", ".", "ä ö").reshape(1, 7)
        attributes = {"delimiter": delimiter, "maxsplit": maxsplit}
        attributes = {name: value for name, value in attributes.items() if value is not None}
        model = node("StringSplit", 20, [x], 2, **attributes)
        for got, want in zip(model(x), model.reference(x), strict=True):
            same(got, want)

    def test_nothing(self, node, same):
        for shape in ((0,), (2, 0)):
            x = np.zeros(shape, object)
            pieces, counts = node("StringSplit", 20, [x], 2, delimiter=",")(x)
            same(pieces, np.zeros((*shape, 0), object))
            same(counts, np.zeros(shape, np.int64))
        x = words("", " ")
        same(node("StringSplit", 20, [x])(x)[0], np.zeros((2, 0), object))
        scalar = np.array("a b", object)
        same(node("StringSplit", 20, [scalar])(scalar)[0], words("a", "b"))


class TestStringNormalizer:
    @pytest.mark.parametrize(("action", "sensitive"), list(product(("NONE", "LOWER", "UPPER"), (0, 1))))
    def test_against_onnxruntime(self, action, sensitive, node, same):
        for x in (words("Monday", "tuesday", "MONDAY", "Friday"), words("Monday", "monday").reshape(1, 2)):
            for stop_words in ((), ("monday",), ("Monday", "tuesday"), ("monday", "Monday", "MONDAY", "tuesday", "Friday")):
                attributes = {"case_change_action": action, "is_case_sensitive": sensitive, "locale": "C"}
                model = node("StringNormalizer", 10, [x], **attributes, **({"stopwords": stop_words} if stop_words else {}))
                same(model(x)[0], model.onnxruntime(x)[0])

    def test_unicode(self, node, same):
        x = words("École", "straße", "ÉCOLE")
        same(node("StringNormalizer", 10, [x], case_change_action="UPPER", stopwords=["école"])(x)[0], words("STRASSE"))
        same(node("StringNormalizer", 10, [x])(x)[0], x)

    def test_all_dropped(self, node, same):
        same(node("StringNormalizer", 10, [object], stopwords=["a"])(words("a", "A"))[0], words(""))
        same(node("StringNormalizer", 10, [object], stopwords=["a"])(words("a").reshape(1, 1))[0], words("").reshape(1, 1))
        with pytest.raises(RunError, match=r"\[C\] and \[1, C\]"):
            node("StringNormalizer", 10, [object])(words("a", "b").reshape(2, 1))


class TestRegexFullMatch:
    @pytest.mark.parametrize(
        "pattern",
        [
            r"www\.[\w.-]+\.\bcom\b",
            r"(\W|^)[\w.\-]{0,25}@(yahoo|gmail)\.com(\W|$)",
            "",
            "a*",
            ".+",
            r"\d+",
            "[[:alpha:]]+",
            "[^[:digit:]]+",
            r"\Qa.b\E",
            r"\Qa.b",
            r"abc\z",
            "(?i)ABC",
            r"\[:x:\]",
            r"(?s).+",
            r"(?P<name>a)b?",
        ],
    )
    def test_against_onnxruntime(self, pattern, node, same):
        x = words("www.google.com", "www.facebook.com", "www.bbc.co.uk", "account@gmail.com", "", "a", "aaa", "abc", "ABC", "a.b", "axb")
        x = np.append(x, words("12", "١٢", "ä", "a\nb", "a\n", "[:x:]", "ab", "3", "x y")).reshape(4, 5)
        model = node("RegexFullMatch", 20, [x], pattern=pattern)
        same(model(x)[0], model.onnxruntime(x)[0])

    def test_shapes_and_errors(self, node, same):
        same(node("RegexFullMatch", 20, [object], pattern="a")(np.array("a", object))[0], np.array(True))
        same(node("RegexFullMatch", 20, [object], pattern="a")(np.zeros((0, 2), object))[0], np.zeros((0, 2), bool))
        with pytest.raises(KernelError, match="can't be understood"):
            node("RegexFullMatch", 20, [object], pattern="(")(words("a"))


NUMBERS = {"pool_int64s": [2, 3, 5, 4, 5, 6, 7, 8, 6, 7, 2, 3, 5], "ngram_counts": [0, 4, 10], "ngram_indexes": [0, 1, 2, 3, 4, 5, 6, 7]}
WEIGHTS = [0.5, 2, 1, 3, 0.25, 4, 1, 5]


class TestTfIdfVectorizer:
    @pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
    @pytest.mark.parametrize("skips", [0, 1, 5])
    @pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 2), (1, 2), (1, 3), (3, 3)])
    def test_against_onnxruntime(self, mode, skips, shortest, longest, node, same):
        attributes = NUMBERS | {"mode": mode, "max_skip_count": skips, "min_gram_length": shortest, "max_gram_length": longest}
        generator = np.random.default_rng(0)
        for dtype in (np.int32, np.int64):
            for shape in ((12,), (3, 9), (2, 1)):
                x = generator.integers(2, 9, shape).astype(dtype)
                for weights in ({}, {"weights": WEIGHTS}):
                    model = node("TfIdfVectorizer", 9, [x], **attributes, **weights)
                    same(model(x)[0], model.onnxruntime(x)[0])

    def test_text(self, node, same):
        attributes = {"pool_strings": ["a", "b", "ä", "a", "b", "b", "c"], "ngram_counts": [0, 3], "ngram_indexes": [0, 4, 1, 3, 2]}
        x = words("a", "b", "c", "ä", "a", "b").reshape(2, 3)
        model = node("TfIdfVectorizer", 9, [x], mode="TF", max_skip_count=1, min_gram_length=1, max_gram_length=2, **attributes)
        same(model(x)[0], model.onnxruntime(x)[0])
        same(model(x.ravel())[0], model.onnxruntime(x.ravel())[0])

    def test_a_weight_belongs_to_its_n_gram(self, node, same):
        # The specification: weights[i] is that of the i-th n-gram of the pool. The reference evaluator takes it for that of output i, which
        # differs where ngram_indexes isn't 0, 1, 2, ...
        attributes = {"pool_int64s": [5, 6], "ngram_counts": [0], "ngram_indexes": [1, 0], "weights": [10.0, 100.0]}
        x = np.array([5, 5, 6])
        for mode, want in (("TFIDF", [100, 20]), ("IDF", [100, 10]), ("TF", [1, 2])):
            model = node("TfIdfVectorizer", 9, [x], mode=mode, max_skip_count=0, min_gram_length=1, max_gram_length=1, **attributes)
            same(model(x)[0], np.array(want, np.float32))
            same(model(x)[0], model.onnxruntime(x)[0])

    def test_nothing(self, node, same):
        attributes = NUMBERS | {"mode": "TF", "max_skip_count": 0, "min_gram_length": 1, "max_gram_length": 2}
        model = node("TfIdfVectorizer", 9, [np.int64], **attributes)
        same(model(np.zeros(0, np.int64))[0], np.zeros(8, np.float32))
        same(model(np.zeros((2, 0), np.int64))[0], np.zeros((2, 8), np.float32))
