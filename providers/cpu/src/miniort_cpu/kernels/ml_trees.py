"""Ensembles of decision trees, of the domain ai.onnx.ml: TreeEnsemble, TreeEnsembleClassifier, TreeEnsembleRegressor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array, IntArray
from miniort_cpu.class_scores import class_labels, label_of_sign, post_transform, top_label, two_columns
from miniort_cpu.floating_point import FLOAT32, FLOAT64

kernels = KernelTable("cpu")

DOMAIN = "ai.onnx.ml"

COMPARISONS = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)
"""How a node of mode 0 to 5 compares a feature with its threshold."""

NOT_EQUAL = 5
"""The mode whose comparison holds for NaN; a missing feature goes the false way nonetheless, if the node doesn't say otherwise."""

MEMBER = 6
"""The mode of a node that asks whether a feature is one of a set of numbers."""

MODES = {"BRANCH_LEQ": 0, "BRANCH_LT": 1, "BRANCH_GTE": 2, "BRANCH_GT": 3, "BRANCH_EQ": 4, "BRANCH_NEQ": 5, "LEAF": 0}

AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
"""The names of `aggregate_function`, in the order of TreeEnsemble's numbers."""

BLOCK = 1 << 15
"""Pairs of a row and a tree that are walked at once: few enough that what belongs to them stays in the cache."""


@dataclass(frozen=True)
class Forest:
    """All nodes of all trees in one numbering; a leaf is a node that is its own child. The first six have one entry a node."""

    feature: IntArray
    threshold: Array
    mode: IntArray
    children: IntArray  # [2 · nodes]: of node i the child if false at 2i, if true at 2i + 1
    missing_is_true: Array
    member_set: IntArray  # row of `members`
    members: Array  # [sets, most members of any], filled up with NaN
    roots: IntArray  # [trees]
    depth: int

    def leaves(self, x: Array) -> IntArray:
        """The leaf that each row reaches in each tree, all of them one level down at a time. x: [N, F] -> [N, trees]."""
        if x.dtype != self.threshold.dtype:
            x = x.astype(FLOAT64)
        node = np.empty((len(x), self.roots.size), np.intp)
        node[...] = self.roots
        rows = np.arange(len(x))[:, None]
        modes = np.unique(self.mode).tolist()
        for _ in range(self.depth):
            value = x[rows, self.feature[node]]
            if len(modes) == 1 and modes[0] != MEMBER:
                taken = COMPARISONS[modes[0]](value, self.threshold[node])
            else:
                taken = self._mixed(node, value, modes)
            if NOT_EQUAL in modes or self.missing_is_true.any():
                taken = np.where(np.isnan(value), self.missing_is_true[node], taken)
            node = self.children[2 * node + taken]
        return node

    def _mixed(self, node: IntArray, value: Array, modes: Sequence[int]) -> Array:
        """Which comparisons hold, where the nodes are of several modes. node, value: [N, trees] -> same shape, bool."""
        taken = np.zeros(node.shape, np.bool_)
        threshold, kinds = self.threshold[node], self.mode[node]
        for mode in modes:
            chosen = kinds == mode
            if mode == MEMBER:
                sets = self.members[self.member_set[node[chosen]]]
                taken[chosen] = (value[chosen][:, None] == sets).any(1)
            else:
                taken |= chosen & COMPARISONS[mode](value, threshold)
        return taken


def forest(
    node: NodeView,
    feature: Any,
    threshold: Array,
    mode: IntArray,
    false: IntArray,
    true: IntArray,
    missing: Any,
    roots: IntArray,
    sets: Any,
) -> Forest:
    """A forest from its nodes' fields. KernelError if the nodes don't make trees.

    false, true: the children, a leaf's are itself; sets: the numbers of each node of mode MEMBER, in order of the nodes.
    """
    count = len(mode)
    children = np.stack((false, true), 1)
    if min(children.min(initial=0), roots.min(initial=0)) < 0 or max(children.max(initial=-1), roots.max(initial=-1)) >= count:
        raise KernelError(f"node {node.name!r} ({node.op}): a tree refers to a node that isn't there")
    is_own_child = children == np.arange(count)[:, None]
    if (is_own_child[:, 0] != is_own_child[:, 1]).any():
        raise KernelError(f"node {node.name!r} ({node.op}): its trees have a cycle")
    level, depth = np.unique(roots), 0
    while (inner := level[children[level, 0] != level]).size:
        level, depth = np.unique(children[inner]), depth + 1
        if depth > count:
            raise KernelError(f"node {node.name!r} ({node.op}): its trees have a cycle")
    member_set = np.zeros(count, np.intp)
    member_set[mode == MEMBER] = np.arange(np.count_nonzero(mode == MEMBER))
    members = np.full((len(sets), max(map(len, sets), default=0)), np.nan, threshold.dtype)
    for row, numbers in zip(members, sets, strict=True):
        row[: len(numbers)] = numbers
    return Forest(
        feature=np.asarray(feature, np.intp),
        threshold=threshold,
        mode=mode,
        children=children.reshape(-1),
        missing_is_true=np.asarray(missing, np.bool_) if len(missing) else np.zeros(count, np.bool_),
        member_set=member_set,
        members=members,
        roots=roots,
        depth=depth,
    )


@dataclass(frozen=True)
class Votes:
    """What leaves add to the scores: up to K targets each, of the number -1 where it's fewer. target, weight: [nodes, K]."""

    target: IntArray
    weight: Array
    targets: int

    def sum(self, leaf: IntArray) -> Array:
        """The sum of all votes for each target. leaf: [N, trees] -> [N, targets] float64."""
        total = np.zeros(len(leaf) * self.targets)
        rows = np.arange(len(leaf))[:, None] * self.targets
        for target, weight in zip(self.target.T, self.weight.T, strict=True):
            places = rows + np.maximum(target[leaf], 0)  # what is no vote has weight 0
            total += np.bincount(places.ravel(), weight[leaf].ravel(), total.size)
        return total.reshape(len(leaf), self.targets)

    def extreme(self, leaf: IntArray, ufunc: Any, start: float) -> Array:
        """The smallest or largest vote for each target, 0 where there is none. leaf: [N, trees] -> [N, targets] float64."""
        best = np.full(len(leaf) * self.targets, start)
        rows = np.arange(len(leaf))[:, None] * self.targets
        for target, weight in zip(self.target.T, self.weight.T, strict=True):
            voted = target[leaf] >= 0
            ufunc.at(best, (rows + target[leaf])[voted], weight[leaf][voted])
        return np.where(best == start, 0, best).reshape(len(leaf), self.targets)

    def aggregate(self, leaf: IntArray, function: str) -> Array:
        """The votes for each target by AVERAGE (over all trees), SUM, MIN or MAX. leaf: [N, trees] -> [N, targets] float64."""
        if function == "MIN":
            return self.extreme(leaf, np.minimum, np.inf)
        if function == "MAX":
            return self.extreme(leaf, np.maximum, -np.inf)
        total = self.sum(leaf)
        return total / leaf.shape[1] if function == "AVERAGE" else total


def votes(leaf: IntArray, target: IntArray, weight: Array, nodes: int, targets: int) -> Votes:
    """Votes from one entry a vote. leaf, target, weight: [entries]; nodes: how many the forest has."""
    order = np.argsort(leaf, kind="stable")
    leaf, target, weight = leaf[order], target[order], weight[order]
    counts = np.bincount(leaf, minlength=nodes)
    place = np.arange(leaf.size) - (np.cumsum(counts) - counts)[leaf]
    width = int(counts.max(initial=0))
    targets_of, weights_of = np.full((nodes, width), -1, np.intp), np.zeros((nodes, width))
    targets_of[leaf, place] = target
    weights_of[leaf, place] = weight
    return Votes(targets_of, weights_of, targets)


def _scores(trees: Forest, ballots: Votes, function: str, x: Array) -> Array:
    """The aggregated votes of every row. x: [N, F] -> [N, targets] float64."""
    rows = max(BLOCK // max(trees.roots.size, 1), 1)
    blocks = [ballots.aggregate(trees.leaves(x[start : start + rows]), function) for start in range(0, len(x), rows)]
    return np.concatenate(blocks) if blocks else np.zeros((0, ballots.targets))


def _either(node: NodeView, name: str) -> Array:
    """A list of floats that may be given as a tensor of doubles instead, as `name`_as_tensor; empty without both."""
    tensor = node.attribute(f"{name}_as_tensor", None)
    return np.array(node.attribute(name, ()), FLOAT32) if tensor is None else np.asarray(tensor)


def _listed_forest(node: NodeView) -> tuple[Forest, dict[tuple[int, int], int]]:
    """The forest of a TreeEnsembleClassifier or -Regressor, and the number of each node by its tree's and its own id."""
    ids = list(zip(node.attribute("nodes_treeids"), node.attribute("nodes_nodeids"), strict=True))
    numbers = {key: number for number, key in enumerate(ids)}
    names: tuple[str, ...] = node.attribute("nodes_modes")
    unknown = sorted(set(names) - MODES.keys())
    if unknown:
        raise KernelError(f"node {node.name!r} ({node.op}): nodes_modes are {', '.join(MODES)}; found {unknown[0]!r}")

    def children(attribute: str) -> IntArray:
        given = zip(ids, names, node.attribute(attribute), strict=True)
        try:
            return np.array([numbers[key] if name == "LEAF" else numbers[key[0], child] for key, name, child in given], np.intp)
        except KeyError as error:
            raise KernelError(f"node {node.name!r} ({node.op}): {attribute} names node {error}, which isn't there") from None

    first: dict[int, int] = {}
    for number, (tree, _) in enumerate(ids):
        first.setdefault(tree, number)
    made = forest(
        node,
        feature=node.attribute("nodes_featureids"),
        threshold=_either(node, "nodes_values"),
        mode=np.array([MODES[name] for name in names], np.intp),
        false=children("nodes_falsenodeids"),
        true=children("nodes_truenodeids"),
        missing=node.attribute("nodes_missing_value_tracks_true", ()),
        roots=np.array(list(first.values()), np.intp),
        sets=[],
    )
    return made, numbers


def _listed_votes(node: NodeView, prefix: str, numbers: dict[tuple[int, int], int], targets: int) -> Votes:
    """The votes of a TreeEnsembleClassifier (`class_...`) or -Regressor (`target_...`)."""
    keys = zip(node.attribute(f"{prefix}_treeids"), node.attribute(f"{prefix}_nodeids"), strict=True)
    return votes(
        leaf=np.array([numbers[key] for key in keys], np.intp),
        target=np.array(node.attribute(f"{prefix}_ids"), np.intp),
        weight=_either(node, f"{prefix}_weights").astype(FLOAT64),
        nodes=len(numbers),
        targets=targets,
    )


@kernels.register("TreeEnsembleRegressor", versions=(1, None), domain=DOMAIN)
def tree_ensemble_regressor(node: NodeContext) -> Run:
    """For each target the votes of the leaves that a row reaches, aggregated, plus its base value, transformed.

    x: [N, F] numbers -> [N, targets] float32
    """
    trees, numbers = _listed_forest(node)
    ballots = _listed_votes(node, "target", numbers, node.attribute("n_targets", 1))
    base = _either(node, "base_values").astype(FLOAT64)
    function = node.attribute("aggregate_function", "SUM")
    _check_aggregate(node, function)
    _, transform = post_transform(node)

    def run(x: Array) -> Array:
        scores = _scores(trees, ballots, function, np.atleast_2d(x))
        return transform(scores + base if base.size else scores).astype(FLOAT32)

    return run


def _check_aggregate(node: NodeView, function: str) -> None:
    if function not in AGGREGATES:
        raise KernelError(f"node {node.name!r} ({node.op}): aggregate_function must be one of {', '.join(AGGREGATES)}, found {function!r}")


@kernels.register("TreeEnsembleClassifier", versions=(1, None), domain=DOMAIN)
def tree_ensemble_classifier(node: NodeContext) -> Run:
    """The class with most votes from the leaves that a row reaches, and the classes' votes plus base values, transformed.

    Where there are two classes and all votes are for the first, they are the second's score s: onnxruntime reads such models, which
    exporters of boosted trees write, like this. The first's is 1 - s if no vote is negative, else -s.

    x: [N, F] numbers -> labels [N], scores [N, classes] float32
    """
    trees, numbers = _listed_forest(node)
    labels = class_labels(node, "classlabels_int64s", "classlabels_strings")
    ballots = _listed_votes(node, "class", numbers, max(labels.size, 1))
    base = _either(node, "base_values").astype(FLOAT64)
    name, transform = post_transform(node)
    second_only = labels.size == 2 and set(node.attribute("class_ids")) == {0}
    probabilities = bool((ballots.weight >= 0).all())

    def run(x: Array) -> tuple[Array, Array]:
        scores = _scores(trees, ballots, "SUM", np.atleast_2d(x))
        if second_only:
            scores = two_columns(scores[:, :1] + (base[-1] if base.size else 0), name, probabilities)
        elif base.size:
            scores = scores + base
        winners = top_label(scores, labels) if labels.size > 1 else label_of_sign(scores, labels)
        return winners, transform(scores).astype(FLOAT32)

    return run


@kernels.register("TreeEnsemble", versions=(5, None), domain=DOMAIN)
def tree_ensemble(node: NodeContext) -> Run:
    """For each target the votes of the leaves that a row reaches, aggregated and transformed.

    x: [N, F] float -> [N, targets], of x's dtype
    """
    modes: Array = np.asarray(node.attribute("nodes_modes"), np.intp)
    inner, weights = len(modes), np.asarray(node.attribute("leaf_weights"))
    leaves = inner + np.arange(len(weights))

    def children(branch: str) -> IntArray:
        ids, is_leaf = np.array(node.attribute(f"nodes_{branch}nodeids"), np.intp), np.array(node.attribute(f"nodes_{branch}leafs"))
        return np.concatenate((np.where(is_leaf, ids + inner, ids), leaves))

    def with_leaves(values: Any) -> Array:
        return np.concatenate((values, np.zeros(len(leaves), np.asarray(values).dtype)))

    missing = node.attribute("nodes_missing_value_tracks_true", ())
    splits = np.asarray(node.attribute("nodes_splits"))
    trees = forest(
        node,
        feature=with_leaves(node.attribute("nodes_featureids")),
        threshold=with_leaves(splits),
        mode=np.concatenate((modes, np.full(len(leaves), modes[0] if inner and modes[0] != MEMBER else 0))),
        false=children("false"),
        true=children("true"),
        missing=with_leaves(missing) if missing else (),
        roots=np.array(node.attribute("tree_roots"), np.intp),
        sets=_member_sets(node, int(np.count_nonzero(modes == MEMBER))),
    )
    ballots = votes(
        leaves, np.array(node.attribute("leaf_targetids"), np.intp), weights.astype(FLOAT64), inner + len(leaves), _targets(node)
    )
    number = node.attribute("aggregate_function", 1)
    function = AGGREGATES[number] if 0 <= number < len(AGGREGATES) else str(number)
    _check_aggregate(node, function)
    _, transform = post_transform(node)

    def run(x: Array) -> Array:
        return transform(_scores(trees, ballots, function, x)).astype(x.dtype)

    return run


def _targets(node: NodeView) -> int:
    given: int | None = node.attribute("n_targets", None)
    return max(node.attribute("leaf_targetids"), default=0) + 1 if given is None else given


def _member_sets(node: NodeView, count: int) -> list[Array]:
    """The numbers of each node of mode MEMBER: `membership_values` between its NaNs."""
    values = np.asarray(node.attribute("membership_values", np.zeros(0)))
    ends = np.flatnonzero(np.isnan(values))
    if len(ends) == count - 1 or (len(ends) == count == 0 and values.size):
        ends = np.append(ends, len(values))  # the last set without its NaN
    if len(ends) < count:
        raise KernelError(f"node {node.name!r} (TreeEnsemble): {count} nodes ask for members, membership_values has {len(ends)} sets")
    starts = [0, *(ends + 1)]
    return [values[start:end] for start, end in zip(starts, ends[:count], strict=False)]
