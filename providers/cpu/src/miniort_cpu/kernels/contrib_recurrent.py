"""Recurrent layers of com.microsoft on 8-bit weights: DynamicQuantizeLSTM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import FLOAT32
from miniort_cpu.kernels.contrib_activation import CONTRIB
from miniort_cpu.kernels.quantization import dequantize, dynamic_scale
from miniort_cpu.kernels.recurrent import Cell, Limits, LSTMCell, State, _activations, _layer, _selected

kernels = KernelTable("cpu")


def _rounded(x: Array) -> Array:
    """`x` rounded to the 256 values that its own range gives, as DynamicQuantizeLinear does. x: [...] float32 -> same shape."""
    scale, zero_point = dynamic_scale(x)
    y = np.divide(x, scale, out=...)
    np.rint(y, out=y)
    np.minimum(y, 255.0 - float(zero_point), out=y)  # none comes out below -zero_point, as the smallest is rounded like it
    return np.multiply(y, scale, out=y)


@dataclass(frozen=True)
class RoundedHidden:
    """A cell that sees the hidden state in 8 bits."""

    cell: LSTMCell

    @property
    def recurrent(self) -> Array:
        """What the hidden state is multiplied with. [H, 4 H]."""
        return self.cell.recurrent

    def step(self, inputs: Array, state: State) -> State:
        """The next state. inputs: [B, 4 H]."""
        hidden, memory = state
        return self.cell.step(inputs, (_rounded(hidden), memory))


@kernels.register("DynamicQuantizeLSTM", domain=CONTRIB)
def dynamic_quantize_lstm(node: NodeContext) -> Run:
    """LSTM with weights of 8 bits, and what they are multiplied with rounded to 8 bits too.

    x: [T, B, I]; w: [D, I, 4 H]; r: [D, H, 4 H]; b: [D, 8 H]; lengths: [B]; h, c: [D, B, H]; peepholes: [D, 3 H]; scales and zero
    points of w and r: [D] or [D, 4 H] -> y [T, D, B, H], the last h and c [D, B, H]
    """
    layer, limit = _layer(node), Limits(node.attribute("clip", None))
    activations = _activations(node, ("Sigmoid", "Tanh", "Tanh"), len(layer.directions))
    coupled = bool(node.attribute("input_forget", 0))

    def weights(q: Array, scale: Array, zero_point: Array) -> Array:
        """[D, N, 4 H] -> [D, N, 4 H] float32."""
        ways = len(layer.directions)
        return dequantize(np.empty, q, scale.reshape(ways, 1, -1), zero_point.reshape(ways, 1, -1), FLOAT32)

    def fixed(index: int, scale: int) -> Array | None:
        constants = [node.constant(each) for each in (index, scale, scale + 1)]
        return None if any(each is None for each in constants) else weights(*constants)  # type: ignore[arg-type]

    fixed_w, fixed_r = fixed(1, 8), fixed(2, 10)

    def run(
        x: Array,
        w: Array,
        r: Array,
        b: Array | None,
        lengths: Array | None,
        h: Array | None,
        c: Array | None,
        peepholes: Array | None,
        w_scale: Array,
        w_zero_point: Array,
        r_scale: Array,
        r_zero_point: Array,
    ) -> Array | tuple[Array, ...]:
        inner = weights(r, r_scale, r_zero_point) if fixed_r is None else fixed_r
        outer = weights(w, w_scale, w_zero_point) if fixed_w is None else fixed_w
        size = r.shape[1]
        biases = None if b is None else b[:, : 4 * size] + b[:, 4 * size :]
        cells: list[Cell] = [
            RoundedHidden(LSTMCell(inner[way], None if peepholes is None else peepholes[way], coupled, activations[way], limit))
            for way in range(len(layer.directions))
        ]
        return _selected(node, layer(_rounded(x), outer.swapaxes(1, 2), biases, lengths, [h, c], cells))

    return run
