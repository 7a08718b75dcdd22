"""Tree ensembles against a walk of one row through one tree at a time, and against onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from miniort.errors import KernelError

MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]
COMPARE = [np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal]


def floats(x):
    return np.asarray(x, np.float32)


@dataclass
class Trees:
    """Random trees, as the lists of TreeEnsembleClassifier and TreeEnsembleRegressor."""

    features: int
    outputs: int
    modes: tuple[int, ...] = (0,)
    votes: int = 1
    negative: bool = True
    nodes: list[tuple] = field(default_factory=list)  # tree, id, feature, value, mode, true, false, missing
    leaves: list[tuple] = field(default_factory=list)  # tree, id, output, weight

    def grow(self, rng, count, depth):
        for tree in range(count):
            self._grow(rng, tree, depth if tree % 2 else depth // 2, [0])
        return self

    def _grow(self, rng, tree, depth, next_id):
        number = next_id[0]
        next_id[0] += 1
        if depth == 0 or rng.random() < 0.15:
            self.nodes.append((tree, number, 0, 0.0, "LEAF", 0, 0, 0))
            for output in rng.permutation(self.outputs)[: self.votes]:
                self.leaves.append((tree, number, int(output), float(np.float32(rng.normal() if self.negative else rng.random()))))
            return number
        place = len(self.nodes)
        self.nodes.append(())
        true, false = self._grow(rng, tree, depth - 1, next_id), self._grow(rng, tree, depth - 1, next_id)
        value, mode = float(rng.integers(-3, 4)) / 2, MODES[rng.choice(self.modes)]
        self.nodes[place] = (tree, number, int(rng.integers(self.features)), value, mode, true, false, int(rng.integers(2)))
        return number

    def attributes(self, prefix, missing=True):
        names = ["treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids", "missing_value_tracks_true"]
        result = {f"nodes_{name}": list(column) for name, column in zip(names, zip(*self.nodes, strict=True), strict=True)}
        if not missing:
            del result["nodes_missing_value_tracks_true"]
        tree, node, output, weight = (list(column) for column in zip(*self.leaves, strict=True))
        return result | {f"{prefix}_treeids": tree, f"{prefix}_nodeids": node, f"{prefix}_ids": output, f"{prefix}_weights": weight}

    def walk(self, x, aggregate="SUM"):
        """[N, outputs], 0 where no leaf votes."""
        nodes = {node[:2]: node for node in self.nodes}
        votes = [[[] for _ in range(self.outputs)] for _ in x]
        trees = sorted({node[0] for node in self.nodes})
        for row, values in zip(x, votes, strict=True):
            for tree in trees:
                node = nodes[tree, 0]
                while node[4] != "LEAF":
                    value = row[node[2]]
                    taken = bool(node[7]) if np.isnan(value) else COMPARE[MODES.index(node[4])](value, np.float32(node[3]))
                    node = nodes[tree, node[5] if taken else node[6]]
                for leaf in self.leaves:
                    if leaf[:2] == node[:2]:
                        values[leaf[2]].append(leaf[3])
        reduce = {"SUM": sum, "AVERAGE": lambda v: sum(v) / len(trees), "MIN": min, "MAX": max}[aggregate]
        return np.array([[reduce(v) if v else 0 for v in row] for row in votes])


def rows(rng, features, count=30):
    x = floats(rng.integers(-4, 5, (count, features)) / 2)
    x[rng.random(x.shape) < 0.1] = np.nan
    return x


@pytest.mark.parametrize("modes", [(0,), (1,), (2,), (3,), (4,), (5,), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_regressor(modes, aggregate, ml, same):
    rng = np.random.default_rng(1)
    for outputs, votes in ((1, 1), (3, 1), (3, 2)):
        trees = Trees(4, outputs, modes, votes).grow(rng, 5, 4)
        x = rows(rng, 4)
        attributes = trees.attributes("target") | {"n_targets": outputs, "aggregate_function": aggregate}
        same(ml("TreeEnsembleRegressor", 1, [x], **attributes)(x)[0], floats(trees.walk(x, aggregate)), rtol=1e-5)
        base = [0.5, -1.0, 2.0][:outputs]
        got = ml("TreeEnsembleRegressor", 3, [x], base_values=base, **attributes)(x)[0]
        same(got, floats(trees.walk(x, aggregate) + base), rtol=1e-5)


def test_regressor_against_onnxruntime(ml, same):
    rng = np.random.default_rng(2)
    for count in (1, 20):
        trees = Trees(6, 1).grow(rng, count, 7)
        x = rows(rng, 6, 200)
        for version in (1, 3):
            model = ml("TreeEnsembleRegressor", version, [x], n_targets=1, base_values=[0.5], **trees.attributes("target"))
            same(model(x)[0], model.onnxruntime(x)[0], rtol=1e-5, atol=1e-5)


def test_types_and_doubles(ml, same):
    rng = np.random.default_rng(3)
    trees = Trees(3, 1).grow(rng, 4, 4)
    attributes = trees.attributes("target") | {"n_targets": 1}
    for dtype in (np.float32, np.float64, np.int64, np.int32):
        x = rng.integers(-3, 4, (20, 3)).astype(dtype)
        same(ml("TreeEnsembleRegressor", 3, [x], **attributes)(x)[0], floats(trees.walk(x.astype(np.float64))), rtol=1e-5)
    tensors = {"nodes_values", "target_weights"}
    doubles = {f"{name}_as_tensor" if name in tensors else name: np.array(v) if name in tensors else v for name, v in attributes.items()}
    x = rng.integers(-3, 4, (20, 3)).astype(np.float64) / 2
    for version in (3, 5):
        got = ml("TreeEnsembleRegressor", version, [x], base_values_as_tensor=np.array([0.25]), **doubles)(x)[0]
        same(got, floats(trees.walk(x) + 0.25), rtol=1e-5)
    fine = np.nextafter(0.5, 1)  # a threshold that float32 doesn't have
    one = Trees(1, 1, nodes=[(0, 0, 0, 0.5, MODES[0], 1, 2, 0), (0, 1, 0, 0.0, "LEAF", 0, 0, 0), (0, 2, 0, 0.0, "LEAF", 0, 0, 0)])
    one.leaves = [(0, 1, 0, 1.0), (0, 2, 0, 2.0)]
    doubles = one.attributes("target") | {"n_targets": 1}
    del doubles["nodes_values"]
    x = np.array([[0.5], [fine], [np.nextafter(fine, 1)]])
    same(ml("TreeEnsembleRegressor", 3, [x], nodes_values_as_tensor=np.array([fine, 0, 0]), **doubles)(x)[0], floats([[1], [1], [2]]))


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("labels", [{"classlabels_int64s": [5, 7, 9]}, {"classlabels_strings": ["a", "b", "ä"]}])
def test_classifier_of_three(transform, labels, ml, same):
    rng = np.random.default_rng(4)
    for votes in (1, 3):
        trees = Trees(4, 3, votes=votes).grow(rng, 9, 4)
        x = rows(rng, 4, 60)
        for base in ({}, {"base_values": [0.5, 0.25, -0.5]}):
            model = ml("TreeEnsembleClassifier", 3, [x], 2, post_transform=transform, **trees.attributes("class"), **labels, **base)
            for got, want in zip(model(x), model.onnxruntime(x), strict=True):
                same(got, np.asarray(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("negative", [True, False])
@pytest.mark.parametrize("labels", [{"classlabels_int64s": [5, 7]}, {"classlabels_strings": ["a", "b"]}])
def test_classifier_with_one_score(negative, labels, ml, same):
    """Boosted trees: two labels, all votes for the first."""
    rng = np.random.default_rng(5)
    trees = Trees(4, 1, negative=negative).grow(rng, 1, 4)
    x = rows(rng, 4, 60)
    for base in ({}, {"base_values": [-0.25]}):
        if base and not negative:
            continue
        for transform in ("NONE", "LOGISTIC"):
            model = ml("TreeEnsembleClassifier", 1, [x], 2, post_transform=transform, **trees.attributes("class"), **labels, **base)
            (got_labels, got), (want_labels, want) = model(x), model.onnxruntime(x)
            same(got, want, rtol=1e-5)
            if negative or transform == "NONE":
                same(got_labels, np.asarray(want_labels))
            else:
                # onnxruntime compares the logit with 0.5 here, so its label isn't that of the larger score, "the top class".
                names = np.array(next(iter(labels.values())), got_labels.dtype)
                same(got_labels, names[got.argmax(1)])


def test_classifier_of_two_with_votes_for_both(ml, same):
    # onnxruntime gives 1 or 0 for the label, by the sign of the second score; the specification wants the top class.
    rng = np.random.default_rng(6)
    trees = Trees(4, 2, votes=2, negative=False).grow(rng, 7, 4)
    x = rows(rng, 4, 60)
    labels, scores = ml("TreeEnsembleClassifier", 1, [x], 2, classlabels_int64s=[5, 7], **trees.attributes("class"))(x)
    same(scores, floats(trees.walk(x)), rtol=1e-5)
    same(labels, np.array([5, 7])[scores.argmax(1)])


SPLIT = {"nodes_splits": floats([0.5, 1.5]), "nodes_featureids": [0, 1], "nodes_modes": np.array([0, 0], np.uint8)}
CHILDREN = {"nodes_truenodeids": [0, 1], "nodes_trueleafs": [1, 1], "nodes_falsenodeids": [1, 2], "nodes_falseleafs": [0, 1]}
LEAVES = {"leaf_targetids": [0, 1, 0], "leaf_weights": floats([1, 2, 4]), "tree_roots": [0], "n_targets": 2}


class TestTreeEnsemble:
    def test_types_and_transforms(self, ml, same):
        for dtype in (np.float32, np.float64, np.float16):
            x = np.array([[0, 0], [1, 1], [1, 2], [np.nan, 9]], dtype)
            want = np.array([[1, 0], [0, 2], [4, 0], [4, 0]], dtype)
            tensors = {"nodes_splits": SPLIT["nodes_splits"].astype(dtype), "leaf_weights": LEAVES["leaf_weights"].astype(dtype)}
            attributes = SPLIT | CHILDREN | LEAVES | tensors
            for aggregate in (0, 1, 2, 3):
                same(ml("TreeEnsemble", 5, [x], aggregate_function=aggregate, **attributes)(x)[0], want)
            got = ml("TreeEnsemble", 5, [x], post_transform=2, **attributes)(x)[0]
            same(got, (1 / (1 + np.exp(-want.astype(np.float64)))).astype(dtype))

    def test_missing_values(self, ml, same):
        x = floats([[np.nan, 0], [1, np.nan]])
        model = ml("TreeEnsemble", 5, [x], nodes_missing_value_tracks_true=[1, 0], **SPLIT, **CHILDREN, **LEAVES)
        same(model(x)[0], floats([[1, 0], [4, 0]]))
        same(model(x)[0], floats(model.onnxruntime(x)[0]))

    def test_set_membership(self, ml, same):
        x = floats([[1], [2], [3], [4], [10], [np.nan]])
        attributes = {
            "nodes_splits": floats([0, 0, 3.5]),
            "nodes_featureids": [0, 0, 0],
            "nodes_modes": np.array([6, 6, 0], np.uint8),
            "nodes_truenodeids": [0, 1, 2],
            "nodes_trueleafs": [1, 1, 1],
            "nodes_falsenodeids": [1, 2, 3],
            "nodes_falseleafs": [0, 0, 1],
            "leaf_targetids": [0, 1, 2, 3],
            "leaf_weights": floats([1, 10, 1000, 100]),
            "tree_roots": [0],
            "n_targets": 4,
        }
        nan = np.nan
        want = floats([[1, 0, 0, 0], [0, 10, 0, 0], [0, 0, 1000, 0], [0, 10, 0, 0], [1, 0, 0, 0], [0, 0, 0, 100]])
        for members in ([1, 10, nan, 2, 4, nan], [1, 10, nan, 2, 4]):  # the last NaN may be missing
            same(ml("TreeEnsemble", 5, [x], membership_values=floats(members), **attributes)(x)[0], want)
        with pytest.raises(KernelError, match="members"):
            ml("TreeEnsemble", 5, [x], membership_values=floats([1]), **attributes)(x)

    def test_a_tree_that_is_a_leaf(self, ml, same):
        x = floats([[1], [2]])
        attributes = {"nodes_splits": floats([0]), "nodes_featureids": [0], "nodes_modes": np.array([0], np.uint8)}
        attributes |= {f"nodes_{branch}{what}": [n] for branch in ("true", "false") for what, n in (("nodeids", 0), ("leafs", 1))}
        model = ml("TreeEnsemble", 5, [x], leaf_targetids=[0], leaf_weights=floats([3]), tree_roots=[0], **attributes)
        same(model(x)[0], floats([[3], [3]]))
        assert model(x[:0])[0].shape == (0, 1)

    def test_nodes_that_make_no_tree(self, ml):
        x = floats([[1, 1]])
        for wrong in ({"nodes_falsenodeids": [0, 2]}, {"nodes_falsenodeids": [7, 2]}):
            with pytest.raises(KernelError, match=r"cycle|isn't there"):
                ml("TreeEnsemble", 5, [x], **(SPLIT | CHILDREN | LEAVES | wrong))(x)
