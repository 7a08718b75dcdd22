"""onnx-ir is imported without sympy, and sympy is there for whoever uses it. In processes of their own: what is imported stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

SESSION = """
import sys
import numpy as np
from onnx import parser
from miniort import InferenceSession
text = '<ir_version: 10, opset_import: ["": 18]> g (float[n, 2] x) => (float[m, 2] y) { a = Neg(x) s = Shape(a) y = Reshape(a, s) }'
session = InferenceSession(parser.parse_model(text))
assert session.run(None, {"x": np.ones((3, 2), np.float32)})[0].shape == (3, 2)
assert "sympy.core" not in sys.modules
"""


@pytest.mark.parametrize(
    "code",
    [
        SESSION,
        f"{SESSION}\nimport onnx_ir\nassert str(onnx_ir.SymbolicDim('a') + 1) == 'a + 1'",
        f"{SESSION}\nimport sympy\nassert str(sympy.Symbol('x') * 2) == '2*x'",
        f"{SESSION}\nfrom sympy import *\nassert Max(1, 2) == 2",
        f"{SESSION}\nimport sympy.core\nassert sympy.core.Symbol('x').name == 'x'",
        f"import sympy\n{SESSION.rpartition('assert')[0]}",
        "import onnx_ir\nimport miniort\nassert str(onnx_ir.SymbolicDim('a') * 2) == '2*a'",
    ],
    ids=["a session", "sizes", "sympy", "all of sympy", "a part of sympy", "sympy first", "onnx-ir first"],
)
def test_in_a_process(code: str) -> None:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
