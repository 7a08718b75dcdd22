"""Builders of ops that work element by element."""

from __future__ import annotations

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse, is_float


@builds("Abs", "Neg", "Sign", "Floor", "Ceil", "Round", "Exp", "Sqrt", "Log", "Reciprocal")
@builds("Sin", "Cos", "Tan", "Sinh", "Cosh", "Tanh", "Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh", "Erf")
@builds("Sigmoid", "Softplus", "Softsign", "Relu", "HardSwish", "Mish", "IsNaN", "Not", "BitwiseNot")
def unary(d: Draws, operator: Operator) -> NodeCase:
    """Op(x)."""
    dtype = d.dtype(operator, operator.schema.inputs[0].type_str)
    whole = operator.op == "Erf" and not is_float(dtype)  # near 1 it would depend on how the function is rounded before it's made whole
    x = d.array(dtype, d.shape(), -1, 1) if whole else d.array(dtype, d.shape())
    return NodeCase([x], constants=d.constants(0))


ACTIVATION_ATTRIBUTES = {
    "Elu": ["alpha"],
    "Selu": ["alpha", "gamma"],
    "Celu": ["alpha"],
    "LeakyRelu": ["alpha"],
    "ThresholdedRelu": ["alpha"],
    "HardSigmoid": ["alpha", "beta"],
    "Shrink": ["bias", "lambd"],
    "Swish": ["alpha"],
}


@builds(*ACTIVATION_ATTRIBUTES)
def activation(d: Draws, operator: Operator) -> NodeCase:
    """Op(x) with float attributes, each there or left to its default."""
    dtype = d.dtype(operator)
    names = [name for name in ACTIVATION_ATTRIBUTES[operator.op] if d.boolean()]
    return NodeCase([d.array(dtype, d.shape(), special=is_float(dtype))], {name: d.number(0.125, 2) for name in names})


@builds("Add", "Sub", "Mul", "And", "Or", "Xor", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
@builds("BitwiseAnd", "BitwiseOr", "BitwiseXor")
def binary(d: Draws, operator: Operator) -> NodeCase:
    """Op(a, b) where one, or the other, broadcasts."""
    dtype = d.dtype(operator, operator.schema.inputs[0].type_str)
    shape = d.shape()
    pair = [d.array(dtype, shape), d.array(dtype, d.broadcasting(shape))]
    return NodeCase(pair if d.boolean() else pair[::-1], constants=frozenset([d.integer(0, 1)]) if d.boolean() else frozenset())


@builds("Div", "Mod")
def division(d: Draws, operator: Operator) -> NodeCase:
    """A quotient or a remainder; integers aren't divided by 0, which no specification defines."""
    dtype = d.dtype(operator)
    shape = d.shape()
    divisor = d.array(dtype, d.broadcasting(shape), special=is_float(dtype))
    if not is_float(dtype):
        divisor = np.where(divisor == 0, np.ones_like(divisor), divisor)
    attributes = {"fmod": 1} if operator.op == "Mod" and (is_float(dtype) or d.boolean()) else {}
    return NodeCase([d.array(dtype, shape, special=False), divisor], attributes)


@builds("Gelu")
def gelu(d: Draws, operator: Operator) -> NodeCase:
    """Exact or by tanh."""
    dtype = d.dtype(operator)
    return NodeCase([d.array(dtype, d.shape())], d.some(approximate=d.choice(["none", "tanh"])), atol=0.02 if is_coarse(dtype) else None)


@builds("IsInf")
def is_inf(d: Draws, operator: Operator) -> NodeCase:
    """Infinities of the signs that are asked for."""
    x = d.array(d.dtype(operator, "T1"), d.shape())
    return NodeCase([x], d.some(detect_negative=d.integer(0, 1), detect_positive=d.integer(0, 1)))


@builds("PRelu")
def prelu(d: Draws, operator: Operator) -> NodeCase:
    """The slope broadcasts to x."""
    dtype, shape = d.dtype(operator), d.shape()
    return NodeCase([d.array(dtype, shape), d.array(dtype, d.broadcasting(shape), special=False)], constants=d.constants(1))


@builds("SwiGLU")
def swiglu(d: Draws, operator: Operator) -> NodeCase:
    """Gate and value of one shape."""
    dtype, shape = d.dtype(operator), d.shape()
    return NodeCase([d.array(dtype, shape), d.array(dtype, shape)], d.some(alpha=d.number(0.125, 2)))


@builds("Pow")
def power(d: Draws, operator: Operator) -> NodeCase:
    """Integers to whole powers of at least 0: what others give isn't an integer, and no specification says how it's rounded."""
    base_type = d.dtype(operator)
    exponent_type = base_type if operator.version < 12 else d.dtype(operator, "T1")
    shape = d.shape()
    base = d.array(base_type, shape, special=is_float(base_type))
    exponent = d.array(exponent_type, d.broadcasting(shape), special=is_float(base_type))
    if not is_float(base_type):
        exponent = d.rng().integers(0, 4, exponent.shape).astype(exponent_type)
    elif not is_float(exponent_type):
        exponent = d.array(exponent_type, exponent.shape, -3, 3)
    return NodeCase([base, exponent], constants=d.constants(1))


@builds("Max", "Min", "Mean", "Sum")
def variadic(d: Draws, operator: Operator) -> NodeCase:
    """One to four inputs, of one shape before version 8. A sum may be rounded after each addition or once."""
    dtype, shape = d.dtype(operator), d.shape()
    count = d.integer(1, 4)
    atol = (0.02 if dtype == np.float16 else 0.2) if operator.op in ("Mean", "Sum") and is_coarse(dtype) else None
    shapes = [shape if operator.version < 8 or index == 0 else d.broadcasting(shape) for index in range(count)]
    return NodeCase(
        [d.array(dtype, each, special=operator.op not in ("Max", "Min")) for each in shapes], constants=d.constants(count - 1), atol=atol
    )


@builds("Clip")
def clip(d: Draws, operator: Operator) -> NodeCase:
    """Bounds that are there or not, and may be the wrong way round from version 12 on, whose text says that the maximum wins."""
    dtype = d.dtype(operator)
    x = d.array(dtype, d.shape(), special=False)
    low, high = d.ordinary(dtype, (), -3, 3), d.ordinary(dtype, (), -3, 3)
    if operator.version < 12:
        low, high = min(low, high), max(low, high)
    if operator.version == 6:
        return NodeCase([x], d.some(min=float(low), max=float(high)))
    inputs = [x, np.asarray(low) if d.boolean() else None, np.asarray(high) if d.boolean() else None]
    return NodeCase(d.trimmed(inputs), constants=d.constants(1, 2))


@builds("BitShift")
def bit_shift(d: Draws, operator: Operator) -> NodeCase:
    """By less than the number of bits, or by any number from version 28 on, which says what that gives."""
    dtype, shape = d.dtype(operator), d.shape()
    amounts = d.array(dtype, d.broadcasting(shape), 0, 7)
    if operator.version >= 28 and d.boolean():
        amounts = d.array(dtype, amounts.shape, -70, 70)
    return NodeCase([d.array(dtype, shape), amounts], {"direction": d.choice(["LEFT", "RIGHT"])})


@builds("Where")
def where(d: Draws, operator: Operator) -> NodeCase:
    """Three inputs that broadcast."""
    dtype, shape = d.dtype(operator), d.shape()
    arrays = [d.array(np.dtype(bool), shape), d.array(dtype, d.broadcasting(shape)), d.array(dtype, d.broadcasting(shape))]
    if d.boolean():
        arrays[0], arrays[1] = d.array(np.dtype(bool), arrays[1].shape), d.array(dtype, shape)
    return NodeCase(arrays, constants=d.constants(0, 2))


@builds("CumSum", "CumProd")
def cumulative(d: Draws, operator: Operator) -> NodeCase:
    """Along one axis, from either end, with or without the element itself."""
    x = d.ordinary(d.dtype(operator), d.shape(1), -2, 2)
    axis = np.asarray(d.axis(x.ndim), d.dtype(operator, "T2"))
    return NodeCase(
        [x, axis],
        d.some(exclusive=d.integer(0, 1), reverse=d.integer(0, 1)),
        constants=d.constants(1),
        atol=0.1 if is_coarse(x.dtype) else None,
    )


@builds("Dropout")
def dropout(d: Draws, operator: Operator) -> NodeCase:
    """Nothing is dropped but in training mode, whose draws are unspecified."""
    data = d.array(d.dtype(operator), d.shape())
    outputs = d.integer(1, 2 if operator.version >= 10 else 1)
    if operator.has_attribute("ratio"):
        return NodeCase([data], d.some(ratio=d.number(0, 0.875)), outputs)
    ratio = d.choice([None, 0.0, 0.5])
    training = d.choice([None, False, True])
    ratio_array = None if ratio is None else np.asarray(ratio).astype(d.dtype(operator, "T1"))
    inputs = d.trimmed([data, ratio_array, None if training is None else np.asarray(training)])
    return NodeCase(inputs, d.some(seed=d.integer(0, 9)), outputs, d.constants(1, 2), shapes_only=bool(training) and ratio != 0)
