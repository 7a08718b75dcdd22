"""Sizes as polynomials of sizes that aren't known before a run, such as `batch · 4` or `past + sequence`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True)
class Size:
    """A polynomial with whole coefficients. `terms`: the unknown sizes that are multiplied, sorted, and their coefficient, sorted.

    An unknown size is named as the model's inputs name it, or by where it first appears (a value and an axis), so two sizes are equal
    only if they're provably so.
    """

    terms: tuple[tuple[tuple[str, ...], int], ...] = ()

    @classmethod
    def of(cls, number: int) -> Size:
        """A known size, or another whole number that is computed with."""
        return cls((((), number),) if number else ())

    @classmethod
    def unknown(cls, name: str) -> Size:
        """A size that isn't known."""
        return cls((((name,), 1),))

    @property
    def number(self) -> int | None:
        """The number that it is, if it's known."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def is_natural(self) -> bool:
        """Whether it's provably not negative."""
        return all(factor >= 0 for _, factor in self.terms)

    def __add__(self, other: Size) -> Size:
        return _collected([*self.terms, *other.terms])

    def __neg__(self) -> Size:
        return Size(tuple((names, -factor) for names, factor in self.terms))

    def __sub__(self, other: Size) -> Size:
        return self + -other

    def __mul__(self, other: Size) -> Size:
        return _collected([(tuple(sorted((*a, *b))), p * q) for a, p in self.terms for b, q in other.terms])

    def divided_by(self, other: Size) -> Size | None:
        """The quotient if it's exact and the divisor has one term; None otherwise."""
        if len(other.terms) != 1:
            return None
        ((divisor, by),) = other.terms
        terms = []
        for names, factor in self.terms:
            rest = list(names)
            for name in divisor:
                if name not in rest:
                    return None
                rest.remove(name)
            if factor % by:
                return None
            terms.append((tuple(rest), factor // by))
        return _collected(terms)


def _collected(terms: Sequence[tuple[tuple[str, ...], int]]) -> Size:
    sums: dict[tuple[str, ...], int] = {}
    for names, factor in terms:
        sums[names] = sums.get(names, 0) + factor
    return Size(tuple(sorted((names, factor) for names, factor in sums.items() if factor)))


def size_product(sizes: Sequence[Size]) -> Size:
    """All sizes multiplied."""
    return reduce(Size.__mul__, sizes, Size.of(1))
