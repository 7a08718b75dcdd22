"""Calls that are noted down: what a tape takes, what it refuses, and that it plays them with what is in the arrays by then."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from miniort.tape import Tape, UnknownArrayError, apply, call


def double(x: np.ndarray, y: np.ndarray) -> None:
    np.multiply(x, 2, out=y)


def test_calls_are_made_whether_there_is_a_tape_or_not() -> None:
    x, y = np.arange(3.0), np.empty(3)
    call(double, x, y, writes=(y,))
    np.testing.assert_array_equal(y, [0, 2, 4])
    tape = Tape([x])
    with tape.on():
        call(double, x[::-1], y, writes=(y,))
    call(double, x, y, writes=(y,))
    assert len(tape) == 1


def test_a_tape_is_played_with_what_the_arrays_hold_by_then() -> None:
    x, y, z = np.arange(3.0), np.empty(3), np.empty(2)
    tape = Tape([x])
    with tape.on():
        call(double, x, y, writes=(y,))
        call(double, y[1:], z, writes=(z,))
    np.testing.assert_array_equal(z, [4, 8])
    x += 10
    tape.play()
    np.testing.assert_array_equal(z, [44, 48])


def test_arrays_live_as_long_as_the_tape() -> None:
    x = np.arange(3.0)
    tape = Tape([x])
    results = []
    with tape.on():
        for _ in range(50):
            y = np.empty(3)
            call(double, x, y, writes=(y,))
            results.append(y.ctypes.data)
            del y
    assert len(set(results)) == 50


def test_an_array_that_no_call_writes_is_refused() -> None:
    """It's a copy that somebody made in passing: in a replay it would hold what it held then."""
    x, y = np.arange(3.0), np.zeros(3)
    tape = Tape([x])
    with tape.on(), pytest.raises(UnknownArrayError, match=r"argument 0 of double is \[3\] float64 that no call has written"):
        call(double, x.copy(), y, writes=(y,))
    assert len(tape) == 0
    assert not tape.knows(y)
    assert not y.any(), "it's refused before it's made"


def test_calls_are_forgotten() -> None:
    x, y = np.arange(3.0), np.empty(3)
    tape = Tape([x])
    with tape.on():
        call(double, x, y, writes=(y,))
        call(double, y, y, writes=(y,))
    tape.forget(1)
    tape.play()
    np.testing.assert_array_equal(y, [0, 2, 4])


def test_ufuncs_are_applied_to_where_their_first_result_went() -> None:
    a, b = np.arange(3.0), np.ones((2, 1))
    np.testing.assert_array_equal(apply(np.add, a, b), a + b)
    tape = Tape([a, b])
    with tape.on():
        total = apply(np.add, a, b)
        negative = apply(np.negative, total)
    a *= 10
    tape.play()
    np.testing.assert_array_equal(negative, -(a + b))


def test_what_is_learned_is_known() -> None:
    x = np.arange(3.0)
    tape = Tape([])
    assert not tape.knows(x[1:])
    tape.learn(x)
    assert tape.knows(x[1:])


def test_constants_and_empty_arrays_are_known() -> None:
    constant, nothing, y = np.arange(3.0), np.empty(0), np.empty(3)
    constant.flags.writeable = False
    tape = Tape([])
    with tape.on():
        call(double, constant[:2], y[:2], writes=(y,))
        call(double, nothing, nothing, writes=())
    assert tape.knows(y)
    assert tape.knows(constant)
    assert not tape.knows(np.ones(1))


def test_other_threads_are_not_on_it() -> None:
    x, y = np.arange(3.0), np.empty(3)
    tape = Tape([])
    with tape.on():
        thread = threading.Thread(target=call, args=(double, x, y), kwargs={"writes": (y,)})
        thread.start()
        thread.join()
    np.testing.assert_array_equal(y, [0, 2, 4])
    assert len(tape) == 0


def test_the_tape_comes_off_when_a_call_fails() -> None:
    x, y = np.arange(3.0), np.empty(2)
    tape = Tape([x])
    with pytest.raises(ValueError, match="broadcast"), tape.on():
        call(double, x, y, writes=(y,))
    call(double, x.copy(), np.empty(3), writes=())
