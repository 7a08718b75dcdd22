"""Einstein summation: Einsum."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import widen

kernels = KernelTable("cpu")

Label: TypeAlias = str | int
"""A letter; or for an axis under an ellipsis its place from the end, -1 for the last one."""

Labels: TypeAlias = tuple[Label, ...]

ELLIPSIS = "..."


def parse(equation: str) -> tuple[list[str], str | None]:
    """The terms of the operands, and that of the output, or None where the equation has no arrow. Spaces mean nothing."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    return left.split(","), right if arrow else None


def _labels(term: str, covered: int) -> Labels:
    """The labels of a term's axes, with `covered` axes under its ellipsis."""
    before, dots, after = term.partition(ELLIPSIS)
    return (*before, *range(-covered, 0), *after) if dots else tuple(before)


def _implicit_output(terms: Sequence[str], covered: int) -> Labels:
    """The axes under the ellipsis, and then the letters that appear once, in ASCII order."""
    letters = "".join(terms).replace(ELLIPSIS, "")
    return (*range(-covered, 0), *sorted(letter for letter in set(letters) if letters.count(letter) == 1))


@kernels.register("Einsum", versions=(12, None))
def einsum(node: NodeContext) -> Run:
    """Products of all operands' elements, summed up over the labels that the output lacks. Operands: any shapes that fit the equation.

    Two operands at a time, each pair as one batch of matrix products.
    """
    terms, output = parse(node.attribute("equation"))

    def run(*operands: Array) -> Array:
        if len(operands) != len(terms):
            raise KernelError(f"node {node.name!r} (Einsum): its equation has {len(terms)} terms, found {len(operands)} operands")
        covered = max(
            (x.ndim - len(term.replace(ELLIPSIS, "")) for x, term in zip(operands, terms, strict=True) if ELLIPSIS in term), default=0
        )
        wanted = _implicit_output(terms, covered) if output is None else _labels(output, covered)
        factors = []
        for x, term in zip(operands, terms, strict=True):
            own = x.ndim - len(term.replace(ELLIPSIS, "")) if ELLIPSIS in term else 0
            labels = _labels(term, own)
            if len(labels) != x.ndim:
                raise KernelError(f"node {node.name!r} (Einsum): the term {term!r} doesn't fit an operand of rank {x.ndim}")
            factors.append(_with_labels_once(widen(x), labels))
        for first, second in _order(node.attribute("equation"), operands):
            one, other = factors[first], factors[second]
            factors = [each for index, each in enumerate(factors) if index not in (first, second)]
            rest = {label for _, labels in factors for label in labels}
            factors.append(_contract(one, other, rest | set(wanted)))
        x, labels = factors[0]
        x, labels = _summed(x, labels, set(wanted))
        y = x.transpose([labels.index(label) for label in wanted])
        return np.array(y, operands[0].dtype, order="C", copy=None if len(operands) > 1 else True)  # of one operand it may be a view

    return run


def _order(equation: str, operands: Sequence[Array]) -> list[tuple[int, int]]:
    """Which two factors to multiply next: of those left, whose product goes to the end of the list."""
    count = len(operands)
    if count < 3:
        return [(0, 1)] * (count - 1)
    path = np.einsum_path(equation, *operands, optimize="greedy")[0][1:]
    steps: list[tuple[int, int]] = []
    for step in path:
        # A step may name several factors at once: they are multiplied one after the other, each with the last product.
        places = sorted(step)
        length = count
        steps.append((places[0], places[1]))
        length -= 1
        for done, place in enumerate(places[2:], 2):
            steps.append((place - done, length - 1))
            length -= 1
        count = length
    return steps


def _with_labels_once(x: Array, labels: Labels) -> tuple[Array, Labels]:
    """The diagonal of axes that share a label, a view: each label is left once."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            x = np.diagonal(x, 0, first, second)  # its axis goes to the end
            labels = (*(each for index, each in enumerate(labels) if index not in (first, second)), label)
    return x, labels


def _summed(x: Array, labels: Labels, kept: set[Label]) -> tuple[Array, Labels]:
    """`x` summed up over the labels that nobody needs any more."""
    axes = tuple(index for index, label in enumerate(labels) if label not in kept)
    if not axes:
        return x, labels
    return np.add.reduce(x, axes, dtype=x.dtype), tuple(label for label in labels if label in kept)


def _contract(one: tuple[Array, Labels], other: tuple[Array, Labels], kept: set[Label]) -> tuple[Array, Labels]:
    """The product of two factors, summed up over the labels that both have and nobody else needs.

    As matrices: [batch..., rows, summed] · [batch..., summed, columns], where batch labels are those that both have and that are kept.
    Sizes of 1 broadcast.
    """
    a, a_labels = _summed(*one, kept | set(other[1]))
    b, b_labels = _summed(*other, kept | set(one[1]))
    shared = [label for label in a_labels if label in b_labels]
    batch = [label for label in shared if label in kept]
    summed = [label for label in shared if label not in kept]
    rows = [label for label in a_labels if label not in shared]
    columns = [label for label in b_labels if label not in shared]
    a = a.transpose([a_labels.index(label) for label in (*batch, *rows, *summed)])
    b = b.transpose([b_labels.index(label) for label in (*batch, *summed, *columns)])
    after, height, width = len(batch), len(rows), len(columns)
    if summed and a.shape[after + height :] != b.shape[after : after + len(summed)]:
        sizes = np.broadcast_shapes(a.shape[after + height :], b.shape[after : after + len(summed)])
        a = np.broadcast_to(a, (*a.shape[: after + height], *sizes))
        b = np.broadcast_to(b, (*b.shape[:after], *sizes, *b.shape[after + len(summed) :]))
    depth = prod(b.shape[after : after + len(summed)])
    left = a.reshape(*a.shape[:after], prod(a.shape[after : after + height]), depth)
    right = b.reshape(*b.shape[:after], depth, prod(b.shape[after + len(summed) :]))
    product = np.multiply(left, right, out=...) if not summed else np.matmul(left, right)
    shape = (*product.shape[:after], *a.shape[after : after + height], *b.shape[b.ndim - width :])
    return product.reshape(shape), (*batch, *rows, *columns)
