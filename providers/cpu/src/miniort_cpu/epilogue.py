"""What follows a convolution in the same buffer: bias, a tensor to add, an activation, done to each block while it's in the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np

from miniort.types import Array

Activation: TypeAlias = Callable[[Array], None]
"""f(x): x becomes the activation of itself, in place. x: [rows, n] or [n], its last axis contiguous."""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """activation(factor · y + bias + addend); what is None is left out. factor, bias: [M, 1]; addend: [N, M, points]."""

    factor: Array | None = None
    bias: Array | None = None
    addend: Array | None = None
    activate: Activation | None = None

    def __call__(self, y: Array, image: int | slice, features: slice, points: slice) -> None:
        """Change one block in place. y: [m, p] of one image or [n, m, p]; the rest says which of the output's [N, M, points]."""
        if self.factor is not None:
            np.multiply(y, self.factor[features], out=y)
        if self.bias is not None:
            np.add(y, self.bias[features], out=y)
        if self.addend is not None:
            np.add(y, self.addend[image, features, points], out=y)
        if self.activate is not None:
            self.activate(y)

    def without_bias(self) -> Epilogue:
        """What is left to do where the bias is added already."""
        return Epilogue(self.factor, None, self.addend, self.activate)


NOTHING = Epilogue()


def relu(x: Array) -> None:
    """max(x, 0). NumPy clips four times as fast as it compares with one number."""
    x.clip(0, inf, out=x)


def swish(alpha: float) -> Activation:
    """x · sigmoid(alpha · x) = x / (1 + exp(-alpha · x))."""

    def activate(x: Array) -> None:
        y = np.multiply(x, -alpha)
        np.exp(y, out=y)
        np.add(y, 1, out=y)
        np.divide(x, y, out=x)

    return activate


def hard_swish(x: Array) -> None:
    """x · max(0, min(1, x/6 + 1/2))."""
    y = np.multiply(x, 1 / 6)
    np.add(y, 0.5, out=y)
    y.clip(0, 1, out=y)
    np.multiply(x, y, out=x)


def clip(low: float, high: float) -> Activation:
    """min(high, max(x, low))."""

    def activate(x: Array) -> None:
        x.clip(low, high, out=x)

    return activate
