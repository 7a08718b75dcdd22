"""Recurrent layers in float32: LSTM, GRU, and com.microsoft's DynamicQuantizeLSTM on weights of 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort_numba.kernels import FLOAT32, crew_of

KERNELS = KernelTable("numba")

CONTRIB = "com.microsoft"

PEEPHOLES = 7
"""Which input of an LSTM these are."""

LARGE_MATRIX = 1 << 17
"""Recurrent weights of one direction from which on threads share each step, if there are more of them than directions."""

DIRECTIONS = {"forward": (1, False), "reverse": (1, True), "bidirectional": (2, False)}
"""How many directions there are, and whether the first goes backward."""

_NO_NUMBERS = np.empty((0, 0), np.float32)


def _refuse(*activations: str) -> Callable[[NodeView], str | None]:
    """What tells why a layer isn't taken whose op has these activations unless it says otherwise."""

    def refuse(node: NodeView) -> str | None:
        names = node.attribute("activations", None) or activations
        if [name.lower() for name in names] != [activations[index % len(activations)].lower() for index in range(len(names))]:
            return f"it has the activations {', '.join(activations)} only"
        if node.attribute("layout", 0):
            return "it takes time before batch only"
        if node.attribute("clip", None) is not None or node.attribute("input_forget", 0):
            return "it has no clip and no input_forget"
        if node.op != "GRU" and node.has_input(PEEPHOLES):
            return "it has no peepholes"
        return None

    return refuse


@dataclass(frozen=True, eq=False)
class _Weights:
    """A matrix for each direction, in panels: [D, P, K, WIDTH]. scale, zero: of one of 8 bits, else None; [D, P · WIDTH] float32."""

    panels: Array
    scale: Array | None = None
    zero: Array | None = None

    @property
    def columns(self) -> int:
        """Of each matrix, those that fill the last panels included."""
        return int(self.panels.shape[1] * self.panels.shape[3])

    def words(self) -> Array:
        """As `miniort_numba.compiled.panel_products` has them; the arrays have to live as long as they're used."""
        scales = (0 if each is None else each.ctypes.data for each in (self.scale, self.zero))
        return np.array([self.panels.ctypes.data, *self.panels.shape[1:3], *scales], np.int64)


def _spread(x: Array, groups: Sequence[int]) -> Array:
    """Columns of gates, each group of gates filled up with zeros to whole panels. x: [..., gates · H]; groups: gates in each."""
    from miniort_numba.compiled.row_products import WIDTH

    size = x.shape[-1] // sum(groups)
    widths = [group * size for group in groups]
    spread = [-(-width // WIDTH) * WIDTH for width in widths]
    if widths == spread:
        return np.ascontiguousarray(x)
    y = np.zeros((*x.shape[:-1], sum(spread)), x.dtype)
    source = target = 0
    for width, wide in zip(widths, spread, strict=True):
        y[..., target : target + width] = x[..., source : source + width]
        source, target = source + width, target + wide
    return y


def _packed(x: Array, groups: Sequence[int]) -> Array:
    """[D, K, gates · H] -> [D, P, K, WIDTH]."""
    from miniort_numba.compiled.panels import pack

    return np.stack([pack(_spread(each, groups)) for each in x])


def _constant_weights(node: NodeContext, index: int, groups: Sequence[int]) -> _Weights | None:
    """Input `index` [D, gates · H, K] if it's a constant, packed once for all sessions."""
    if node.constant(index) is None:
        return None
    return _Weights(node.prepare(index, f"numba.gates_in_panels:{groups}", lambda x: _packed(x.swapaxes(1, 2), groups)))


def _check(**inputs: tuple[Array | None, tuple[int, ...]]) -> None:
    """ValueError if an input, given by its name with the shape that it has to have, has another: compiled code doesn't look."""
    for name, (array, shape) in inputs.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has to be of shape {shape}, as the other inputs say, but it's of {array.shape}")


class _Layer:
    """What the kernels of this file have in common: the inputs' part of all gates as one product, then the loop over time."""

    def __init__(self, node: NodeContext, part: int) -> None:
        direction = node.attribute("direction", "forward")
        if direction not in DIRECTIONS:
            raise KernelError(f"node {node.name!r} ({node.op}) has direction {direction!r}; known are {', '.join(DIRECTIONS)}")
        self.ways, self.reverse = DIRECTIONS[direction]
        self.part, self.allocate = part, node.provider.allocate
        self.board, self.helpers = crew_of(node)
        self.outputs = len(node.outputs)

    def __call__(
        self,
        x: Array,
        factor: float,
        outer: _Weights,
        inner: _Weights,
        biases: Array | None,
        lengths: Array | None,
        states: Sequence[Array | None],
        inner_bias: Array = _NO_NUMBERS,
    ) -> Array | tuple[Array, ...]:
        """All outputs of the op that the node has.

        x: [T, B, I]; with weights of 8 bits it is whole numbers that come to the inputs times `factor`; outer, inner: what the inputs and
        the hidden state are multiplied with; biases: [D, columns]; lengths: [B]; states: h, and an LSTM's c, [D, B, H]; inner_bias: [D, H]
        """
        from miniort_numba.compiled.panel_products import ADD_PRODUCTS, add_products
        from miniort_numba.compiled.recurrent import unroll

        steps, batch, width = x.shape
        size = inner.panels.shape[2]
        gates: Array = self.allocate((self.ways, steps, batch, inner.columns), FLOAT32)
        gates[...] = 0 if biases is None else biases[:, None, None]
        rows, panels = np.ascontiguousarray(x).reshape(steps * batch, width), self.ways * outer.panels.shape[1]
        add_products(self.board, self.helpers, ADD_PRODUCTS, gates.ctypes.data, rows, np.float32(factor), outer.words(), 0, panels)
        y: Array = self.allocate((steps, self.ways, batch, size), FLOAT32)
        last = [np.zeros((self.ways, batch, size), FLOAT32) if state is None else np.array(state, order="C") for state in states]
        stops = np.full(batch, steps) if lengths is None else lengths.astype(np.int64)
        by_step = inner.scale is None and self.helpers >= self.ways and inner.columns * size >= LARGE_MATRIX
        matrix, cell = inner.words(), last[1] if len(last) > 1 else _NO_NUMBERS[None]
        unroll(self.board, self.helpers, self.part, ADD_PRODUCTS, by_step, self.reverse, gates, matrix, stops, last[0], cell, inner_bias, y)
        return (y, *last)[: self.outputs] if self.outputs > 1 else y


@KERNELS.register("LSTM", versions=(7, None), types={"T": [FLOAT32]}, refuse=_refuse("Sigmoid", "Tanh", "Tanh"))
def lstm(node: NodeContext) -> Run:
    """Long short-term memory (Hochreiter and Schmidhuber 1997). w: [D, 4 H, I]; r: [D, 4 H, H]; b: [D, 8 H]; gates i, o, f, c.

    x: [T, B, I]; lengths: [B]; h, c: [D, B, H] -> y [T, D, B, H], the last h and c [D, B, H]
    """
    from miniort_numba.compiled.recurrent import LSTM

    layer, groups = _Layer(node, LSTM), (4,)
    fixed_w, fixed_r = (_constant_weights(node, index, groups) for index in (1, 2))

    def run(
        x: Array,
        w: Array,
        r: Array,
        b: Array | None = None,
        lengths: Array | None = None,
        h: Array | None = None,
        c: Array | None = None,
        peepholes: None = None,
    ) -> Array | tuple[Array, ...]:
        (_, batch, width), ways, size = x.shape, layer.ways, r.shape[2]
        _check(W=(w, (ways, 4 * size, width)), R=(r, (ways, 4 * size, size)), B=(b, (ways, 8 * size)), sequence_lens=(lengths, (batch,)))
        _check(initial_h=(h, (ways, batch, size)), initial_c=(c, (ways, batch, size)))
        outer = fixed_w or _Weights(_packed(w.swapaxes(1, 2), groups))
        inner = fixed_r or _Weights(_packed(r.swapaxes(1, 2), groups))
        biases = None if b is None else _spread(b[:, : 4 * size] + b[:, 4 * size :], groups)
        return layer(x, 1, outer, inner, biases, lengths, [h, c])

    return run


@KERNELS.register("GRU", versions=(3, None), types={"T": [FLOAT32]}, refuse=_refuse("Sigmoid", "Tanh"))
def gru(node: NodeContext) -> Run:
    """Gated recurrent units (Cho et al. 2014, arXiv:1406.1078). w: [D, 3 H, I]; r: [D, 3 H, H]; b: [D, 6 H]; gates z, r, h.

    x: [T, B, I]; lengths: [B]; h: [D, B, H] -> y [T, D, B, H], the last h [D, B, H]
    """
    from miniort_numba.compiled.recurrent import GRU

    layer, groups = _Layer(node, GRU), (2, 1)
    linear = bool(node.attribute("linear_before_reset", 0))
    fixed_w, fixed_r = (_constant_weights(node, index, groups) for index in (1, 2))

    def run(
        x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None, h: Array | None = None
    ) -> Array | tuple[Array, ...]:
        (_, batch, width), ways, size = x.shape, layer.ways, r.shape[2]
        _check(W=(w, (ways, 3 * size, width)), R=(r, (ways, 3 * size, size)), B=(b, (ways, 6 * size)), sequence_lens=(lengths, (batch,)))
        _check(initial_h=(h, (ways, batch, size)))
        outer = fixed_w or _Weights(_packed(w.swapaxes(1, 2), groups))
        inner = fixed_r or _Weights(_packed(r.swapaxes(1, 2), groups))
        biases, inner_bias = None, np.zeros((ways, size), FLOAT32) if linear else _NO_NUMBERS
        if b is not None:
            biases = b[:, : 3 * size] + b[:, 3 * size :]
            if linear:
                biases[:, 2 * size :] = b[:, 2 * size : 3 * size]
                inner_bias = np.ascontiguousarray(b[:, 5 * size :])
            biases = _spread(biases, groups)
        return layer(x, 1, outer, inner, biases, lengths, [h], inner_bias)

    return run


def _refuse_quantized(node: NodeView) -> str | None:
    for index in (8, 10):
        info = node.inputs[index] if node.has_input(index) else None
        if info is None or info.shape is None or len(info.shape) > 2:
            return "it takes one scale for a matrix or one for each column only"
    return _refuse("Sigmoid", "Tanh", "Tanh")(node)


def _signed_panels(q: Array) -> Array:
    """Numbers of 8 bits as int8 in panels; from unsigned ones 128 is taken. [D, K, 4 H] -> [D, P, K, WIDTH]."""
    return _packed(q if q.dtype == np.int8 else (q ^ np.uint8(128)).view(np.int8), (4,))


@KERNELS.register("DynamicQuantizeLSTM", domain=CONTRIB, types={0: [FLOAT32]}, refuse=_refuse_quantized)
def dynamic_quantize_lstm(node: NodeContext) -> Run:
    """LSTM with weights of 8 bits, and what they are multiplied with rounded to 8 bits too.

    x: [T, B, I]; w: [D, I, 4 H]; r: [D, H, 4 H]; b: [D, 8 H]; lengths: [B]; h, c: [D, B, H]; scales and zero points of w and r: [D] or
    [D, 4 H] -> y [T, D, B, H], the last h and c [D, B, H]
    """
    from miniort_numba.compiled.integers import round_to_bytes
    from miniort_numba.compiled.recurrent import LSTM

    layer = _Layer(node, LSTM)
    fixed = {
        index: None if node.constant(index) is None else node.prepare(index, "numba.gates_of_8_bits_in_panels", _signed_panels)
        for index in (1, 2)
    }

    def weights(index: int, q: Array, scale: Array, zero_point: Array) -> _Weights:
        shape = (layer.ways, q.shape[2])
        scale, zero = (np.broadcast_to(each.reshape(layer.ways, -1), shape).astype(FLOAT32) for each in (scale, zero_point))
        if q.dtype != np.int8:
            zero -= 128
        panels = fixed[index]
        return _Weights(_signed_panels(q) if panels is None else panels, _spread(scale, (4,)), _spread(zero, (4,)))

    def run(
        x: Array,
        w: Array,
        r: Array,
        b: Array | None,
        lengths: Array | None,
        h: Array | None,
        c: Array | None,
        peepholes: None,
        w_scale: Array,
        w_zero_point: Array,
        r_scale: Array,
        r_zero_point: Array,
    ) -> Array | tuple[Array, ...]:
        (_, batch, width), ways, size = x.shape, layer.ways, r.shape[1]
        _check(W=(w, (ways, width, 4 * size)), R=(r, (ways, size, 4 * size)), B=(b, (ways, 8 * size)), sequence_lens=(lengths, (batch,)))
        _check(initial_h=(h, (ways, batch, size)), initial_c=(c, (ways, batch, size)))
        biases = None if b is None else _spread(b[:, : 4 * size] + b[:, 4 * size :], (4,))
        whole: Array = np.empty(x.shape, FLOAT32)
        factor = round_to_bytes(whole.reshape(-1), np.ascontiguousarray(x).reshape(-1))
        outer, inner = weights(1, w, w_scale, w_zero_point), weights(2, r, r_scale, r_zero_point)
        return layer(whole, factor, outer, inner, biases, lengths, [h, c])

    return run
