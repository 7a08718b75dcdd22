"""Builders of RNN, GRU and LSTM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse
from miniort.types import Array

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
ACTIVATIONS = {"RNN": 1, "GRU": 2, "LSTM": 3}
PLAIN = ["Relu", "Tanh", "Sigmoid", "Softsign", "Softplus"]
WITH_ALPHA_BETA = ["Affine", "ScaledTanh", "HardSigmoid"]


def activations(d: Draws, count: int) -> dict[str, Any]:
    """Activations for all directions. Their parameters are given for all or for none, where all have a default."""
    defaults = ["LeakyRelu", "Elu", "HardSigmoid"]
    kind = d.choice(["plain", "parameters", "defaults"])
    if kind != "parameters":
        return {"activations": [d.choice(PLAIN if kind == "plain" else defaults) for _ in range(count)]}
    names = [d.choice(WITH_ALPHA_BETA) for _ in range(count)]
    numbers = {name: [d.number(0.125, 1) for _ in range(count)] for name in ("activation_alpha", "activation_beta")}
    return {"activations": names} | numbers


@builds(*GATES)
def recurrent(d: Draws, operator: Operator) -> NodeCase:
    """x [time, batch, inputs] or [batch, time, inputs], w [directions, gates · hidden, inputs], r [directions, gates · hidden, hidden]."""
    dtype, gates = d.dtype(operator), GATES[operator.op]
    time, batch, width, hidden = d.integer(1, 4), d.integer(1, 3), d.integer(1, 3), d.integer(1, 3)
    direction = d.choice(["forward", "reverse", "bidirectional"])
    directions = 2 if direction == "bidirectional" else 1
    attributes: dict[str, Any] = {"hidden_size": hidden}
    if direction != "forward" or d.boolean():
        attributes["direction"] = direction
    if d.boolean():
        attributes |= activations(d, ACTIVATIONS[operator.op] * directions)
    choices: dict[str, list[Any]] = {"layout": [0, 1], "linear_before_reset": [0, 1], "input_forget": [0, 1], "clip": [0.5, 2.0]}
    for name, values in choices.items():
        if operator.has_attribute(name) and d.integer(0, 2) == 0:
            attributes[name] = d.choice(values)
    by_batch = attributes.get("layout") == 1

    def numbers(*shape: int) -> Any:
        return d.ordinary(dtype, shape, -1, 1)

    def state() -> Any:
        return numbers(batch, directions, hidden) if by_batch else numbers(directions, batch, hidden)

    inputs = [
        numbers(batch, time, width) if by_batch else numbers(time, batch, width),
        numbers(directions, gates * hidden, width),
        numbers(directions, gates * hidden, hidden),
        numbers(directions, 2 * gates * hidden) if d.boolean() else None,
        d.rng().integers(1, time + 1, batch).astype(np.int32) if d.boolean() else None,
        state() if d.boolean() else None,
    ]
    if operator.op == "LSTM":
        inputs += [state() if d.boolean() else None, numbers(directions, 3 * hidden) if d.boolean() else None]
    outputs = d.integer(1, len(operator.schema.outputs))
    skipped = frozenset([0]) if outputs > 1 and d.boolean() else frozenset()
    constants = frozenset([1, 2, 3]) if d.boolean() else frozenset()
    asked = [position for position in range(outputs) if position not in skipped]
    return NodeCase(
        d.trimmed(inputs),
        attributes,
        outputs,
        constants,
        skipped=skipped,
        atol=0.02 if is_coarse(dtype) else 1e-5,
        expected=lambda inputs: [recurrent_formula(operator.op, attributes, inputs)[position] for position in asked],
    )


FORMULAS: dict[str, Callable[[Array, float, float], Array]] = {
    "Relu": lambda x, alpha, beta: np.maximum(x, 0),
    "Tanh": lambda x, alpha, beta: np.tanh(x),
    "Sigmoid": lambda x, alpha, beta: 1 / (1 + np.exp(-x)),
    "Softsign": lambda x, alpha, beta: x / (1 + np.abs(x)),
    "Softplus": lambda x, alpha, beta: np.log1p(np.exp(x)),
    "LeakyRelu": lambda x, alpha, beta: np.where(x >= 0, x, alpha * x),
    "Elu": lambda x, alpha, beta: np.where(x >= 0, x, alpha * np.expm1(x)),
    "Affine": lambda x, alpha, beta: alpha * x + beta,
    "ScaledTanh": lambda x, alpha, beta: alpha * np.tanh(beta * x),
    "HardSigmoid": lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1),
}
DEFAULTS = {"LeakyRelu": (0.01, 0.0), "Elu": (1.0, 0.0), "HardSigmoid": (0.2, 0.5)}
NAMES = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def activated(name: str, alpha: float, beta: float, bound: float, x: Array) -> Array:
    """An activation of x, which is cut to [-bound, bound] first."""
    return FORMULAS[name](np.clip(x, -bound, bound), alpha, beta)


def functions(op: str, attributes: dict[str, Any], direction: int) -> list[Callable[[Array], Array]]:
    """f, g and h of one direction; f and g clip what goes in, h takes the cell as it is, which is how implementers read the text."""
    count = len(NAMES[op])
    names = attributes.get("activations", NAMES[op] * 2)[count * direction : count * (direction + 1)]
    found: list[Callable[[Array], Array]] = []
    for place, name in enumerate(names, count * direction):
        alpha, beta = DEFAULTS.get(name, (1.0, 0.0))
        if "activation_alpha" in attributes:
            alpha, beta = attributes["activation_alpha"][place], attributes["activation_beta"][place]
        bound = attributes.get("clip", np.inf) if len(found) < 2 else np.inf
        found.append(partial(activated, name, alpha, beta, bound))
    return found


def recurrent_formula(op: str, attributes: dict[str, Any], inputs: list[Any]) -> list[Array]:
    """The equations of the ops' texts, row by row and step by step: y [time, directions, batch, hidden], the last h and c."""
    dtype, by_batch = inputs[0].dtype, attributes.get("layout") == 1
    wide: list[Any] = [None if each is None else each.astype(np.float64) for each in inputs]
    x, w, r, b, lengths, h0, c0, p = (wide + [None] * 8)[:8]
    if by_batch:
        x, h0, c0 = (None if each is None else each.swapaxes(0, 1) for each in (x, h0, c0))
    directions, gates, hidden = len(w), GATES[op], r.shape[2]
    y = np.zeros((len(x), directions, x.shape[1], hidden))
    last = np.zeros((2, directions, x.shape[1], hidden))
    for direction, row in np.ndindex(directions, x.shape[1]):
        f, g, h_of = (functions(op, attributes, direction) + [lambda c: c] * 2)[:3]
        h, c = (np.zeros(hidden) if state is None else state[direction, row] for state in (h0, c0))
        wb, rb = np.zeros((2, gates, hidden)) if b is None else b[direction].reshape(2, gates, hidden)
        pi, po, pf = np.zeros((3, hidden)) if p is None else p[direction].reshape(3, hidden)
        wx, rh = w[direction].reshape(gates, hidden, -1), r[direction].reshape(gates, hidden, hidden)
        steps = list(range(len(x) if lengths is None else int(lengths[row])))
        backwards = direction == 1 or attributes.get("direction") == "reverse"
        for step in steps[::-1] if backwards else steps:
            from_x, from_h = wx @ x[step, row] + wb, rh @ h + rb
            if op == "RNN":
                h = f(from_x[0] + from_h[0])
            elif op == "GRU":
                z, reset = f(from_x[0] + from_h[0]), f(from_x[1] + from_h[1])
                inner = reset * from_h[2] if attributes.get("linear_before_reset") else rh[2] @ (reset * h) + rb[2]
                h = (1 - z) * g(from_x[2] + inner) + z * h
            else:
                i = f(from_x[0] + from_h[0] + pi * c)
                forget = 1 - i if attributes.get("input_forget") else f(from_x[2] + from_h[2] + pf * c)
                c = forget * c + i * g(from_x[3] + from_h[3])
                h = f(from_x[1] + from_h[1] + po * c) * h_of(c)
            y[step, direction, row] = h
        last[:, direction, row] = h, c
    results = [y, *last]
    if by_batch:
        results = [y.transpose(2, 0, 1, 3), *last.swapaxes(1, 2)]
    return [each.astype(dtype) for each in results]
