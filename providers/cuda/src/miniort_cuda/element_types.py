"""The element types that this provider's arrays can have. A kernel names those that it takes, so that others go elsewhere."""

from __future__ import annotations

import numpy as np

from miniort.types import DType

FLOATS: frozenset[DType] = frozenset(np.dtype(name) for name in ("float16", "float32", "float64"))
SIGNED_INTEGERS: frozenset[DType] = frozenset(np.dtype(name) for name in ("int8", "int16", "int32", "int64"))
UNSIGNED_INTEGERS: frozenset[DType] = frozenset(np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64"))
NUMBERS: frozenset[DType] = FLOATS | SIGNED_INTEGERS | UNSIGNED_INTEGERS
BOOL: frozenset[DType] = frozenset({np.dtype(np.bool_)})
ALL: frozenset[DType] = NUMBERS | BOOL
