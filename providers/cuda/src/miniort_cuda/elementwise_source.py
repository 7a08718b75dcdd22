"""CUDA C for chains of elementwise ops: a kernel that reads each element once, computes the whole chain in registers, and writes once.

float16 and bfloat16 are computed in float32 and rounded after each step, as the steps' own kernels would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from miniort.graph.elementwise_body import NUMBER, Body, Step
from miniort.types import DType, type_string
from miniort_cuda.element_types import BFLOAT16, FLOAT32


@dataclass(frozen=True)
class CType:
    """How elements of a type are kept and computed with: C types, and the functions that lead from one to the other."""

    kind: str
    stored: str
    computed: str
    load: str = ""
    store: str = ""


TYPES: Mapping[DType, CType] = {
    FLOAT32: CType("float", "float", "float"),
    np.dtype(np.float16): CType("float", "unsigned short", "float", "half_to_float", "to_half"),
    BFLOAT16: CType("float", "unsigned short", "float", "from_bfloat16", "to_bfloat16"),
    np.dtype(np.int32): CType("integer", "int", "int"),
    np.dtype(np.int64): CType("integer", "long long", "long long"),
    np.dtype(np.bool_): CType("bool", "bool", "bool"),
}

_ANY = {"float", "integer", "bool"}
_NUMBERS = {"float", "integer"}
_FORMULAS: Mapping[str, tuple[set[str], str]] = {
    "Add": (_NUMBERS, "{0} + {1}"),
    "And": ({"bool"}, "{0} && {1}"),
    "Ceil": ({"float"}, "ceilf({0})"),
    "Cos": ({"float"}, "cosf({0})"),
    "Div": ({"float"}, "{0} / {1}"),
    "Elu": ({"float"}, "({0} < 0.0f ? {alpha} * expm1f({0}) : {0})"),
    "Equal": (_ANY, "{0} == {1}"),
    "Erf": ({"float"}, "erff({0})"),
    "Exp": ({"float"}, "expf({0})"),
    "Floor": ({"float"}, "floorf({0})"),
    "Greater": (_NUMBERS, "{0} > {1}"),
    "GreaterOrEqual": (_NUMBERS, "{0} >= {1}"),
    "HardSigmoid": ({"float"}, "smaller(larger({alpha} * {0} + {beta}, 0.0f), 1.0f)"),
    "HardSwish": ({"float"}, "{0} * smaller(larger({0} * (1.0f / 6.0f) + 0.5f, 0.0f), 1.0f)"),
    "IsNaN": ({"float"}, "{0} != {0}"),
    "LeakyRelu": ({"float"}, "({0} < 0.0f ? {alpha} * {0} : {0})"),
    "Less": (_NUMBERS, "{0} < {1}"),
    "LessOrEqual": (_NUMBERS, "{0} <= {1}"),
    "Log": ({"float"}, "logf({0})"),
    "Mul": (_NUMBERS, "{0} * {1}"),
    "Neg": (_NUMBERS, "-{0}"),
    "Not": ({"bool"}, "!{0}"),
    "Or": ({"bool"}, "{0} || {1}"),
    "PRelu": ({"float"}, "({0} < 0.0f ? {1} * {0} : {0})"),
    "Pow": ({"float"}, "powf({0}, (float){1})"),
    "Reciprocal": ({"float"}, "1.0f / {0}"),
    "Relu": ({"float"}, "larger({0}, 0.0f)"),
    "Round": ({"float"}, "rintf({0})"),
    "Sigmoid": ({"float"}, "sigmoid_of({0})"),
    "Sign": (_NUMBERS, "sign_of({0})"),
    "Sin": ({"float"}, "sinf({0})"),
    "Softplus": ({"float"}, "larger({0}, 0.0f) + log1pf(expf(-fabsf({0})))"),
    "Sqrt": ({"float"}, "sqrtf({0})"),
    "Sub": (_NUMBERS, "{0} - {1}"),
    "Swish": ({"float"}, "{0} * sigmoid_of({alpha} * {0})"),
    "Tanh": ({"float"}, "tanhf({0})"),
    "Where": (_ANY, "({0} ? {1} : {2})"),
    "Xor": ({"bool"}, "{0} != {1}"),
}
"""Op -> kinds of what it computes with, and the expression of its operands and attributes. Others are in `_WRITTEN`."""

_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "Elu": {"alpha": 1.0},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "LeakyRelu": {"alpha": 0.01},
    "Swish": {"alpha": 1.0},
}


def _abs(step: Step, operands: Sequence[str], target: CType) -> str:
    return f"fabsf({operands[0]})" if target.kind == "float" else f"({operands[0]} < 0 ? -{operands[0]} : {operands[0]})"


def _cast(step: Step, operands: Sequence[str], target: CType) -> str:
    return f"{operands[0]} != 0" if target.kind == "bool" else f"({target.computed}){operands[0]}"


def _clip(step: Step, operands: Sequence[str], target: CType) -> str:
    low, high = (*operands[1:], "", "")[:2]
    x = f"larger({operands[0]}, {low})" if low else operands[0]
    return f"smaller({x}, {high})" if high else x


def _folded(function: str) -> Callable[[Step, Sequence[str], CType], str]:
    def write(step: Step, operands: Sequence[str], target: CType) -> str:
        result = operands[0]
        for operand in operands[1:]:
            result = function.format(result, operand)
        return result

    return write


def _gelu(step: Step, operands: Sequence[str], target: CType) -> str:
    name = "gelu_by_tanh_of" if step.attributes.get("approximate") == "tanh" else "gelu_exact_of"
    return f"{name}({operands[0]})"


_WRITTEN: Mapping[str, tuple[set[str], Callable[[Step, Sequence[str], CType], str]]] = {
    "Abs": (_NUMBERS, _abs),
    "Cast": (_ANY, _cast),
    "CastLike": (_ANY, _cast),
    "Clip": (_NUMBERS, _clip),
    "Gelu": ({"float"}, _gelu),
    "Max": (_NUMBERS, _folded("larger({}, {})")),
    "Min": (_NUMBERS, _folded("smaller({}, {})")),
    "Sum": ({"float"}, _folded("({} + {})")),
}


def refusal(body: Body, inputs: Sequence[DType | None]) -> str | None:
    """Why there is no kernel for a chain of inputs of these types; None if there is one."""
    if len(inputs) != len(body.inputs):
        return f"the body of its kernel has {len(body.inputs)} inputs, the node {len(inputs)}"
    dtypes = body.dtypes(inputs)
    for name, dtype in dtypes.items():
        if dtype is None:
            return f"its kernel has to know all types, and that of {name} isn't known"
        if dtype not in TYPES:
            return f"its kernel takes no {type_string(dtype)}"
    for step in body.steps:
        if step.op == "Constant":
            continue
        entry = _FORMULAS.get(step.op) or _WRITTEN.get(step.op)
        operand = dtypes[step.inputs[1 if step.op == "Where" else 0]]
        if entry is None or operand is None or TYPES[operand].kind not in entry[0]:
            return f"its kernel has no {step.op} of {type_string(operand)}"
    return None


def kernel_name(body: Body) -> str:
    """What a profiler shows for a chain: `chain_Add_Gelu`."""
    ops = [step.op for step in body.steps if step.op not in ("Constant", "Cast", "CastLike")]
    return "_".join(["chain", *(ops or ["Cast"])])[:80]


def chain_source(body: Body, inputs: Sequence[DType], axes: int, index: str) -> str:
    """The CUDA C of a chain.

    axes: how many the loop has, at least 1. index: the C type to count elements in, `int` or `long long`.

    The kernel takes the arrays, the result [count], count, the sizes of all axes but the first, and for each array what a step along
    each axis is, in elements: 0 where it's repeated.
    """
    dtypes = {name: dtype for name, dtype in body.dtypes(inputs).items() if dtype is not None}  # all of them: `refusal` has looked
    names = {name: f"v{number}" for number, name in enumerate(dtypes)}
    result = TYPES[dtypes[body.steps[-1].output]]
    parameters = [f"const {TYPES[dtype].stored} *p{number}" for number, dtype in enumerate(inputs)]
    parameters += [f"{result.stored} *y", f"{index} count", *(f"{index} n{axis}" for axis in range(1, axes))]
    parameters += [f"{index} s{number}_{axis}" for number in range(len(inputs)) for axis in range(axes)]
    lines = [f"{index} i = ({index})blockIdx.x * blockDim.x + threadIdx.x;", "if (i >= count) return;", f"{index} i0 = i;"]
    lines += [f"{index} i{axis} = i0 % n{axis}; i0 /= n{axis};" for axis in range(axes - 1, 0, -1)]
    for number, (name, dtype) in enumerate(zip(body.inputs, inputs, strict=True)):
        place = " + ".join(f"i{axis} * s{number}_{axis}" for axis in range(axes))
        lines.append(f"{TYPES[dtype].computed} {names[name]} = {TYPES[dtype].load}(p{number}[{place}]);")
    numbers = {step.output: step.attributes[NUMBER] for step in body.steps if step.op == "Constant"}
    for step in body.steps:
        ctype = TYPES[dtypes[step.output]]
        expression = _expression(step, names, numbers, ctype)
        if ctype.store:
            expression = f"{ctype.load}({ctype.store}({expression}))"
        lines.append(f"{ctype.computed} {names[step.output]} = {expression};")
    lines.append(f"y[i] = {result.store}({names[body.steps[-1].output]});")
    code = "\n    ".join(lines)
    return f'{_prelude()}\nextern "C" __global__ void {kernel_name(body)}({", ".join(parameters)}) {{\n    {code}\n}}\n'


def _expression(step: Step, names: Mapping[str, str], numbers: Mapping[str, float | int | str], target: CType) -> str:
    if step.op == "Constant":
        return _literal(step.attributes[NUMBER])
    operands = [names[name] if name else "" for name in step.inputs]
    if step.op == "Pow" and numbers.get(step.inputs[1]) == 2:
        return f"{operands[0]} * {operands[0]}"
    if step.op in _WRITTEN:
        return _WRITTEN[step.op][1](step, operands, target)
    attributes = {**_DEFAULTS.get(step.op, {}), **step.attributes}
    return _FORMULAS[step.op][1].format(*operands, **{name: _literal(value) for name, value in attributes.items()})


def _literal(value: float | int | str) -> str:
    return f"{float(value)!r}f"


@cache
def _prelude() -> str:
    folder = files("miniort_cuda.cuda_c")
    return "".join((folder / file).read_text(encoding="utf-8") for file in ("half.cuh", "elementwise.cuh"))
