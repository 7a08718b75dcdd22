"""GPT-2 as two ONNX graphs: `prefill.onnx` reads a prompt, `decode.onnx` goes on from cached keys and values.

"Language Models are Unsupervised Multitask Learners" (2019); weights have Hugging Face's names and layout.

    x = wte[token] + wpe[position]              embedding
    x = x + attention(norm(x))                  block, n_layer times
    x = x + mlp(norm(x))
    logits = norm(x) @ transpose(wte)           head: the token embedding again ("tied")

Both graphs use standard ONNX operators alone, and both read their weights from one file, `weights.bin`.
The axes in the comments are

    B batch             S sequence: the tokens given in this run
    E n_embd            T time: the past and the sequence, whatever a token may look at
    H heads             V vocabulary
    D = E / H
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray
from onnx import TensorProto, helper, numpy_helper

from miniort.errors import ModelError

IR_VERSION = 10
WEIGHTS_FILE = "weights.bin"

Weights = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class GPT2Config:
    """A GPT-2's size, and its special tokens; fields are named as in Hugging Face's `config.json`."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None  # None: 4 * n_embd
    layer_norm_epsilon: float = 1e-5
    bos_token_id: int = 50256
    eos_token_id: int = 50256

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ModelError(f"n_embd={self.n_embd} has to be a multiple of n_head={self.n_head}")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> GPT2Config:
        """From a parsed `config.json`; a variant of GPT-2 that the graphs don't compute is a ModelError."""
        computed: dict[str, tuple[Any, ...]] = {  # the first is what an absent entry means
            "model_type": ("gpt2",),
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "tie_word_embeddings": (True,),
        }
        for name, values in computed.items():
            if config.get(name, values[0]) not in values:
                wanted = " or ".join(map(repr, values))
                raise ModelError(f"config.json has {name}={config[name]!r}; the GPT-2 graphs compute {wanted}")
        return cls(**{name: config[name] for name in cls.__dataclass_fields__ if name in config})

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """All the weights there are; a projection is stored [in, out]."""
        width, inner = self.n_embd, self.n_inner or 4 * self.n_embd
        shapes: dict[str, tuple[int, ...]] = {
            "wte.weight": (self.vocab_size, width),
            "wpe.weight": (self.n_positions, width),
        }
        for layer in range(self.n_layer):
            shapes |= {
                f"h.{layer}.ln_1.weight": (width,),
                f"h.{layer}.ln_1.bias": (width,),
                f"h.{layer}.attn.c_attn.weight": (width, 3 * width),  # query, key and value side by side
                f"h.{layer}.attn.c_attn.bias": (3 * width,),
                f"h.{layer}.attn.c_proj.weight": (width, width),
                f"h.{layer}.attn.c_proj.bias": (width,),
                f"h.{layer}.ln_2.weight": (width,),
                f"h.{layer}.ln_2.bias": (width,),
                f"h.{layer}.mlp.c_fc.weight": (width, inner),
                f"h.{layer}.mlp.c_fc.bias": (inner,),
                f"h.{layer}.mlp.c_proj.weight": (inner, width),
                f"h.{layer}.mlp.c_proj.bias": (width,),
            }
        return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def build(
    config: GPT2Config,
    weights: Weights,
    folder: Path,
    *,
    opset: int = 23,
    weight_dtype: Literal["float32", "float16"] = "float32",
    all_logits: bool = False,
) -> None:
    """Write `prefill.onnx`, `decode.onnx` and `weights.bin` into a folder.

    weights: by Hugging Face's names, with or without `transformer.` in front.
    opset: 23 or later, for the operator Attention.
    weight_dtype: how weights are stored. All arithmetic is in float32.
    all_logits: prefill gives logits for every position, not only for the last.
    """
    if opset < 23:
        raise ModelError(f"opset {opset} has no Attention; give opset 23 or later")
    folder.mkdir(parents=True, exist_ok=True)
    stored = _store(_select(config, weights), np.dtype(weight_dtype), folder / WEIGHTS_FILE)
    onnx.save(prefill(config, stored, opset, all_logits), folder / "prefill.onnx")
    onnx.save(decode(config, stored, opset), folder / "decode.onnx")


# --------------------------------------------------------------------------------------------- the two graphs


def prefill(config: GPT2Config, stored: Mapping[str, TensorProto], opset: int, all_logits: bool) -> onnx.ModelProto:
    """Reads a prompt: ids [B, S] -> logits [B, 1, V], and each layer's keys and values [B, H, S, D]."""
    graph = _Graph(stored)
    graph.input("input_ids", np.int64, ["batch", "sequence"])
    graph.input("attention_mask", np.int64, ["batch", "sequence"])
    graph.input("position_ids", np.int64, ["batch", "sequence"])
    graph.output("logits", np.float32, ["batch", "sequence" if all_logits else 1, config.vocab_size])
    present: list[str | int] = ["batch", config.n_head, "sequence", config.head_dim]
    for layer in range(config.n_layer):
        graph.output(f"present.{layer}.key", np.float32, present)
        graph.output(f"present.{layer}.value", np.float32, present)

    x = embedding(graph)
    mask = attention_mask(graph, past=None)
    for layer in range(config.n_layer):
        x = block(graph, config, layer, x, mask, past=None)
    if not all_logits:
        x = graph.add("Gather", x, graph.integers([-1]), to="last", axis=1)  # [B, 1, E]
    head(graph, config, x)
    return graph.model("gpt2_prefill", opset)


def decode(config: GPT2Config, stored: Mapping[str, TensorProto], opset: int) -> onnx.ModelProto:
    """Goes on from a past, which may be empty: ids [B, S] -> logits [B, S, V], and the past grown by S."""
    graph = _Graph(stored)
    graph.input("input_ids", np.int64, ["batch", "sequence"])
    graph.input("attention_mask", np.int64, ["batch", "past_sequence + sequence"])
    graph.input("position_ids", np.int64, ["batch", "sequence"])
    graph.output("logits", np.float32, ["batch", "sequence", config.vocab_size])
    past_shape: list[str | int] = ["batch", config.n_head, "past_sequence", config.head_dim]
    present: list[str | int] = ["batch", config.n_head, "past_sequence + sequence", config.head_dim]
    for layer in range(config.n_layer):
        graph.input(f"past_key_values.{layer}.key", np.float32, past_shape)
        graph.input(f"past_key_values.{layer}.value", np.float32, past_shape)
        graph.output(f"present.{layer}.key", np.float32, present)
        graph.output(f"present.{layer}.value", np.float32, present)

    x = embedding(graph)
    mask = attention_mask(graph, past="past_key_values.0.key")
    for layer in range(config.n_layer):
        past = (f"past_key_values.{layer}.key", f"past_key_values.{layer}.value")
        x = block(graph, config, layer, x, mask, past)
    head(graph, config, x)
    return graph.model("gpt2_decode", opset)


# ----------------------------------------------------------------------------------------- the parts of GPT-2


def embedding(graph: _Graph) -> str:
    """What the token is, plus where it stands: [B, S, E]"""
    token = graph.add("Gather", graph.weight("wte.weight"), "input_ids", to="wte")
    position = graph.add("Gather", graph.weight("wpe.weight"), "position_ids", to="wpe")
    return graph.add("Add", token, position, to="embedding")


def attention_mask(graph: _Graph, past: str | None) -> str:
    """Who sees whom, true or false, for all layers and heads alike: [B, 1, S, T]

    Query i is token number past + i. It sees key j if j <= past + i and attention_mask[b, j] != 0.
    """
    zero, one = graph.integer(0), graph.integer(1)
    time = graph.size("attention_mask", axis=1)
    keys = graph.add("Range", zero, time, one, to="mask.keys")  # [T]
    queries = keys
    if past is not None:
        queries = graph.add("Range", graph.size(past, axis=2), time, one, to="mask.queries")  # [S]
    queries = graph.add("Unsqueeze", queries, graph.integers([1]), to="mask.rows")  # [S, 1]
    causal = graph.add("LessOrEqual", keys, queries, to="mask.causal")  # [S, T]
    real = graph.cast("attention_mask", TensorProto.BOOL, to="mask.real")  # [B, T], false for padding
    real = graph.add("Unsqueeze", real, graph.integers([1, 2]), to="mask.columns")  # [B, 1, 1, T]
    return graph.add("And", causal, real, to="mask")


def block(graph: _Graph, config: GPT2Config, layer: int, x: str, mask: str, past: tuple[str, str] | None) -> str:
    """One layer: [B, S, E] -> [B, S, E]"""
    name = f"h.{layer}"
    attended = attention(graph, config, layer, norm(graph, config, f"{name}.ln_1", x), mask, past)
    x = graph.add("Add", x, attended, to=f"{name}.attn.residual")
    thought = mlp(graph, f"{name}.mlp", norm(graph, config, f"{name}.ln_2", x))
    return graph.add("Add", x, thought, to=f"{name}.mlp.residual")


def attention(graph: _Graph, config: GPT2Config, layer: int, x: str, mask: str, past: tuple[str, str] | None) -> str:
    """Each head mixes the values of the tokens that it sees: [B, S, E] -> [B, S, E]

    The keys and values of all T tokens, those of the past before the new ones, are the layer's present.
    """
    name = f"h.{layer}.attn"
    present = [f"present.{layer}.key", f"present.{layer}.value"]
    parts = [f"{name}.{part}" for part in ("query", "key", "value")]
    graph.add("Split", linear(graph, f"{name}.c_attn", x), to=parts, axis=-1, num_outputs=3)  # 3 of [B, S, E]

    query = split_heads(graph, config, parts[0], to=f"{name}.query_heads")
    if past is None:
        key = split_heads(graph, config, parts[1], to=present[0])
        value = split_heads(graph, config, parts[2], to=present[1])
        mixed = graph.add("Attention", query, key, value, mask, to=f"{name}.mixed", is_causal=0)
    else:
        key = split_heads(graph, config, parts[1], to=f"{name}.key_heads")
        value = split_heads(graph, config, parts[2], to=f"{name}.value_heads")
        outputs = [f"{name}.mixed", *present]
        mixed = graph.add("Attention", query, key, value, mask, *past, to=outputs, is_causal=0)
    return linear(graph, f"{name}.c_proj", join_heads(graph, config, mixed))


def split_heads(graph: _Graph, config: GPT2Config, x: str, to: str) -> str:
    """[B, S, E] -> [B, H, S, D]"""
    heads = graph.integers([0, 0, config.n_head, config.head_dim])  # 0: as it is
    x = graph.add("Reshape", x, heads, to=f"{x}.split")  # [B, S, H, D]
    return graph.add("Transpose", x, to=to, perm=[0, 2, 1, 3])


def join_heads(graph: _Graph, config: GPT2Config, x: str) -> str:
    """[B, H, S, D] -> [B, S, E]"""
    by_token = graph.add("Transpose", x, to=f"{x}.by_token", perm=[0, 2, 1, 3])  # [B, S, H, D]
    return graph.add("Reshape", by_token, graph.integers([0, 0, config.n_embd]), to=f"{x}.joined")


def mlp(graph: _Graph, name: str, x: str) -> str:
    """Each token by itself, through a hidden layer of n_inner: [B, S, E] -> [B, S, E]"""
    hidden = graph.add("Gelu", linear(graph, f"{name}.c_fc", x), to=f"{name}.gelu", approximate="tanh")
    return linear(graph, f"{name}.c_proj", hidden)


def head(graph: _Graph, config: GPT2Config, x: str) -> None:
    """How likely each token of the vocabulary is to come next: [B, S, E] -> logits [B, S, V]"""
    embeddings = graph.weight("wte.weight")  # [V, E]
    transposed = graph.add("Transpose", embeddings, to="wte.transposed", perm=[1, 0])  # [E, V]
    graph.add("MatMul", norm(graph, config, "ln_f", x), transposed, to="logits")


def norm(graph: _Graph, config: GPT2Config, name: str, x: str) -> str:
    """LayerNorm over each token: [B, S, E] -> [B, S, E]"""
    scale, bias = graph.weight(f"{name}.weight"), graph.weight(f"{name}.bias")
    epsilon = config.layer_norm_epsilon
    return graph.add("LayerNormalization", x, scale, bias, to=name, axis=-1, epsilon=epsilon)


def linear(graph: _Graph, name: str, x: str) -> str:
    """Projection x @ weight + bias: [B, S, in] -> [B, S, out]"""
    product = graph.add("MatMul", x, graph.weight(f"{name}.weight"), to=f"{name}.product")
    return graph.add("Add", product, graph.weight(f"{name}.bias"), to=name)


# ------------------------------------------------------------------------------------------ writing ONNX down


@dataclass
class _Graph:
    """A graph while it is written: nodes in the order in which they run; a value is known by its name."""

    stored: Mapping[str, TensorProto]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)

    def input(self, name: str, dtype: DTypeLike, shape: list[str | int]) -> None:
        self.inputs.append(_value_info(name, dtype, shape))

    def output(self, name: str, dtype: DTypeLike, shape: list[str | int]) -> None:
        self.outputs.append(_value_info(name, dtype, shape))

    def add(self, op: str, *inputs: str, to: str | list[str], **attributes: Any) -> str:
        """Append a node that writes to the value, or values, named `to`; returns the name of the first."""
        outputs = [to] if isinstance(to, str) else to
        self.nodes.append(helper.make_node(op, inputs, outputs, name=f"{outputs[0]}/{op}", **attributes))
        return outputs[0]

    def cast(self, x: str, dtype: int, to: str) -> str:
        """Append a Cast, whose attribute for the type happens to be called `to` as well."""
        self.nodes.append(helper.make_node("Cast", [x], [to], name=f"{to}/Cast", to=dtype))
        return to

    def size(self, x: str, axis: int) -> str:
        """How long a value is along one axis, as a scalar."""
        shape = self.add("Shape", x, to=f"{x}.shape", start=axis, end=axis + 1)  # [1]
        return self.add("Squeeze", shape, to=f"{x}.size")

    def weight(self, name: str) -> str:
        """A weight in float32. One that is stored in float16 is cast, once however often it is used."""
        if self.stored[name].data_type == TensorProto.FLOAT:
            return name
        cast = f"{name}.float32"
        if not any(cast in node.output for node in self.nodes):
            self.cast(name, TensorProto.FLOAT, to=cast)
        return cast

    def integer(self, value: int) -> str:
        return self._constant(f"{value}", np.array(value, np.int64))

    def integers(self, values: list[int]) -> str:
        return self._constant(f"{values}", np.array(values, np.int64))

    def _constant(self, name: str, value: NDArray[np.int64]) -> str:
        self.constants[name] = numpy_helper.from_array(value, name)
        return name

    def model(self, name: str, opset: int) -> onnx.ModelProto:
        initializers = [*self.constants.values(), *self.stored.values()]
        return helper.make_model(
            helper.make_graph(self.nodes, name, self.inputs, self.outputs, initializers),
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", opset)],
            producer_name="miniort",
        )


def _value_info(name: str, dtype: DTypeLike, shape: list[str | int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def _select(config: GPT2Config, weights: Weights) -> dict[str, NDArray[Any]]:
    """The weights that a GPT-2 of this size has, checked, without `transformer.` in front of their names."""
    given = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    chosen = {}
    for name, shape in config.weight_shapes().items():
        if name not in given:
            raise ModelError(f"weight {name!r} is missing; there are {', '.join(sorted(weights))}")
        if given[name].shape != shape:
            found = list(given[name].shape)
            raise ModelError(f"weight {name!r} has shape {found}; the config asks for {list(shape)}")
        chosen[name] = given[name]
    untied = given.get("lm_head.weight")
    if untied is not None and not np.array_equal(untied, chosen["wte.weight"]):
        raise ModelError("'lm_head.weight' differs from 'wte.weight'; the head of the GPT-2 graphs is the embedding again")
    return chosen


def _store(weights: Weights, dtype: np.dtype[Any], path: Path) -> dict[str, TensorProto]:
    """Write the weights one after another into a file; returns tensors that say where each one is.

    A weight starts at a multiple of 64 bytes (a cache line), a large one of 4096 (a page, for memory maps).
    """
    stored = {}
    with path.open("wb") as file:
        for name, weight in weights.items():
            data = np.ascontiguousarray(weight, dtype=dtype.newbyteorder("<")).tobytes()
            alignment = 4096 if len(data) >= 2**20 else 64
            file.write(bytes(-file.tell() % alignment))
            data_type = helper.np_dtype_to_tensor_dtype(dtype)
            tensor = TensorProto(name=name, dims=weight.shape, data_type=data_type)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", path.name), ("offset", file.tell()), ("length", len(data))):
                tensor.external_data.add(key=key, value=str(value))
            file.write(data)
            stored[name] = tensor
    return stored
