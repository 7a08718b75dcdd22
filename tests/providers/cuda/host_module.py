"""Stands in for `cupy.RawModule`: compiles CUDA C for the host, with a shim for threads, blocks, shared memory, barriers and shuffles."""

from __future__ import annotations

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

SHIM = Path(__file__).with_name("cuda_shim.h")
SIGNATURE = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\)')
SCALARS = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}
NUMPY = {ctypes.c_int: np.int32, ctypes.c_longlong: np.int64, ctypes.c_float: np.float32}


def parameters_of(declaration: str) -> list[tuple[Any, str]]:
    """Each parameter's ctypes type (a pointer is c_void_p) and C type."""
    found = []
    for text in declaration.replace("\n", " ").split(","):
        c_type = text.strip().rpartition("*" if "*" in text else " ")[0].strip()
        found.append((ctypes.c_void_p, f"{c_type} *") if "*" in text else (SCALARS[c_type], c_type))
    return found


@cache
def compiled(source: str) -> tuple[ctypes.CDLL, dict[str, list[tuple[Any, str]]]]:
    """The library, and the parameters of each kernel in it."""
    kernels = {name: parameters_of(declaration) for name, declaration in SIGNATURE.findall(source)}
    wrappers = []
    for name, parameters in kernels.items():
        declared = ", ".join(f"{c_type} a{index}" for index, (_, c_type) in enumerate(parameters))
        passed = ", ".join(f"a{index}" for index in range(len(parameters)))
        wrappers.append(
            f'extern "C" void run_{name}(unsigned x, unsigned y, unsigned z, unsigned threads, {declared}) '
            f"{{ shim::launch({{x, y, z}}, threads, [&] {{ {name}({passed}); }}); }}"
        )
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    code, library = folder / "kernels.cpp", folder / "kernels.so"
    code.write_text(f'#include "{SHIM}"\n{source}\n' + "\n".join(wrappers))
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function", "-o", library, code]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(library)), kernels


def launch(source: str, name: str, grid: Sequence[int], threads: int, arguments: Sequence[Any]) -> None:
    """Run one kernel on NumPy arrays and NumPy scalars, which must be of just the types that the kernel declares."""
    library, kernels = compiled(source)
    function = getattr(library, f"run_{name}")
    parameters = kernels[name]
    assert len(arguments) == len(parameters), f"{name} takes {len(parameters)} arguments, found {len(arguments)}"
    function.argtypes = [*(ctypes.c_uint,) * 4, *(ctype for ctype, _ in parameters)]
    function.restype = None
    values = []
    for argument, (ctype, c_type) in zip(arguments, parameters, strict=True):
        if ctype is ctypes.c_void_p:
            assert isinstance(argument, np.ndarray) or argument == 0, f"{name}: a {c_type} is wanted, found {argument!r}"
            values.append(argument.ctypes.data if isinstance(argument, np.ndarray) else None)
        else:
            assert type(argument) is NUMPY[ctype], f"{name}: a {c_type} is wanted, found {type(argument).__name__}"
            values.append(argument.item())
    x, y, z = (*grid, 1, 1)[:3]
    function(x, y, z, threads, *values)


class HostModule:
    """`RawModule` over the arrays of a double: `open_array` gives the NumPy array of one, and notes the launch."""

    def __init__(self, code: str, open_argument: Callable[[Any], Any]) -> None:
        self._code = code
        self._open = open_argument

    def get_function(self, name: str) -> Callable[..., None]:
        def run(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            launch(self._code, name, grid, block[0], [self._open(argument) for argument in arguments])

        return run
