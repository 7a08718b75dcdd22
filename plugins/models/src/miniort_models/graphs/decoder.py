"""What the graphs of all decoders have in common: their inputs and outputs, their weights, and who sees whom.

An architecture writes one graph with these, and gets two: `prefill.onnx` reads a prompt, `decode.onnx` goes on from cached keys and
values. The axes in the comments are

    B batch     S sequence: the tokens given in this run     T time: the past and the sequence, whatever a token may look at
    E width     V vocabulary     H heads     D head dim
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from miniort.types import Array
from miniort_models.graphs import operators
from miniort_models.graphs.writer import MICROSOFT, GraphWriter
from miniort_models.weights.weights_file import Axes, Stored, StoredBlocks, WeightsFile


class DecoderGraph(GraphWriter):
    """One of a decoder's two graphs while it is written.

    Inputs: input_ids [B, S], attention_mask [B, T] (0 for padding), position_ids [B, S], and where there is a past, each layer's
    `past_key_values.N.key` and `.value`, [B, Hkv, P, D]. Outputs: logits [B, S, V], or [B, 1, V] for the last position alone, and each
    layer's `present.N.key` and `.value`, [B, Hkv, T, D].

    weights: where weights come from, and are stored.
    with_past: whether the graph goes on from a past, which may be empty; without one it reads a prompt.
    all_logits: whether a graph that reads a prompt gives logits for every position.
    """

    def __init__(self, weights: WeightsFile, opset: int, *, with_past: bool, all_logits: bool = False) -> None:
        super().__init__(opset)
        self.weights, self.with_past = weights, with_past
        self._every_position = with_past or all_logits
        self._time = "past_sequence + sequence" if with_past else "sequence"
        self._presents: list[tuple[str, list[str | int]]] = []
        self.input("input_ids", np.int64, ["batch", "sequence"])
        self.input("attention_mask", np.int64, ["batch", self._time])
        self.input("position_ids", np.int64, ["batch", "sequence"])

    # ------------------------------------------------------------------------------------------------- weights

    def vector(self, name: str, size: int, offset: float = 0) -> str:
        """A bias, or the scale of a norm, plus `offset`: [size]"""
        return self.stored(self.weights.vector(name, [name], [size], offset))

    def embedding(self, name: str, rows: int, width: int, to: str) -> str:
        """The row of a table [rows, width] for each token: [B, S, width]"""
        return self._looked_up(self.weights.table(name, rows, width), "input_ids", to)

    def position_embedding(self, name: str, rows: int, width: int, to: str) -> str:
        """The row of a table [rows, width] for each position: [B, S, width]"""
        return self._looked_up(self.weights.float_table(name, rows, width), "position_ids", to)

    def linear(self, x: str, name: str, inputs: int, outputs: int, *, bias: bool, axes: Axes = "out in", order: Array | None = None) -> str:
        """x · weightᵀ + bias. [B, S, inputs] -> [B, S, outputs]

        name: of the projection; its weights are `name`.weight and `name`.bias.
        axes: how the source has the weight. order: which row of it comes when.
        """
        [y] = self._product(x, name, [name], inputs, [outputs], bias, axes, order)
        return y

    def linears(self, x: str, names: Sequence[str], inputs: int, outputs: Sequence[int], *, bias: bool) -> list[str]:
        """Several projections of one value, as one product that is cut afterwards. [B, S, inputs] -> a [B, S, outputs[i]] for each.

        names: a name for each, or one name where the source has them as one already.
        """
        if len(names) == 1:
            y = self.linear(x, names[0], inputs, sum(outputs), bias=bias)
            return operators.split(self, y, outputs, to=[f"{y}.part{index}" for index in range(len(outputs))])
        joined = "+".join([names[0], *(name.rpartition(".")[2] for name in names[1:])])
        products = self._product(x, joined, names, inputs, outputs, bias)
        return operators.split(self, products[0], outputs, to=list(names)) if len(products) == 1 else products

    def _product(
        self,
        x: str,
        name: str,
        parts: Sequence[str],
        inputs: int,
        outputs: Sequence[int],
        bias: bool,
        axes: Axes = "out in",
        order: Array | None = None,
    ) -> list[str]:
        """Projections as one product, or as one for each part where their weights can't be joined."""
        stored = self.weights.projections(f"{name}.weight", [f"{part}.weight" for part in parts], inputs, outputs, axes, order)
        if len(stored) == 1 and len(parts) > 1:
            groups = [(name, list(parts), list(outputs))]
        else:
            groups = [(part, [part], [size]) for part, size in zip(parts, outputs, strict=True)]
        products = []
        for weight, (group, members, sizes) in zip(stored, groups, strict=True):
            y = self._times(x, weight, to=f"{group}.product" if bias else group)
            if bias:
                vector = self.weights.vector(f"{group}.bias", [f"{member}.bias" for member in members], sizes, order=order)
                y = self.add("Add", y, self.stored(vector), to=group)
            products.append(y)
        return products

    def last_position(self, x: str) -> str:
        """What is needed to compute logits: [B, S, E] -> [B, S, E], or [B, 1, E] where only the last position's are wanted."""
        return x if self._every_position else self.add("Gather", x, self.integers([-1]), to="last", axis=1)

    def head(self, x: str, name: str, vocabulary: int, width: int, *, tied_to: str | None = None, cap: float | None = None) -> None:
        """How likely each token of the vocabulary is to come next: [B, S, E] -> the output logits [B, S, V]

        name: of a table [V, E]. tied_to: the embedding, where that's the head again. cap: see `operators.softcap`.
        """
        if tied_to is not None:
            self.weights.require_same(name, tied_to)
            name = tied_to
        stored = self.weights.table(name, vocabulary, width)
        to = "logits" if cap is None else "logits.uncapped"
        if isinstance(stored, StoredBlocks):
            self._times(x, stored, to)
        else:
            transposed = self.add("Transpose", self._in_float32(stored), to=f"{name}.transposed", perm=[1, 0])  # [E, V]
            self.add("MatMul", x, transposed, to=to)
        if cap is not None:
            operators.softcap(self, to, cap, to="logits")
        self.output("logits", np.float32, ["batch", "sequence" if self._every_position else 1, vocabulary])
        for present, shape in self._presents:
            self.output(present, np.float32, shape)

    def _times(self, x: str, weight: Stored, to: str) -> str:
        """x [B, S, inputs] · weight -> [B, S, outputs]"""
        if not isinstance(weight, StoredBlocks):
            return self.add("MatMul", x, self._in_float32(weight), to=to)
        parts = [weight.codes, weight.scales, *([] if weight.zero_points is None else [weight.zero_points])]
        sizes = {"K": weight.columns, "N": weight.rows, "bits": weight.bits, "block_size": weight.block_size}
        if to != "logits":
            self.shape(to, np.float32, ["batch", "sequence", weight.rows])
        return self.add("MatMulNBits", x, *(self.stored(part) for part in parts), to=to, domain=MICROSOFT, **sizes)

    def _in_float32(self, tensor: TensorProto) -> str:
        """A weight in float32. One that is stored narrower is cast, once however often it is used."""
        name = self.stored(tensor)
        return name if tensor.data_type == TensorProto.FLOAT else self.cast(name, np.float32, to=f"{name}.float32")

    def _looked_up(self, table: Stored, ids: str, to: str) -> str:
        """Rows of a table: ids [B, S] -> [B, S, columns] float32. What isn't looked up is never made float32."""
        if isinstance(table, StoredBlocks):
            return self._looked_up_in_blocks(table, ids, to)
        if table.data_type == TensorProto.FLOAT:
            return self.add("Gather", self.stored(table), ids, to=to)
        return self.cast(self.add("Gather", self.stored(table), ids, to=f"{to}.stored"), np.float32, to=to)

    def _looked_up_in_blocks(self, table: StoredBlocks, ids: str, to: str) -> str:
        """(code - zero point) · scale, of the rows that are wanted."""
        blocks, padded = table.scales.dims[1], table.scales.dims[1] * table.block_size
        codes = self._unpacked(self.add("Gather", self.stored(table.codes), ids, to=f"{to}.bytes"), table.bits, f"{to}.codes")
        codes = self.add("Reshape", codes, self.integers([0, 0, blocks, table.block_size]), to=f"{to}.blocks")  # [B, S, blocks, block size]
        if table.zero_points is None:
            shift = self.number(2 ** (table.bits - 1))
        else:
            points = self.add("Gather", self.stored(table.zero_points), ids, to=f"{to}.points")
            if table.zero_points.data_type == TensorProto.UINT8:
                points = self._unpacked(points, table.bits, f"{to}.unpacked_points")
                points = self.add("Reshape", points, self.integers([0, 0, -1]), to=f"{to}.all_points")
                points = self._first(points, blocks, to=f"{to}.zero_points")
            shift = self.add("Unsqueeze", points, self.integers([-1]), to=f"{to}.shift")  # [B, S, blocks, 1]
        scales = self.add("Gather", self.stored(table.scales), ids, to=f"{to}.scales")
        scales = self.add("Unsqueeze", scales, self.integers([-1]), to=f"{to}.factors")
        values = self.add("Mul", self.add("Sub", codes, shift, to=f"{to}.shifted"), scales, to=f"{to}.values")
        if padded == table.columns:
            return self.add("Reshape", values, self.integers([0, 0, padded]), to=to)
        rows = self.add("Reshape", values, self.integers([0, 0, padded]), to=f"{to}.rows")
        return self._first(rows, table.columns, to)

    def _first(self, x: str, count: int, to: str) -> str:
        """The first elements along the last axis."""
        return self.add("Slice", x, self.integers([0]), self.integers([count]), self.integers([-1]), to=to)

    def _unpacked(self, packed: str, bits: int, to: str) -> str:
        """Codes out of bytes, those in the lowest bits first: [..., N] uint8 -> [..., N, 8 / bits] float32"""
        rest, parts = self.cast(packed, np.float32, to=f"{to}.byte"), []
        for part in range(8 // bits - 1):
            above = self.add("Floor", self.add("Mul", rest, self.number(0.5**bits), to=f"{to}.{part}.over"), to=f"{to}.{part}.above")
            parts.append(self.add("Sub", rest, self.add("Mul", above, self.number(2.0**bits), to=f"{to}.{part}.high"), to=f"{to}.{part}"))
            rest = above
        apart = [self.add("Unsqueeze", part, self.integers([-1]), to=f"{part}.apart") for part in [*parts, rest]]
        return self.add("Concat", *apart, to=to, axis=-1)

    # ---------------------------------------------------------------------------------------- who sees whom

    def mask(self, window: int | None = None) -> str:
        """Who sees whom, true or false, for all heads alike: [B, 1, S, T]

        Query i is token number T - S + i. It sees key j if j isn't after it, nor `window` tokens or more before it, and isn't padding.
        """
        name = "mask" if window is None else f"mask.window_{window}"
        if self.is_written(name):
            return name
        if not self.is_written("mask.causal"):
            zero, one = self.integer(0), self.integer(1)
            time = operators.size(self, "attention_mask", axis=1)
            keys = self.add("Range", zero, time, one, to="mask.keys")  # [T]
            queries = keys
            if self.with_past:
                past = self.add("Sub", time, operators.size(self, "input_ids", axis=1), to="mask.past")
                queries = self.add("Range", past, time, one, to="mask.queries")  # [S]
            self.add("Unsqueeze", queries, self.integers([1]), to="mask.rows")  # [S, 1]
            self.add("LessOrEqual", keys, "mask.rows", to="mask.causal")  # [S, T]
            real = self.cast("attention_mask", np.bool_, to="mask.real")  # [B, T], false for padding
            self.add("Unsqueeze", real, self.integers([1, 2]), to="mask.columns")  # [B, 1, 1, T]
        seen = "mask.causal"
        if window is not None:
            end = self.add("Add", "mask.keys", self.integer(window), to=f"{name}.end")  # the first query that key j is too far from
            near = self.add("Less", "mask.rows", end, to=f"{name}.near")  # [S, T]
            seen = self.add("And", "mask.causal", near, to=f"{name}.seen")
        return self.add("And", seen, "mask.columns", to=name)

    def names_of_new(self, layer: int) -> tuple[str, str]:
        """What a layer's new keys and values, [B, Hkv, S, D], have to be called. Without a past they're the layer's present already."""
        return (f"{layer}.key", f"{layer}.value") if self.with_past else (f"present.{layer}.key", f"present.{layer}.value")

    def attend(
        self,
        layer: int,
        query: str,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        cap: float | None = None,
    ) -> str:
        """Each head mixes the values of the tokens that it sees: query [B, H, S, D] -> [B, S, H · D]

        The new keys and values are those that were written under `names_of_new`. See `operators.attention`.
        """
        past: tuple[str, str] | None = None
        present = (f"present.{layer}.key", f"present.{layer}.value")
        if self.with_past:
            past = (f"past_key_values.{layer}.key", f"past_key_values.{layer}.value")
            for name in past:
                self.input(name, np.float32, ["batch", kv_heads, "past_sequence", head_dim])
        self._presents += [(name, ["batch", kv_heads, self._time, head_dim]) for name in present]
        mixed = operators.attention(
            self,
            query,
            *self.names_of_new(layer),
            self.mask(window),
            past,
            present,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=scale,
            cap=cap,
            to=f"{layer}.mixed",
        )
        return operators.join_heads(self, mixed, heads * head_dim)
