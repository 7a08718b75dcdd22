"""A run of a plan on the host that is noted down on a tape, and then replayed with other contents.

Steps that read nothing but constants and the shapes of inputs are run once. All others are on the tape: the calls that kernels make by
`miniort.tape.call`, and of a kernel that makes none, or that reads what no call has written, the kernel itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from miniort.errors import MiniortError, ProviderError
from miniort.graph.folding import NON_DETERMINISTIC
from miniort.kernels import UFUNC_BUFFER, Run
from miniort.providers import DeviceArray
from miniort.runtime.plan import ABSENT, Plan, Step, failure
from miniort.runtime.recording import Known, reads_shapes_only
from miniort.tape import Tape, UnknownArrayError
from miniort.types import Array


class _OtherShape(Exception):
    """A kernel on the tape gave an array of another shape or type than when it was noted down."""


@dataclass(frozen=True, eq=False)
class TapedRun:
    """A run on a tape.

    known: what it relies on of the inputs. carried: arrays that are filled with the contents of inputs. told: see `tape_plan`. around:
    entered around each replay.
    """

    tape: Tape
    known: Mapping[str, Known]
    carried: Mapping[str, Array]
    told: Array
    outputs: Sequence[Array]
    around: AbstractContextManager[object]

    def replay(self, feed: Mapping[str, Any], told: Array) -> tuple[Array, ...] | None:
        """The plan's outputs. told: as for `tape_plan`.

        None where a run with this feed wouldn't be the one on the tape, but for contents of arrays.
        """
        if not all(known.is_same(feed.get(name)) for name, known in self.known.items()):
            return None
        with self.around, np.errstate(all="ignore"):
            np.setbufsize(UFUNC_BUFFER)
            for name, own in self.carried.items():
                own[...] = feed[name]
            self.told[...] = told
            try:
                self.tape.play()
            except _OtherShape:
                return None
        return tuple(each.copy() for each in self.outputs)


def tape_plan(
    plan: Plan, feed: Mapping[str, Any], told: Array, tell: Callable[[DeviceArray], None], around: AbstractContextManager[object]
) -> tuple[TapedRun, tuple[Array, ...]]:
    """Run a plan whose providers are all on the host, with a tape: the taped run, and the outputs.

    feed: the value of each input of the plan by name, in the plan's order, None where it isn't fed. told: an array of which the run reads
    a copy, that `tell` is handed, for something that isn't an array. around: what a run is surrounded with.
    ProviderError if the plan can't be on a tape.
    """
    if plan.observers:
        raise ProviderError("a run that observers watch can't be recorded")
    if plan.scoped:
        raise ProviderError("control flow can't be recorded: its conditions are read anew in each run")
    carried = {name: value.copy() for name, value in feed.items() if isinstance(value, np.ndarray)}
    slots = dict(zip(feed, plan.inputs, strict=True))
    values = list(plan.initial)
    for name, value in feed.items():
        if value is not None:
            values[slots[name]] = carried.get(name, value)
    place = np.array(told)
    tape = Tape([*(each for each in values if isinstance(each, np.ndarray)), place])
    tell(place)
    with around, np.errstate(all="ignore"):
        np.setbufsize(UFUNC_BUFFER)
        looked_into = _run_noting(plan, values, tape)
    outputs = [values[slot] for slot in plan.outputs]
    for output in outputs:
        if not isinstance(output, np.ndarray) or not tape.knows(output):
            raise ProviderError("an output can't be recorded: it isn't an array that a kernel writes")
    known = {name: Known.of(value, slots[name] in looked_into) for name, value in feed.items()}
    run = TapedRun(tape, known, carried, place, outputs, around)
    return run, tuple(output.copy() for output in outputs)


def _run_noting(plan: Plan, values: list[Any], tape: Tape) -> set[int]:
    """Run all steps and note down what a replay has to do; the slots whose contents it relies on.

    What depends on constants and on shapes alone is a constant: no shape changes from replay to replay.
    """
    constant = {ABSENT, *(slot for slot, value in enumerate(plan.initial) if value is not None)} - set(plan.inputs)
    looked_into: set[int] = set()
    for step in plan.steps:
        inputs = [values[slot] for slot in step.inputs]
        before = len(tape)
        results = _run_on(tape, step, inputs, values)
        for slot, value in zip(step.outputs, results, strict=False):
            values[slot] = value
        arrays = [each for each in results if each is not None]
        if not all(isinstance(each, np.ndarray) for each in arrays):
            raise ProviderError(f"node {step.info.path!r} ({step.info.op}) gives what isn't an array, so it can't be recorded")
        known = all(tape.knows(each) for each in arrays)
        if (reads_shapes_only(step) or constant.issuperset(step.inputs)) and step.info.op not in NON_DETERMINISTIC:
            tape.forget(before)
            tape.learn(*arrays)
            constant.update(step.outputs)
        elif known and len(tape) > before:
            continue
        elif known and all(slot in plan.views for slot in step.outputs):
            numbers = set(step.inputs) - {plan.views[slot] for slot in step.outputs} - constant
            if numbers.issubset(plan.inputs):
                looked_into |= numbers
                continue  # views of what's known, which a replay needn't take again
            results = tuple(None if each is None else each.copy() for each in results)  # they may lie elsewhere in a replay
            for slot, value in zip(step.outputs, results, strict=False):
                values[slot] = value
            _note_whole(tape, step, inputs, results)
        else:
            tape.forget(before)
            _note_whole(tape, step, inputs, results)
    return looked_into


def _run_on(tape: Tape, step: Step, inputs: Sequence[Any], values: Sequence[Any]) -> tuple[Any, ...]:
    """Run a step with the tape on; without it, where it reads what no call has written."""
    before = len(tape)
    try:
        try:
            with tape.on():
                found = step.run(*inputs)
        except UnknownArrayError:
            tape.forget(before)
            found = step.run(*inputs)
    except MiniortError:
        raise
    except Exception as error:
        # A kernel may raise anything; the user has to learn which node it was, and with what.
        raise failure(step, values, error) from error
    return found if type(found) is tuple else (found,)


def _note_whole(tape: Tape, step: Step, inputs: Sequence[Any], results: Sequence[Array | None]) -> None:
    """Note down that the kernel is to be run again."""
    outputs = [each if each is None or not tape.knows(each) else _Same(each) for each in results]
    tape.note(_run_again, (step.run, inputs, outputs), tuple(each for each in results if each is not None))


class _Same:
    """A result that lies where something else does: an input that was written over, or a part of it."""

    def __init__(self, array: Array) -> None:
        self.array = array


def _run_again(run: Run, inputs: Sequence[Any], outputs: Sequence[Array | _Same | None]) -> None:
    """Run a kernel again, and put what it gives where it was then. _OtherShape where that's of another shape or type."""
    found = run(*inputs)
    for output, new in zip(outputs, found if type(found) is tuple else (found,), strict=True):
        if isinstance(output, _Same):
            if new.ctypes.data != output.array.ctypes.data or new.strides != output.array.strides:
                _fill(output.array, new)
        elif output is not None:
            _fill(output, new)


def _fill(target: Array, source: Array) -> None:
    if source.shape != target.shape or source.dtype != target.dtype:
        raise _OtherShape
    target[...] = source
