"""A run of a plan that a provider records once, and that is then replayed with other contents of what is uploaded for it.

A plan can be recorded where all that the device reads is uploaded in one step, and nothing goes back to the host after it. The host's own
steps, which compute with shapes, are run once. So a replay is the same run only where the shapes of all inputs are what they were, and also
the contents of those that the host reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miniort.errors import ProviderError
from miniort.providers import DeviceArray, Recording, RecordsRuns
from miniort.runtime.plan import Plan, Step, run_steps
from miniort.types import Array


@dataclass(frozen=True, eq=False)
class Known:
    """What a recorded run relies on of a value: type and shape, contents if the host reads them; if it's no array, which object it is."""

    value: Any
    contents: bytes | None

    @classmethod
    def of(cls, value: Any, read: bool) -> Known:
        return cls(value, value.tobytes() if read and isinstance(value, np.ndarray) else None)

    def is_same(self, value: Any) -> bool:
        if not isinstance(value, np.ndarray) or not isinstance(self.value, np.ndarray):
            return value is self.value
        if value.shape != self.value.shape or value.dtype != self.value.dtype:
            return False
        return self.contents is None or value.tobytes() == self.contents


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """What a provider recorded of a plan. `uploads`: for each array that is uploaded its input's name, or what the host made."""

    recording: Recording
    known: Mapping[str, Known]
    uploads: Sequence[str | Array]

    def replay(self, feed: Mapping[str, Any], told: Array) -> tuple[DeviceArray, ...] | None:
        """The plan's outputs on the device. told: as for `record_plan`.

        None where a run with this feed wouldn't be the one that was recorded, but for the contents of what is uploaded.
        """
        if not all(known.is_same(feed.get(name)) for name, known in self.known.items()):
            return None
        return self.recording.replay(*(feed[each] if isinstance(each, str) else each for each in self.uploads), told)


def record_plan(
    plan: Plan, provider: RecordsRuns, feed: Mapping[str, Any], told: Array, tell: Callable[[DeviceArray], None]
) -> tuple[RecordedRun, tuple[DeviceArray, ...]]:
    """Record a run: the recording, and the outputs of its rehearsal on the device.

    feed: the value of each input of the plan by name, in the plan's order, None where it isn't fed.
    told: an array that is uploaded besides; `tell` is handed its copy on the device before each pass over the steps, for something that
    isn't an array to read, such as a cache that has to know where to write. ProviderError if the plan can't be recorded.
    """
    host_steps, upload, device_steps = _parts(plan)
    values = list(plan.initial)
    inputs = {slot: name for slot, (name, value) in zip(plan.inputs, feed.items(), strict=True) if value is not None}
    for slot, name in inputs.items():
        values[slot] = feed[name]
    run_steps(host_steps, values)
    pairs = [(source, target) for source, target in zip(upload.inputs, upload.outputs, strict=True) if values[source] is not None]

    def run(*arrays: DeviceArray) -> Sequence[DeviceArray]:
        own = list(values)
        for (_, target), array in zip(pairs, arrays, strict=False):
            own[target] = array
        tell(arrays[-1])
        run_steps(device_steps, own)
        return [own[slot] for slot in plan.outputs]

    recording, rehearsed = provider.record(run, *(values[source] for source, _ in pairs), told)
    read = _read_on_host(plan)
    known = {name: Known.of(value, slot in read) for slot, (name, value) in zip(plan.inputs, feed.items(), strict=True)}
    return RecordedRun(recording, known, [inputs.get(source, values[source]) for source, _ in pairs]), rehearsed


def _parts(plan: Plan) -> tuple[Sequence[Step], Step, Sequence[Step]]:
    """The steps on the host, the one upload, and what follows it. ProviderError where a plan has another form."""
    if plan.observers:
        raise ProviderError("a run that observers watch can't be recorded")
    if plan.scoped:
        raise ProviderError("control flow can't be recorded: its conditions are read on the host")
    places = [index for index, step in enumerate(plan.steps) if _is_upload(step)]
    if len(places) != 1:
        late = "nothing" if not places else plan.steps[places[1]].info.path
        raise ProviderError(f"a run can be recorded where all that the device reads is uploaded in one step; found besides: {late}")
    (place,) = places
    for step in plan.steps:
        if (step.info.domain, step.info.op) == ("miniort", "Download"):
            raise ProviderError(f"a run whose results go to the host can't be recorded: {step.info.path}")
    return plan.steps[:place], plan.steps[place], plan.steps[place + 1 :]


def _read_on_host(plan: Plan) -> set[int]:
    """The slots whose contents somebody reads, other than to upload them. Of the rest, only the shapes are looked at."""
    return {slot for step in plan.steps if not _is_upload(step) and not reads_shapes_only(step) for slot in step.inputs}


def reads_shapes_only(step: Step) -> bool:
    """Whether the contents of what a step is given don't matter."""
    return (step.info.domain, step.info.op) in (("", "Shape"), ("", "Size"))


def _is_upload(step: Step) -> bool:
    return (step.info.domain, step.info.op) == ("miniort", "Upload")
