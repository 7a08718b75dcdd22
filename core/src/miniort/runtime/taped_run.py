"""A run of a plan on the host that is noted down on a tape, and then replayed with other contents.

For that the steps are put in three parts. Those that read nothing but constants and the shapes of inputs are run once. Those of other
providers that wait for no step of the one with the tape are run in each replay: they're small, and look at tokens and masks. All that
follows is on the tape: the calls that kernels make by `miniort.tape.call`, and of a kernel that makes none the kernel itself.
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
from miniort.runtime.assignment import OpenProvider
from miniort.runtime.plan import ABSENT, Plan, Step, failure, run_steps
from miniort.runtime.recording import Known, reads_shapes_only
from miniort.tape import Tape
from miniort.types import Array


class _OtherShape(Exception):
    """A kernel on the tape gave an array of another shape or type than when it was noted down."""


@dataclass(frozen=True, eq=False)
class TapedRun:
    """A run on a tape.

    known: what it relies on of the inputs. early: the steps that are run in each replay, over `initial`, with inputs in `slots`. carried:
    arrays that are filled with the contents of a slot. fixed: what must be in a slot, as views were taken by it. told: see `tape_plan`.
    around: entered around each replay.
    """

    tape: Tape
    known: Mapping[str, Known]
    early: Sequence[Step]
    initial: Sequence[Any]
    slots: Mapping[int, str]
    carried: Mapping[int, Array]
    fixed: Mapping[int, Known]
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
            values = _filled(self.initial, self.slots, feed)
            run_steps(self.early, values)
            if not all(known.is_same(values[slot]) for slot, known in self.fixed.items()):
                return None
            try:
                for slot, own in self.carried.items():
                    _fill(own, values[slot])
                self.told[...] = told
                self.tape.play()
            except _OtherShape:
                return None
        return tuple(each.copy() for each in self.outputs)


def tape_plan(
    plan: Plan,
    provider: OpenProvider,
    feed: Mapping[str, Any],
    told: Array,
    tell: Callable[[DeviceArray], None],
    around: AbstractContextManager[object],
) -> tuple[TapedRun, tuple[Array, ...]]:
    """Run a plan, noting down what a provider's kernels call: the taped run, and the outputs.

    feed: the value of each input of the plan by name, in the plan's order, None where it isn't fed. told: an array of which the run reads
    a copy, that `tell` is handed, for something that isn't an array. around: what a run is surrounded with.
    ProviderError if the plan can't be on a tape.
    """
    if plan.observers:
        raise ProviderError("a run that observers watch can't be recorded")
    if plan.scoped:
        raise ProviderError("control flow can't be recorded: its conditions are read anew in each run")
    once, early, taped = _parts(plan, provider.name)
    slots = {slot: name for slot, (name, value) in zip(plan.inputs, feed.items(), strict=True) if value is not None}
    with around, np.errstate(all="ignore"):
        np.setbufsize(UFUNC_BUFFER)
        values = _filled(plan.initial, slots, feed)
        run_steps(once, values)
        initial = list(plan.initial)
        for slot in (slot for step in once for slot in step.outputs):
            initial[slot] = values[slot]
        run_steps(early, values)
        made_early = {*slots, *(slot for step in early for slot in step.outputs)}
        read = made_early.intersection(slot for step in taped for slot in step.inputs)
        carried = {slot: np.array(values[slot]) for slot in read if isinstance(values[slot], np.ndarray)}
        place = np.array(told)
        tape = Tape([*(each for each in initial if isinstance(each, np.ndarray)), *carried.values(), place])
        for slot, own in carried.items():
            values[slot] = own
        tell(place)
        viewing = [step for step in taped if not _note(step, values, tape, plan)]
        outputs = [values[slot] for slot in plan.outputs]
    for output in outputs:
        if not isinstance(output, np.ndarray) or not tape.knows(output):
            raise ProviderError("an output can't be recorded: it isn't an array that a kernel writes")
    fixed = {slot: Known.of(values[slot], read=True) for step in viewing for slot in step.inputs if slot in carried}
    known = {name: Known.of(value, read=False) for name, value in feed.items()}
    run = TapedRun(tape, known, early, tuple(initial), slots, carried, fixed, place, outputs, around)
    return run, tuple(output.copy() for output in outputs)


def _filled(initial: Sequence[Any], slots: Mapping[int, str], feed: Mapping[str, Any]) -> list[Any]:
    values = list(initial)
    for slot, name in slots.items():
        values[slot] = feed[name]
    return values


def _parts(plan: Plan, provider: str) -> tuple[list[Step], list[Step], list[Step]]:
    """The steps that are run once, those that are run in each replay, and those on the tape. None of them drops what's dead."""
    once: list[Step] = []
    early: list[Step] = []
    taped: list[Step] = []
    constant = {ABSENT, *(slot for slot, value in enumerate(plan.initial) if value is not None)} - set(plan.inputs)
    of_known_shape = constant.union(plan.inputs)
    late: set[int] = set()
    for each in plan.steps:
        step = each._replace(dead=())  # they're run in another order
        if step.info.provider == provider or not late.isdisjoint(step.inputs):
            taped.append(step)
            late.update(step.outputs)
        elif (of_known_shape if reads_shapes_only(step) else constant).issuperset(step.inputs) and step.info.op not in NON_DETERMINISTIC:
            once.append(step)
            constant.update(step.outputs)
        else:
            early.append(step)
    return once, early, taped


def _note(step: Step, values: list[Any], tape: Tape, plan: Plan) -> bool:
    """Run a step with the tape on. False where it gave nothing but views of what's known, so that a replay needn't run it."""
    inputs = [values[slot] for slot in step.inputs]
    calls = len(tape)
    try:
        with tape.on():
            found = step.run(*inputs)
    except MiniortError:
        raise
    except Exception as error:
        # A kernel may raise anything; the user has to learn which node it was, and with what.
        raise failure(step, values, error) from error
    results = found if type(found) is tuple else (found,)
    for slot, value in zip(step.outputs, results, strict=False):
        values[slot] = value
    if len(tape) > calls:
        return True
    arrays = [each for each in results if each is not None]
    if not all(isinstance(each, np.ndarray) for each in arrays):
        raise ProviderError(f"node {step.info.path!r} ({step.info.op}) gives what isn't an array, so it can't be recorded")
    if all(slot in plan.views for slot in step.outputs) and all(tape.knows(each) for each in arrays):
        return False
    tape.note(_run_again, (step.run, inputs, results), tuple(arrays))
    return True


def _run_again(run: Run, inputs: Sequence[Any], outputs: Sequence[Array | None]) -> None:
    """Run a kernel again, and put what it gives where it was then. _OtherShape where that's of another shape or type."""
    found = run(*inputs)
    for output, new in zip(outputs, found if type(found) is tuple else (found,), strict=True):
        if output is not None and (new.ctypes.data != output.ctypes.data or new.strides != output.strides):
            _fill(output, new)


def _fill(target: Array, source: Array) -> None:
    if source.shape != target.shape or source.dtype != target.dtype:
        raise _OtherShape
    target[...] = source
