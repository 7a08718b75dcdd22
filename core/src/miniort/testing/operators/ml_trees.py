"""Builders of tree ensembles."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_float, onnx_tensor
from miniort.testing.operators.ml_linear import POST_TRANSFORMS, classified, labels, transformed
from miniort.types import Array, DType

DOMAIN = "ai.onnx.ml"
MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]
TRACKS = "nodes_missing_value_tracks_true"
AGGREGATES = ["AVERAGE", "SUM", "MIN", "MAX"]


@dataclass
class TreeNode:
    """A node of a tree; its children by their place in the tree. Leaves have the mode LEAF."""

    mode: str
    feature: int
    split: float
    tracks_true: int
    true: int = 0
    false: int = 0
    members: list[float] = field(default_factory=list)


def grow(d: Draws, features: int, modes: list[str], depth: int, tree: list[TreeNode]) -> int:
    """Add a tree of at most that depth, its root first; gives the root's place."""
    leaf = depth == 0 or (len(tree) > 0 and d.integer(0, 2) == 0)
    place = len(tree)
    mode = "LEAF" if leaf else d.choice(modes)
    tree.append(TreeNode(mode, d.integer(0, features - 1), d.integer(-4, 4) / 2, d.integer(0, 1)))
    if not leaf:
        tree[place].true = grow(d, features, modes, depth - 1, tree)
        tree[place].false = grow(d, features, modes, depth - 1, tree)
    return place


def forest(d: Draws, features: int, modes: list[str], least_depth: int = 0) -> list[list[TreeNode]]:
    """One to three trees; all nodes in one mode, or each in its own."""
    modes = [d.choice(modes)] if d.boolean() else modes
    trees = []
    for _ in range(d.integer(1, 3)):
        tree: list[TreeNode] = []
        grow(d, features, modes, d.integer(least_depth, 3), tree)
        trees.append(tree)
    return trees


def samples(d: Draws, dtype: DType) -> Array:
    """Features [N, F], in halves so that they're equal to splits now and then, with NaN among them."""
    shape = d.shape(2, 2, min_size=1)
    x = d.rng().integers(-5, 6, shape) / 2
    if is_float(dtype) and d.boolean():
        x[d.integer(0, shape[0] - 1), d.integer(0, shape[1] - 1)] = np.nan
    return x.astype(dtype)


COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "BRANCH_LEQ": operator.le,
    "BRANCH_LT": operator.lt,
    "BRANCH_GTE": operator.ge,
    "BRANCH_GT": operator.gt,
    "BRANCH_EQ": operator.eq,
    "BRANCH_NEQ": operator.ne,
}


def leaf_of(tree: list[TreeNode], row: Array, tracks_true: bool) -> int:
    """Where a row of features ends in a tree; a missing feature goes the false way, or as a node says if `tracks_true`."""
    place = 0
    while tree[place].mode != "LEAF":
        node, value = tree[place], float(row[tree[place].feature])
        holds = value in node.members if node.mode == "BRANCH_MEMBER" else COMPARISONS[node.mode](value, node.split)
        if np.isnan(value):
            holds = tracks_true and bool(node.tracks_true)
        place = node.true if holds else node.false
    return place


def aggregated(votes: list[list[float]], aggregate: str, trees: int) -> Array:
    """One number for each target from the votes for it, 0 where there's none."""
    if aggregate in ("MIN", "MAX"):
        return np.array([(min if aggregate == "MIN" else max)(each, default=0.0) for each in votes])
    return np.array([sum(each) for each in votes]) / (trees if aggregate == "AVERAGE" else 1)


def ensemble_scores(
    x: Array, trees: list[list[TreeNode]], votes: list[tuple[int, int, int, float]], targets: int, aggregate: str, tracks_true: bool
) -> Array:
    """What the leaves that each row ends in give each target, before base values. votes: tree, node, target, weight. -> [N, targets]."""
    scores = []
    for row in x:
        reached = {(number, leaf_of(tree, row, tracks_true)) for number, tree in enumerate(trees)}
        cast: list[list[float]] = [[] for _ in range(targets)]
        for number, place, target, weight in votes:
            if (number, place) in reached:
                cast[target].append(weight)
        scores.append(aggregated(cast, aggregate, len(trees)))
    return np.array(scores)


def node_attributes(d: Draws, trees: list[list[TreeNode]]) -> dict[str, Any]:
    """The attributes that versions 1 and 3 of classifier and regressor have for nodes."""
    nodes = [(number, place, node) for number, tree in enumerate(trees) for place, node in enumerate(tree)]
    attributes: dict[str, Any] = {
        "nodes_treeids": [number for number, _, _ in nodes],
        "nodes_nodeids": [place for _, place, _ in nodes],
        "nodes_featureids": [node.feature for *_, node in nodes],
        "nodes_modes": [node.mode for *_, node in nodes],
        "nodes_values": [node.split for *_, node in nodes],
        "nodes_truenodeids": [node.true for *_, node in nodes],
        "nodes_falsenodeids": [node.false for *_, node in nodes],
    }
    return attributes | d.some(nodes_missing_value_tracks_true=[node.tracks_true for *_, node in nodes], nodes_hitrates=[1.0] * len(nodes))


def leaf_attributes(d: Draws, trees: list[list[TreeNode]], prefix: str, count: int, weights: tuple[int, int] = (-8, 8)) -> dict[str, Any]:
    """Votes of leaves: one or more of each, for any of `count` targets or classes, and for each of these at least once."""
    votes: list[tuple[int, int, int, float]] = []
    for number, tree in enumerate(trees):
        for place, node in enumerate(tree):
            if node.mode == "LEAF":
                targets = d.permutation(range(count))[: d.integer(1, count) if votes else count]
                votes += [(number, place, target, d.integer(*weights) / 4) for target in targets]
    return {
        f"{prefix}_treeids": [number for number, *_ in votes],
        f"{prefix}_nodeids": [place for _, place, *_ in votes],
        f"{prefix}_ids": [target for *_, target, _ in votes],
        f"{prefix}_weights": [weight for *_, weight in votes],
    }


def in_double(attributes: dict[str, Any]) -> dict[str, Any]:
    """With the tensors of version 3 in the place of floats."""
    names = ["nodes_values", "nodes_hitrates", "target_weights", "class_weights", "base_values"]
    return {
        f"{name}_as_tensor" if name in names else name: onnx_tensor(name, np.array(value, np.float64)) if name in names else value
        for name, value in attributes.items()
    }


@builds("TreeEnsembleRegressor", domain=DOMAIN)
def tree_ensemble_regressor(d: Draws, version: Operator) -> NodeCase:
    """x [N, F] -> [N, targets]."""
    x = samples(d, d.dtype(version))
    targets = d.integer(1, 3)
    trees = forest(d, x.shape[1], MODES)
    attributes = node_attributes(d, trees) | leaf_attributes(d, trees, "target", targets) | {"n_targets": targets}
    attributes |= d.some(
        aggregate_function=d.choice(AGGREGATES),
        post_transform=d.choice(POST_TRANSFORMS),
        base_values=[d.integer(-4, 4) / 4 for _ in range(targets)],
    )
    votes = list(zip(*(attributes[f"target_{name}"] for name in ("treeids", "nodeids", "ids", "weights")), strict=True))
    scores = ensemble_scores(x, trees, votes, targets, attributes.get("aggregate_function", "SUM"), TRACKS in attributes)
    scores = scores + np.array(attributes.get("base_values", 0.0))
    name = attributes.get("post_transform", "NONE")
    written = in_double(attributes) if version.version >= 3 and x.dtype == np.float64 else attributes
    return NodeCase([x], written, expected=lambda inputs: [transformed(scores, name)])


@builds("TreeEnsembleClassifier", domain=DOMAIN)
def tree_ensemble_classifier(d: Draws, version: Operator) -> NodeCase:
    """x [N, F] -> label [N], scores [N, classes]; two classes may be told by the votes for one."""
    x = samples(d, d.dtype(version, "T1"))
    classes = d.integer(2, 4)
    trees = forest(d, x.shape[1], MODES)
    signs = (-8, 8) if d.boolean() else (1, 8)
    voted = 1 if classes == 2 and d.boolean() else classes
    attributes = node_attributes(d, trees) | leaf_attributes(d, trees, "class", voted, signs) | labels(d, classes, "classlabels_int64s")
    if voted == 1:
        attributes["class_weights"] = [abs(weight) for weight in attributes["class_weights"]]
    attributes |= d.some(post_transform=d.choice(POST_TRANSFORMS))
    if voted > 1:
        attributes |= d.some(base_values=[d.integer(-4, 4) / 4 for _ in range(classes)])
    case = NodeCase([x], in_double(attributes) if version.version >= 3 and x.dtype == np.float64 else attributes, 2)
    if voted > 1:
        votes = list(zip(*(attributes[f"class_{name}"] for name in ("treeids", "nodeids", "ids", "weights")), strict=True))
        scores = ensemble_scores(x, trees, votes, classes, "SUM", TRACKS in attributes) + np.array(attributes.get("base_values", 0.0))
        case.expected = lambda inputs: classified(scores, attributes)
    return case


@builds("TreeEnsemble", domain=DOMAIN)
def tree_ensemble(d: Draws, version: Operator) -> NodeCase:
    """x [N, F] -> [N, targets]; nodes and leaves apart, and nodes that ask for one of a set."""
    x = samples(d, d.dtype(version))
    targets = d.integer(1, 3)
    modes = [*MODES, "BRANCH_MEMBER"]
    trees = forest(d, x.shape[1], modes, least_depth=1)
    nodes: list[TreeNode] = []
    places: dict[tuple[int, int], tuple[int, int]] = {}  # of tree and node: whether it's a leaf, and which
    leaves = 0
    for number, tree in enumerate(trees):
        for place, node in enumerate(tree):
            if node.mode == "LEAF":
                places[number, place] = (1, leaves)
                leaves += 1
            else:
                places[number, place] = (0, len(nodes))
                nodes.append(node)
    inner = [(number, node) for number, tree in enumerate(trees) for node in tree if node.mode != "LEAF"]
    true = [places[number, node.true] for number, node in inner]
    false = [places[number, node.false] for number, node in inner]
    members: list[float] = []
    for _, node in inner:
        if node.mode == "BRANCH_MEMBER":
            node.members = [d.integer(-4, 4) / 2 for _ in range(d.integer(1, 3))]
            members += [*node.members, float("nan")]
    chosen = [d.integer(0, targets - 1) for _ in range(leaves)]
    weights = [d.integer(-8, 8) / 4 for _ in range(leaves)]
    attributes: dict[str, Any] = {
        "tree_roots": [places[number, 0][1] for number in range(len(trees))],
        "n_targets": targets,
        "nodes_featureids": [node.feature for node in nodes],
        "nodes_modes": onnx_tensor("modes", np.array([modes.index(node.mode) for node in nodes], np.uint8)),
        "nodes_splits": onnx_tensor("splits", np.array([node.split for node in nodes], x.dtype)),
        "nodes_truenodeids": [place for _, place in true],
        "nodes_trueleafs": [leaf for leaf, _ in true],
        "nodes_falsenodeids": [place for _, place in false],
        "nodes_falseleafs": [leaf for leaf, _ in false],
        "leaf_targetids": chosen,
        "leaf_weights": onnx_tensor("weights", np.array(weights, x.dtype)),
    }
    if members:
        attributes["membership_values"] = onnx_tensor("members", np.array(members, x.dtype))
    attributes |= d.some(
        nodes_missing_value_tracks_true=[node.tracks_true for node in nodes],
        aggregate_function=d.integer(0, 3),
        post_transform=d.integer(0, 3),
    )
    votes = [(*key, chosen[leaf], weights[leaf]) for key, (is_leaf, leaf) in places.items() if is_leaf]
    scores = ensemble_scores(x, trees, votes, targets, AGGREGATES[attributes.get("aggregate_function", 1)], TRACKS in attributes)
    name = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"][attributes.get("post_transform", 0)]
    return NodeCase([x], attributes, expected=lambda inputs: [transformed(scores, name).astype(x.dtype)])
