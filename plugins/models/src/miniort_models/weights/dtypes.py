"""How weights can be stored."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

WeightDtype: TypeAlias = Literal["f32", "f16", "bf16", "int8", "int4"]
"""float32, float16, bfloat16, or integers in blocks of 32, each with a scale of its own. All arithmetic is in float32."""

WEIGHT_DTYPES: tuple[WeightDtype, ...] = get_args(WeightDtype)
