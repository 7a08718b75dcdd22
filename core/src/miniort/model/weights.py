"""The weight store: one copy of every weight, and of whatever was made from it, for all sessions that share the store."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from miniort.errors import ModelError
from miniort.types import STRING, Array, DType

WeightKey: TypeAlias = Hashable
"""What tells weights apart: where they lie in a file, what they contain, or what they were made from."""


class WeightStore:
    """Weights by key, read-only. Give one store to several sessions, and they hold one copy of what they have in common.

    Weights in files are memory-mapped, once per file, and not copied. Others are told apart by their content. What a kernel or a pass
    made from a weight (a re-packed matrix, a folded constant, a copy on a device) is kept under the weight's key as well.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._files: dict[Hashable, Array] = {}
        self._weights: dict[WeightKey, Array] = {}
        self._keys: dict[int, WeightKey] = {}  # id of an array in _weights -> its key
        self._derived: dict[tuple[WeightKey, str], Any] = {}

    def map_file(self, path: Path, offset: int, length: int | None, dtype: DType, shape: tuple[int, ...]) -> Array:
        """The weight at `offset` (bytes) of a file. ModelError if the file is missing, or too short for it."""
        if dtype == STRING:
            raise ModelError(f"{path}: text can't be kept in an external file, as ONNX has no layout for it")
        count = int(np.prod(shape, dtype=np.int64))
        packed_bits = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}.get(dtype.name)
        wanted = count * dtype.itemsize if packed_bits is None else -(-count * packed_bits // 8)
        if length is not None and length != wanted:
            raise ModelError(f"{path}: a weight of shape {list(shape)} and type {dtype} takes {wanted} bytes, the model says {length}")
        try:
            status = os.stat(path)
        except OSError as error:
            raise ModelError(f"{path}: the model keeps weights in this file, and it can't be read ({error.strerror})") from error
        if offset < 0 or offset + wanted > status.st_size:
            raise ModelError(
                f"{path}: the model has a weight at bytes {offset} to {offset + wanted}, but the file has only {status.st_size} bytes; "
                "it was cut short or belongs to another model"
            )
        file = (os.path.realpath(path), status.st_ino, status.st_mtime_ns, status.st_size)
        key = ("file", file, offset, dtype, shape)
        with self._lock:
            if key not in self._weights:
                if packed_bits is not None:
                    self._put(key, _unpack(self._map(file, path)[offset : offset + wanted], packed_bits, dtype, shape))
                else:
                    raw = self._map(file, path)[offset : offset + wanted]
                    if offset % max(dtype.alignment, 1):
                        raw = raw.copy()  # NumPy computes with unaligned arrays, but BLAS doesn't
                    self._put(key, raw.view(dtype).reshape(shape))
            return self._weights[key]

    def _map(self, file: Hashable, path: Path) -> Array:
        if file not in self._files:
            empty = os.stat(path).st_size == 0
            self._files[file] = np.empty(0, np.uint8) if empty else np.asarray(np.memmap(path, np.uint8, mode="r"))
        return self._files[file]

    def _put(self, key: WeightKey, array: Array) -> Array:
        array.flags.writeable = False
        self._weights[key] = array
        self._keys[id(array)] = key
        return array

    def intern(self, array: Array, key: WeightKey | None = None) -> Array:
        """The store's own array with this key, or with this content where no key is given; the given one if it's new."""
        with self._lock:
            if id(array) in self._keys:
                return array
            key = content_key(array) if key is None else key
            if key in self._weights:
                return self._weights[key]
            return self._put(key, array if not array.flags.writeable else array.view())

    def key(self, array: Array) -> WeightKey:
        """The key of an array that came from this store."""
        return self._keys[id(array)]

    def find(self, key: WeightKey) -> Array | None:
        """The store's own array with this key; None if it has none."""
        with self._lock:
            return self._weights.get(key)

    def arrays(self) -> list[Array]:
        """All weights that it holds, mapped ones included, and the arrays that passes made from them."""
        with self._lock:
            return list(self._weights.values())

    def place_in_file(self, array: Array) -> tuple[str, int] | None:
        """The real path of the file that this store mapped an array from, and the offset in it; None for one that's from elsewhere."""
        key = self._keys.get(id(array))
        if not isinstance(key, tuple) or key[0] != "file":
            return None
        _, (path, *_), offset, *_ = key
        return path, offset

    def derive(self, array: Array, label: str, make: Callable[[Array], Any]) -> Any:
        """`make(array)`, made once and kept under the array's key and `label`."""
        with self._lock:
            array = self.intern(array)
            name = (self.key(array), label)
            if name not in self._derived:
                self._derived[name] = make(array)
            return self._derived[name]

    def made(self, key: WeightKey, make: Callable[[], Any]) -> Any:
        """What `make()` gives, made once and kept under `key` unless it's None; arrays in it are this store's own from then on."""
        with self._lock:
            name = (key, "")
            if name not in self._derived:
                result = make()
                if result is None:
                    return None  # another session may have a kernel that can make it
                if isinstance(result, list | tuple):
                    result = [self.intern(item, (key, index)) for index, item in enumerate(result)]
                self._derived[name] = result
            return self._derived[name]

    def release(self, array: Array) -> None:
        """Hold a weight no longer, as what was made from it takes its place. Whoever else uses it keeps it, and may intern it again.

        One that's mapped from a file stays known, as another session may have it already, but none of its pages stays in memory.
        """
        with self._lock:
            key = self._keys.get(id(array))
            if self.place_in_file(array) is not None:
                let_go_of_pages(array)
            elif key is not None and self._weights.get(key) is array:
                del self._weights[key], self._keys[id(array)]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, mapped ones included, and of the arrays made from them."""
        with self._lock:
            derived = [array for array in self._derived.values() if isinstance(array, np.ndarray)]
            return sum(array.nbytes for array in [*self._weights.values(), *derived])


def let_go_of_pages(array: Array) -> None:
    """Tell the system that the pages of a mapped weight aren't needed soon: they no longer count as the process's memory.

    They're read again from the file, or from where the system keeps it, when somebody looks. Arrays that aren't mapped stay as they are.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        mapped, base = base, base.base
    if not isinstance(base, mmap.mmap) or not hasattr(base, "madvise"):
        return
    first = array.ctypes.data - mapped.ctypes.data
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (first + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        base.madvise(mmap.MADV_DONTNEED, start, length)


def content_key(array: Array) -> WeightKey:
    """A key that is equal for arrays of equal type, shape and bytes."""
    if array.dtype == STRING:
        return ("content", array.dtype, array.shape, tuple(array.ravel().tolist()))
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return ("content", array.dtype, array.shape, hashlib.blake2b(cast(Any, data), digest_size=16).digest())


def _unpack(raw: Array, bits: int, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Elements of 2 or 4 bits, lowest bits first in each byte, one element a byte as ml_dtypes keeps them."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    elements = ((raw[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)[: int(np.prod(shape, dtype=np.int64))]
    return elements.view(dtype).reshape(shape)
