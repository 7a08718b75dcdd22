"""One step of an optimizer: Adagrad, Adam, Momentum, of the domain ai.onnx.preview.training.

Each takes a learning rate and the number of steps before this one, and then for n tensors the n values, the n gradients, and n tensors of
each state that the optimizer keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array

kernels = KernelTable("cpu")

DOMAIN = "ai.onnx.preview.training"

Update: TypeAlias = Callable[..., tuple[Array, ...]]
"""f(rate [], steps, x, gradient, states...) -> new x, new states...; all of x's shape and dtype."""


def _optimizer(update: Update, states: int) -> Run:
    """A run that updates each tensor by itself: rate, steps, n values, n gradients, n of each state -> n values, n of each state."""

    def run(rate: Array, steps: Array, *tensors: Array) -> tuple[Array, ...]:
        count = len(tensors) // (2 + states)
        groups = [tensors[start : start + count] for start in range(0, len(tensors), count)]
        made = [
            update(tensors_of_x[0].dtype.type(rate.item()), int(steps.item()), *tensors_of_x) for tensors_of_x in zip(*groups, strict=True)
        ]
        return tuple(np.asarray(new) for group in zip(*made, strict=True) for new in group)

    return run


@kernels.register("Adagrad", versions=(1, None), domain=DOMAIN)
def adagrad(node: NodeContext) -> Run:
    """A step of AdaGrad (Duchi et al. 2011, JMLR 12). The state is the sum of all squared gradients."""
    decay, regularization = node.attribute("decay_factor", 0.0), node.attribute("norm_coefficient", 0.0)
    epsilon = node.attribute("epsilon", 1e-6)

    def update(rate: Array, steps: int, x: Array, gradient: Array, squares: Array) -> tuple[Array, ...]:
        gradient = regularization * x + gradient
        squares = squares + gradient * gradient
        return x - rate / (1 + steps * decay) * gradient / (np.sqrt(squares) + epsilon), squares

    return _optimizer(update, states=1)


@kernels.register("Adam", versions=(1, None), domain=DOMAIN)
def adam(node: NodeContext) -> Run:
    """A step of Adam (Kingma and Ba 2014, arXiv:1412.6980). The states are the running means of the gradient and of its square."""
    alpha, beta, epsilon = node.attribute("alpha", 0.9), node.attribute("beta", 0.999), node.attribute("epsilon", 1e-6)
    regularization, regularization_after = node.attribute("norm_coefficient", 0.0), node.attribute("norm_coefficient_post", 0.0)

    def update(rate: Array, steps: int, x: Array, gradient: Array, mean: Array, square: Array) -> tuple[Array, ...]:
        gradient = regularization * x + gradient
        mean = alpha * mean + (1 - alpha) * gradient
        square = beta * square + (1 - beta) * (gradient * gradient)
        if steps > 0:
            rate = rate * ((1 - beta**steps) ** 0.5 / (1 - alpha**steps))
        x = x - rate * mean / (np.sqrt(square) + epsilon)
        return (1 - regularization_after) * x, mean, square

    return _optimizer(update, states=2)


@kernels.register("Momentum", versions=(1, None), domain=DOMAIN)
def momentum(node: NodeContext) -> Run:
    """A step of gradient descent with momentum, or with Nesterov's (Sutskever et al. 2013, ICML). The state is the momentum."""
    alpha, beta, regularization = node.attribute("alpha"), node.attribute("beta"), node.attribute("norm_coefficient")
    mode = node.attribute("mode")
    if mode not in ("standard", "nesterov"):
        raise KernelError(f"node {node.name!r} (Momentum): its mode must be standard or nesterov, found {mode!r}")

    def update(rate: Array, steps: int, x: Array, gradient: Array, velocity: Array) -> tuple[Array, ...]:
        gradient = regularization * x + gradient
        velocity = alpha * velocity + (beta if steps > 0 else 1.0) * gradient
        direction = gradient + alpha * velocity if mode == "nesterov" else velocity
        return x - rate * direction, velocity

    return _optimizer(update, states=1)
