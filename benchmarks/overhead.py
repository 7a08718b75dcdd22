"""What the engine costs by itself: a decoder of GPT-2 small's length whose tensors are tiny, so that there's next to nothing to compute.

    uv run python benchmarks/overhead.py [--model gpt2-small|llama-135m] [--steps 300] [--providers numba,cpu]

A step is the plan's loop, its kernels, and what a generator does around a run: feeds, the sampler, the history. The loop is measured with
kernels that only hand on what a run of theirs gave; the generator is what is left of a step without the session's run. Loop and
generator are the engine's own; kernels on tiny tensors cost what NumPy's calls cost. A replayed step is its calls, and what's around them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from random_decoder import CONFIGS, write

from miniort import SessionOptions
from miniort.generation import Decoder, Generator, open_decoder
from miniort.runtime.plan import Plan
from miniort.tape import Tape

SMALL: Mapping[str, Mapping[str, Any]] = {
    "gpt2-small": {"n_embd": 24, "vocab_size": 256},
    "llama-135m": {"hidden_size": 36, "intermediate_size": 48, "vocab_size": 256},
}


def best(measure: Callable[[], float], times: int) -> float:
    """The lowest of many, in milliseconds: what else a machine does only ever adds."""
    return min(measure() for _ in range(times)) * 1e3


def hand_on(plan: Plan, inputs: list[Any]) -> Plan:
    """The plan with each kernel replaced by one that gives what the kernel gave for these inputs."""
    values = list(plan.initial)
    for slot, value in zip(plan.inputs, inputs, strict=True):
        values[slot] = value if value is not None else values[slot]
    steps = []
    for step in plan.steps:
        result = step.run(*[values[slot] for slot in step.inputs])
        for slot, value in zip(step.outputs, result if type(result) is tuple else (result,), strict=False):
            values[slot] = value
        steps.append(step._replace(run=lambda *_, result=result: result))
    return replace(plan, steps=tuple(steps))


def measure(decoder: Decoder, steps: int) -> None:
    """Print where the time of a step goes."""
    session = list(decoder.sessions.values())[-1]
    generator = Generator(decoder, decoder.new_cache("static", max_length=1024), decoder.new_sampler(), end_tokens=())
    generator.append_tokens(np.arange(16)[None] % 250)
    generator.step()
    runs: list[float] = []
    feeds: list[list[Any]] = []
    execute = session.execute

    def timed(given: Mapping[str, Any]) -> dict[str, Any]:
        feeds[:] = [[given.get(value.name or "") for value in session.model.graph.inputs]]
        started = time.perf_counter()
        result = execute(given)
        runs.append(time.perf_counter() - started)
        return result

    session.execute = timed  # type: ignore[method-assign, assignment]

    def step() -> float:
        started = time.perf_counter()
        generator.step()
        return time.perf_counter() - started

    def around() -> float:
        whole = step()
        return whole - runs[-1]

    whole, outside = best(step, steps), best(around, steps)
    inside = min(runs) * 1e3
    plan = hand_on(session.plan, feeds[0])

    def loop() -> float:
        started = time.perf_counter()
        plan.run(feeds[0])
        return time.perf_counter() - started

    alone = best(loop, steps)
    ops = Counter(each.info.op for each in plan.steps)
    print(f"{len(plan.steps)} steps: " + ", ".join(f"{count} {op}" for op, count in ops.most_common()))
    print(f"{'a step':<28} {whole:7.3f} ms")
    print(f"{'the session':<28} {inside:7.3f} ms, of which")
    print(f"{'  loop':<28} {alone:7.3f} ms, {alone / len(plan.steps) * 1e3:.2f} µs a node")
    print(f"{'  kernels, tiny tensors':<28} {inside - alone:7.3f} ms, {(inside - alone) / len(plan.steps) * 1e3:.2f} µs a node")
    print(f"{'the generator around it':<28} {outside:7.3f} ms")
    print(f"{'engine: loop and generator':<28} {alone + outside:7.3f} ms")


def measure_replays(decoder: Decoder, steps: int) -> None:
    """Print where the time of a replayed step goes."""
    played: list[tuple[int, float]] = []
    play = Tape.play

    def timed(self: Tape) -> None:
        started = time.perf_counter()
        play(self)
        played.append((len(self), time.perf_counter() - started))

    Tape.play = timed  # type: ignore[method-assign]
    generator = Generator(decoder, decoder.new_cache("static", max_length=1024), decoder.new_sampler(), end_tokens=())
    generator.append_tokens(np.arange(16)[None] % 250)
    for _ in range(3):
        generator.step()

    def around() -> float:
        count, started = len(played), time.perf_counter()
        generator.step()
        whole = time.perf_counter() - started
        return whole - played[-1][1] if len(played) > count else float("inf")  # the cache has grown, and the step was noted down anew

    outside = best(around, steps)
    calls, inside = played[-1][0], min(seconds for _, seconds in played) * 1e3
    print(f"{'a replayed step':<28} {inside + outside:7.3f} ms")
    print(f"{'  calls, tiny tensors':<28} {inside:7.3f} ms, {calls} of {inside / calls * 1e3:.2f} µs")
    print(f"{'engine: what is around them':<28} {outside:7.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SMALL), default="gpt2-small")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--providers", help="separated by commas; default: miniort's own choice")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIGS[arguments.model], **SMALL[arguments.model]}
        source = write(config, Path(folder) / "model", arguments.model)
        providers = arguments.providers.split(",") if arguments.providers else None
        for replay, measurement in ((False, measure), (True, measure_replays)):
            decoder = open_decoder(source, options=SessionOptions(intra_op_num_threads=1), providers=providers, replay=replay)
            measurement(decoder, arguments.steps)
            decoder.close()


if __name__ == "__main__":
    main()
