"""Calls that kernels of the host make over arrays, noted down so that they can be made again with other contents of the same arrays.

Kernels in Python do two things in a run: they look at shapes and find memory, and then they make calls that read and write contents.
Where all shapes are the same in the next run, so is all of the first, and only the calls have to be made again. A kernel that makes them
by `call` lets them be noted down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy as np

from miniort.errors import ProviderError
from miniort.types import Array


class UnknownArrayError(ProviderError):
    """A call reads an array that nobody would write in a replay, such as a copy that was made in passing."""


_tapes: dict[int, Tape] = {}  # by thread


def call(function: Callable[..., Any], *arguments: Any, writes: tuple[Array, ...]) -> None:
    """Call ``function(*arguments)``, and note it down if this thread's run is on a tape.

    function: reads contents of arrays in no other way than through its arguments, and writes no others than those in `writes`, of which it
    relies on no old contents but what calls before it have written. What it returns is dropped.
    """
    if _tapes:
        tape = _tapes.get(get_ident())
        if tape is not None:
            tape.note(function, arguments, writes)
    function(*arguments)


def apply(ufunc: Callable[..., Any], *inputs: Array) -> Array:
    """A new array, ``ufunc(*inputs, out=...)``: what `call` is to functions that write into arrays.

    ufunc: one of NumPy's, or what's called like one, by its inputs and ``out``.
    """
    result: Array = ufunc(*inputs, out=...)
    if _tapes:
        tape = _tapes.get(get_ident())
        if tape is not None:
            tape.note(_apply_into, (ufunc, result, *inputs), (result,))
    return result


def _apply_into(ufunc: Callable[..., Any], out: Array, *inputs: Array) -> None:
    ufunc(*inputs, out=out)


class Tape:
    """The calls of a run, in their order, with their arguments; arrays among these live as long as the tape.

    known: arrays whose contents are right in each replay without a call that writes them: what the caller fills, and constants. Arrays that
    can't be written count as constants.
    """

    def __init__(self, known: Iterable[Array]) -> None:
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._owners: dict[int, Array] = {}
        self.learn(*known)

    def __len__(self) -> int:
        return len(self._calls)

    def note(self, function: Callable[..., Any], arguments: tuple[Any, ...], writes: tuple[Array, ...]) -> None:
        """Note one call down. UnknownArrayError if it reads an array that nobody would write in a replay."""
        written = {id(_owner(array)) for array in writes}
        for index, argument in enumerate(arguments):
            if isinstance(argument, np.ndarray) and id(_owner(argument)) not in written and not self.knows(argument):
                name = getattr(function, "__name__", str(function))
                raise UnknownArrayError(f"argument {index} of {name} is {list(argument.shape)} {argument.dtype} that no call has written")
        self.learn(*writes)
        self._calls.append((function, arguments))

    def forget(self, length: int) -> None:
        """Drop the calls behind the first `length`. What they have written stays known."""
        del self._calls[length:]

    def learn(self, *arrays: Array) -> None:
        """Take arrays as known."""
        for array in arrays:
            owner = _owner(array)
            self._owners[id(owner)] = owner

    def knows(self, array: Array) -> bool:
        """Whether a replay makes an array's contents what they'd be in a run."""
        owner = _owner(array)
        return not array.size or not owner.flags.writeable or id(owner) in self._owners

    def play(self) -> None:
        """Make all calls again."""
        for function, arguments in self._calls:
            function(*arguments)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Note down what this thread calls in the meantime."""
        thread = get_ident()
        _tapes[thread] = self
        try:
            yield
        finally:
            del _tapes[thread]


def _owner(array: Array) -> Array:
    """The array that an array is a view of, over as many steps as there are."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
