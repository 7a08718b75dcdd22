"""RNN, GRU and LSTM, over all their attributes, types and optional inputs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from miniort.errors import KernelError

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DIRECTIONS = ("forward", "reverse", "bidirectional")
T, B, IN, H = 5, 3, 4, 6


def inputs_of(op, direction, seed=0, dtype=np.float32):
    """x, w, r, b, lengths, h, c, peepholes: all that an op takes."""
    generator = np.random.default_rng(seed)
    ways = 2 if direction == "bidirectional" else 1
    gates = GATES[op]

    def normal(*shape):
        return generator.normal(0, 0.5, shape).astype(dtype)

    lengths = np.array([5, 2, 3], np.int32)
    values = [
        normal(T, B, IN),
        normal(ways, gates * H, IN),
        normal(ways, gates * H, H),
        normal(ways, 2 * gates * H),
        lengths,
        normal(ways, B, H),
    ]
    return [*values, normal(ways, B, H), normal(ways, 3 * H)] if op == "LSTM" else values


def compare(model, inputs, same, rtol=1e-4):
    for got, want in zip(model(*inputs), model.onnxruntime(*inputs), strict=True):
        same(got, want, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", GATES)
def test_optional_inputs(op, direction, node, same):
    """Every choice of the optional inputs, left out or named ""."""
    full = inputs_of(op, direction)
    optional = range(3, len(full))
    for count in (0, 1, 2, len(optional)):
        for kept in itertools.combinations(optional, count):
            inputs = [x if i < 3 or i in kept else None for i, x in enumerate(full)]
            model = node(op, 14, inputs_types(inputs), outputs=3 if op == "LSTM" else 2, hidden_size=H, direction=direction)
            compare(model, inputs, same)


def inputs_types(inputs):
    return [None if x is None else x.dtype for x in inputs]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("RNN", {"clip": 0.3}),
        ("GRU", {"linear_before_reset": 1}),
        ("GRU", {"clip": 0.2, "linear_before_reset": 1}),
        ("GRU", {"clip": 0.2}),
        ("LSTM", {"clip": 0.2}),
        ("LSTM", {"input_forget": 1}),
    ],
)
def test_attributes(op, direction, attributes, node, same):
    inputs = inputs_of(op, direction)
    if op == "LSTM" and "input_forget" in attributes:
        inputs = inputs[:7]  # onnxruntime adds the forget gate's peephole to a gate that isn't computed
    model = node(op, 14, inputs, outputs=3 if op == "LSTM" else 2, hidden_size=H, direction=direction, **attributes)
    compare(model, inputs, same)


@pytest.mark.parametrize(
    "chosen",
    [
        ({"activations": ["Affine"], "activation_alpha": [0.5], "activation_beta": [0.1]}),
        ({"activations": ["LeakyRelu"]}),
        ({"activations": ["LeakyRelu"], "activation_alpha": [0.2]}),
        ({"activations": ["ThresholdedRelu"], "activation_alpha": [0.2]}),
        ({"activations": ["ScaledTanh"], "activation_alpha": [1.2], "activation_beta": [0.7]}),
        ({"activations": ["HardSigmoid"]}),
        ({"activations": ["Elu"], "activation_alpha": [0.9]}),
        ({"activations": ["Softsign"]}),
        ({"activations": ["Softplus"]}),
        ({"activations": ["Relu"]}),
        ({"activations": ["Sigmoid"]}),
    ],
)
def test_activations(chosen, node, same):
    inputs = inputs_of("RNN", "forward")
    compare(node("RNN", 14, inputs, outputs=2, hidden_size=H, **chosen), inputs, same)


def test_activations_of_both_directions(node, same):
    """Alphas and betas go in order to the activations that take one."""
    inputs = inputs_of("LSTM", "bidirectional")
    names = ["HardSigmoid", "ScaledTanh", "Tanh", "Sigmoid", "LeakyRelu", "Elu"]
    attributes = {"activations": names, "activation_alpha": [0.3, 1.1, 0.05, 0.8], "activation_beta": [0.4, 0.9]}
    compare(node("LSTM", 14, inputs, outputs=3, hidden_size=H, direction="bidirectional", **attributes), inputs, same)
    with pytest.raises(KernelError, match="activation 'Sine'"):
        node("RNN", 14, inputs[:3], hidden_size=H, activations=["Sine"])(*inputs[:3])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", GATES)
def test_batch_first(op, direction, node, same):
    """`layout` 1 is the same with the batch in front; onnxruntime has no kernel for it."""
    inputs = inputs_of(op, direction)
    outputs = 3 if op == "LSTM" else 2
    want = node(op, 14, inputs, outputs=outputs, hidden_size=H, direction=direction)(*inputs)
    turned = [x.swapaxes(0, 1) if i == 0 or i in (5, 6) else x for i, x in enumerate(inputs)]
    got = node(op, 14, inputs, outputs=outputs, hidden_size=H, direction=direction, layout=1)(*turned)
    same(got[0], want[0].transpose(2, 0, 1, 3))
    for mine, other in zip(got[1:], want[1:], strict=True):
        same(mine, other.swapaxes(0, 1))


@pytest.mark.parametrize("op", GATES)
def test_types_versions_and_constant_weights(op, node, same, versions, types_of):
    for schema in versions(op):
        for dtype in types_of(schema, "T"):
            inputs = inputs_of(op, "forward", dtype=dtype)
            outputs = 3 if op == "LSTM" else 2
            wide = [x if i == 4 else x.astype(np.float64) for i, x in enumerate(inputs)]
            want = node(op, 22, wide, outputs=outputs, hidden_size=H)(*wide)
            for constants in ({}, {1: inputs[1], 2: inputs[2]}):
                got = node(op, schema.since_version, inputs, outputs=outputs, constants=constants, hidden_size=H)(*inputs)
                for mine, other in zip(got, want, strict=True):
                    same(
                        mine,
                        other.astype(dtype),
                        rtol=1e-5 if dtype == np.float32 else None,
                        atol=1e-2 if np.dtype(dtype).itemsize == 2 else 1e-6,
                    )


def test_no_steps_and_no_rows(node, same):
    inputs = inputs_of("LSTM", "forward")[:3]
    model = node("LSTM", 14, inputs, outputs=3, hidden_size=H)
    y, h, c = model(inputs[0][:0], *inputs[1:])
    same(y, np.zeros((0, 1, B, H), np.float32))
    same(h, np.zeros((1, B, H), np.float32))
    same(c, h)
    y, h, c = model(inputs[0][:, :0], *inputs[1:])
    same(y, np.zeros((T, 1, 0, H), np.float32))


def test_large_inputs_saturate(node, same):
    inputs = inputs_of("LSTM", "forward")[:3]
    inputs[0] = inputs[0] * 1e30
    compare(node("LSTM", 14, inputs, outputs=3, hidden_size=H), inputs, same)
