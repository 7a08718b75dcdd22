"""Recurrent layers: RNN, GRU, LSTM.

The inputs' part of all gates is one matrix product over all time steps; the loop over time does what depends on the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.buffers import Allocate
from miniort_cpu.floating_point import as_dtype, widen
from miniort_cpu.kernels.activation import sigmoid
from miniort_cpu.kernels.matrix import matrix_product, widened_constant
from miniort_cpu.threads import ALONE, Threads, threads_of

kernels = KernelTable("cpu")

Activation: TypeAlias = Callable[[Array], None]
"""f(x): x becomes the activation of itself, in place."""

LARGE_CELL = 128 * 1024
"""Elements of the recurrent weights from which on two directions run side by side, if BLAS has one thread only."""

State: TypeAlias = tuple[Array, ...]
"""What a step hands on to the next: (hidden,) or (hidden, cell), each [B, H]."""


def _sigmoid(x: Array) -> None:
    sigmoid(x, x)


def _tanh(x: Array) -> None:
    np.tanh(x, out=x)


def _relu(x: Array) -> None:
    np.maximum(x, 0, out=x)


def _softsign(x: Array) -> None:
    np.divide(x, 1 + np.abs(x), out=x)


def _softplus(x: Array) -> None:
    np.logaddexp(x, x.dtype.type(0), out=x)


def _affine(alpha: float, beta: float) -> Activation:
    def activate(x: Array) -> None:
        np.multiply(x, alpha, out=x)
        np.add(x, beta, out=x)

    return activate


def _leaky_relu(alpha: float, beta: float) -> Activation:
    def activate(x: Array) -> None:
        np.multiply(x, alpha, out=x, where=x < 0)

    return activate


def _thresholded_relu(alpha: float, beta: float) -> Activation:
    def activate(x: Array) -> None:
        np.copyto(x, 0, where=x <= alpha)

    return activate


def _scaled_tanh(alpha: float, beta: float) -> Activation:
    def activate(x: Array) -> None:
        np.multiply(x, beta, out=x)
        np.tanh(x, out=x)
        np.multiply(x, alpha, out=x)

    return activate


def _hard_sigmoid(alpha: float, beta: float) -> Activation:
    def activate(x: Array) -> None:
        np.multiply(x, alpha, out=x)
        np.add(x, beta, out=x)
        x.clip(0, 1, out=x)

    return activate


def _elu(alpha: float, beta: float) -> Activation:
    def activate(x: Array) -> None:
        np.copyto(x, alpha * np.expm1(x), where=x < 0, casting="same_kind")

    return activate


PLAIN: dict[str, Activation] = {"sigmoid": _sigmoid, "tanh": _tanh, "relu": _relu, "softsign": _softsign, "softplus": _softplus}

SCALED: dict[str, tuple[Callable[[float, float], Activation], float, float | None]] = {
    "affine": (_affine, 1.0, 0.0),
    "leakyrelu": (_leaky_relu, 0.01, None),
    "thresholdedrelu": (_thresholded_relu, 1.0, None),
    "scaledtanh": (_scaled_tanh, 1.0, 1.0),
    "hardsigmoid": (_hard_sigmoid, 0.2, 0.5),
    "elu": (_elu, 1.0, None),
}
"""Name -> how to make it, its default alpha, and its default beta if it has one."""


def _activations(node: NodeContext, default: Sequence[str], directions: int) -> list[tuple[Activation, ...]]:
    """The activations of each direction. `activation_alpha` and `activation_beta` are handed out in order to those that take one."""
    names = node.attribute("activations", None) or tuple(default) * directions
    alphas, betas = iter(node.attribute("activation_alpha", None) or ()), iter(node.attribute("activation_beta", None) or ())
    made: list[Activation] = []
    for name in names:
        if name.lower() in PLAIN:
            made.append(PLAIN[name.lower()])
        elif name.lower() in SCALED:
            make, alpha, beta = SCALED[name.lower()]
            made.append(make(next(alphas, alpha), 0.0 if beta is None else next(betas, beta)))
        else:
            raise KernelError(f"node {node.name!r} ({node.op}) has activation {name!r}; known are {', '.join([*PLAIN, *SCALED])}")
    count = len(default)
    # A model may name the activations of one direction only: they serve both.
    return [tuple(made[d * count : (d + 1) * count]) or tuple(made[:count]) for d in range(directions)]


class Cell(Protocol):
    """One direction of a layer: its weights, and how a step goes from one state to the next."""

    @property
    def recurrent(self) -> Array:
        """What the hidden state is multiplied with. [H, gates · H]."""

    def step(self, inputs: Array, state: State) -> State:
        """The next state. inputs: [B, gates · H], the inputs' part of the gates, with the bias; may be written into."""


@dataclass(frozen=True)
class Limits:
    """`clip`: what goes into an activation is cut to [-clip, clip]; None leaves it alone."""

    clip: float | None

    def __call__(self, x: Array) -> None:
        if self.clip is not None:
            x.clip(-self.clip, self.clip, out=x)


@dataclass(frozen=True)
class RNNCell:
    """h' = f(x W + h R + b)."""

    recurrent: Array  # [H, H], transposed
    activations: tuple[Activation, ...]
    limit: Limits

    def step(self, inputs: Array, state: State) -> State:
        """The next state. inputs: [B, H]."""
        (hidden,) = state
        y = hidden.dot(self.recurrent)
        y += inputs
        self.limit(y)
        self.activations[0](y)
        return (y,)


@dataclass(frozen=True)
class GRUCell:
    """z = f(..), r = f(..), h~ = g(x W + r (h R + b_r) + b_w) or g(x W + (r h) R + b), h' = (1 - z) h~ + z h."""

    recurrent: Array  # [H, 3 H], transposed; gates z, r, h
    recurrent_bias: Array  # [H], of gate h; zeros where it's a part of the inputs already
    linear_before_reset: bool
    activations: tuple[Activation, ...]
    limit: Limits

    def step(self, inputs: Array, state: State) -> State:
        """The next state. inputs: [B, 3 H]."""
        (hidden,) = state
        size = hidden.shape[1]
        if self.linear_before_reset:
            past = hidden.dot(self.recurrent)
            gates = past[:, : 2 * size]
        else:
            gates = hidden.dot(self.recurrent[:, : 2 * size])
        gates += inputs[:, : 2 * size]
        self.limit(gates)
        self.activations[0](gates)
        update, reset = gates[:, :size], gates[:, size:]
        if self.linear_before_reset:
            candidate = past[:, 2 * size :]
            candidate += self.recurrent_bias
            candidate *= reset
        else:
            candidate = (reset * hidden).dot(self.recurrent[:, 2 * size :])
        candidate += inputs[:, 2 * size :]
        self.limit(candidate)
        self.activations[1](candidate)
        # (1 - z) h~ + z h = h~ + z (h - h~)
        change = hidden - candidate
        change *= update
        change += candidate
        return (change,)


@dataclass(frozen=True)
class LSTMCell:
    """i, o, f = f(..), c~ = g(..), c' = f c + i c~, h' = o h(c'); the gates see the cell through their peepholes."""

    recurrent: Array  # [H, 4 H], transposed; gates i, o, f, c
    peepholes: Array | None  # [3 H]; gates i, o, f
    input_forget: bool
    activations: tuple[Activation, ...]
    limit: Limits

    def step(self, inputs: Array, state: State) -> State:
        """The next state. inputs: [B, 4 H]."""
        hidden, cell = state
        size = hidden.shape[1]
        activate, activate_cell, activate_output = self.activations
        gates = hidden.dot(self.recurrent)
        gates += inputs
        enter, leave, forget, candidate = (gates[:, gate * size : (gate + 1) * size] for gate in range(4))
        if self.peepholes is None:
            self.limit(gates)
            activate(gates[:, : 3 * size])
        else:
            enter += cell * self.peepholes[:size]
            forget += cell * self.peepholes[2 * size :]
            for gate in (enter, forget):
                self.limit(gate)
                activate(gate)
            self.limit(candidate)
        activate_cell(candidate)
        if self.input_forget:
            np.subtract(1, enter, out=forget)
        new_cell = forget * cell
        candidate *= enter
        new_cell += candidate
        if self.peepholes is not None:
            leave += new_cell * self.peepholes[size : 2 * size]
            self.limit(leave)
            activate(leave)
        y = new_cell.copy()
        activate_output(y)
        y *= leave
        return y, new_cell


def _unroll(cell: Cell, gates: Array, state: State, lengths: Array | None, backward: bool, y: Array) -> State:
    """The states after all steps. What a sequence doesn't have any more leaves its state as it is, and is zero in y.

    gates: [T, B, gates · H]; state: each [B, H]; lengths: [B]; y: [T, B, H], written
    """
    steps = range(len(gates) - 1, -1, -1) if backward else range(len(gates))
    shortest = len(gates) if lengths is None or not lengths.size else int(lengths.min())
    for time in steps:
        new = cell.step(gates[time], state)
        if time < shortest:
            state = new
            y[time] = new[0]
        else:
            assert lengths is not None
            there = (lengths > time)[:, None]
            state = tuple(np.where(there, after, before) for after, before in zip(new, state, strict=True))
            y[time] = np.where(there, new[0], 0)
    return state


@dataclass(frozen=True)
class Layer:
    """What RNN, GRU and LSTM have in common: both directions, the layout, and where the inputs' part of the gates comes from."""

    directions: tuple[bool, ...]  # whether each goes backward
    batch_first: bool
    allocate: Allocate
    threads: Threads = ALONE

    def __call__(
        self, x: Array, w: Array, biases: Array | None, lengths: Array | None, states: Sequence[Array | None], cells: Sequence[Cell]
    ) -> tuple[Array, ...]:
        """x: [T, B, I]; w: [D, gates · H, I]; biases: [D, gates · H]; states: [D, B, H] -> y [T, D, B, H], and a last state of each.

        With `batch_first` x: [B, T, I]; states: [B, D, H] -> y [B, T, D, H], [B, D, H].
        """
        wide = widen(x)
        steps = wide.swapaxes(0, 1) if self.batch_first else wide
        time, batch, _ = steps.shape
        steps = np.ascontiguousarray(steps)
        hidden = cells[0].recurrent.shape[0]
        ways = len(self.directions)
        y = self.allocate((batch, time, ways, hidden) if self.batch_first else (time, ways, batch, hidden), wide.dtype)
        shape = (batch, ways, hidden) if self.batch_first else (ways, batch, hidden)
        finals = [np.empty(shape, wide.dtype) for _ in states]

        def run_direction(way: int, backward: bool) -> None:
            gates = matrix_product(self.allocate, steps, w[way].T)
            if biases is not None:
                np.add(gates, biases[way], out=gates)
            start = tuple(
                np.zeros((batch, hidden), wide.dtype) if each is None else widen(each[:, way] if self.batch_first else each[way])
                for each in states
            )
            part = y[:, :, way].swapaxes(0, 1) if self.batch_first else y[:, way]
            for final, last in zip(finals, _unroll(cells[way], gates, start, lengths, backward, part), strict=True):
                if self.batch_first:
                    final[:, way] = last
                else:
                    final[way] = last

        def run_directions(first: int, last: int) -> None:
            for way in range(first, last):
                run_direction(way, self.directions[way])

        # Neither direction waits for the other. Many small steps would only wait for Python's lock, so they stay in one thread. Where BLAS
        # has several, a step is faster if each of them finds its half of the weights in its cache again.
        side_by_side = cells[0].recurrent.size >= LARGE_CELL and self.threads.divides_products()
        self.threads.split(ways, 1 if side_by_side else ways, run_directions)
        return tuple(as_dtype(each, x.dtype) for each in (y, *finals))


def _layer(node: NodeContext) -> Layer:
    direction = node.attribute("direction", "forward")
    ways = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    if direction not in ways:
        raise KernelError(f"node {node.name!r} ({node.op}) has direction {direction!r}; known are {', '.join(ways)}")
    return Layer(ways[direction], bool(node.attribute("layout", 0)), node.provider.allocate, threads_of(node.provider))


def _selected(node: NodeContext, results: tuple[Array, ...]) -> Array | tuple[Array, ...]:
    return results[: len(node.outputs)] if len(node.outputs) > 1 else results[0]


@kernels.register("RNN", versions=(7, None))
def rnn(node: NodeContext) -> Run:
    """A simple recurrent layer. x: [T, B, I]; w: [D, H, I]; r: [D, H, H]; b: [D, 2 H] (of w, then of r); lengths: [B]; h: [D, B, H].

    -> y [T, D, B, H], the last h [D, B, H]; with `layout` 1 the batch comes first in all of them
    """
    layer, limit = _layer(node), Limits(node.attribute("clip", None))
    activations = _activations(node, ("Tanh",), len(layer.directions))
    fixed_w, fixed_r = widened_constant(node, 1), widened_constant(node, 2)

    def run(
        x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None, h: Array | None = None
    ) -> Array | tuple[Array, ...]:
        w, r = widen(w) if fixed_w is None else fixed_w, widen(r) if fixed_r is None else fixed_r
        size = r.shape[2]
        biases = None if b is None else widen(b)[:, :size] + widen(b)[:, size:]
        cells = [RNNCell(r[way].T, activations[way], limit) for way in range(len(layer.directions))]
        return _selected(node, layer(x, w, biases, lengths, [h], cells))

    return run


@kernels.register("GRU", versions=(3, None))
def gru(node: NodeContext) -> Run:
    """Gated recurrent units (Cho et al. 2014, arXiv:1406.1078). w: [D, 3 H, I]; r: [D, 3 H, H]; b: [D, 6 H]; gates z, r, h.

    x: [T, B, I]; lengths: [B]; h: [D, B, H] -> y [T, D, B, H], the last h [D, B, H]; with `layout` 1 the batch comes first in all of them
    """
    layer, limit = _layer(node), Limits(node.attribute("clip", None))
    activations = _activations(node, ("Sigmoid", "Tanh"), len(layer.directions))
    linear = bool(node.attribute("linear_before_reset", 0))
    fixed_w, fixed_r = widened_constant(node, 1), widened_constant(node, 2)

    def run(
        x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None, h: Array | None = None
    ) -> Array | tuple[Array, ...]:
        w, r = widen(w) if fixed_w is None else fixed_w, widen(r) if fixed_r is None else fixed_r
        size = r.shape[2]
        biases, inner = None, np.zeros((len(w), size), w.dtype)
        if b is not None:
            wide = widen(b)
            biases = wide[:, : 3 * size] + wide[:, 3 * size :]
            if linear:
                biases[:, 2 * size :] = wide[:, 2 * size : 3 * size]
                inner = wide[:, 5 * size :]
        cells = [GRUCell(r[way].T, inner[way], linear, activations[way], limit) for way in range(len(layer.directions))]
        return _selected(node, layer(x, w, biases, lengths, [h], cells))

    return run


@kernels.register("LSTM", versions=(7, None))
def lstm(node: NodeContext) -> Run:
    """Long short-term memory (Hochreiter and Schmidhuber 1997). w: [D, 4 H, I]; r: [D, 4 H, H]; b: [D, 8 H]; gates i, o, f, c.

    x: [T, B, I]; lengths: [B]; h, c: [D, B, H]; peepholes: [D, 3 H], gates i, o, f -> y [T, D, B, H], the last h and c [D, B, H];
    with `layout` 1 the batch comes first in all of them
    """
    layer, limit = _layer(node), Limits(node.attribute("clip", None))
    activations = _activations(node, ("Sigmoid", "Tanh", "Tanh"), len(layer.directions))
    coupled = bool(node.attribute("input_forget", 0))
    fixed_w, fixed_r = widened_constant(node, 1), widened_constant(node, 2)

    def run(
        x: Array,
        w: Array,
        r: Array,
        b: Array | None = None,
        lengths: Array | None = None,
        h: Array | None = None,
        c: Array | None = None,
        peepholes: Array | None = None,
    ) -> Array | tuple[Array, ...]:
        w, r = widen(w) if fixed_w is None else fixed_w, widen(r) if fixed_r is None else fixed_r
        size = r.shape[2]
        biases = None if b is None else widen(b)[:, : 4 * size] + widen(b)[:, 4 * size :]
        p = None if peepholes is None else widen(peepholes)
        cells = [
            LSTMCell(r[way].T, None if p is None else p[way], coupled, activations[way], limit) for way in range(len(layer.directions))
        ]
        return _selected(node, layer(x, w, biases, lengths, [h, c], cells))

    return run
