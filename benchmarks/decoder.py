"""Time per token of decoders: miniort beside onnxruntime (plain and with IO binding), onnxruntime-genai and transformers, with the same
weights and the same number of threads.

    uv run python benchmarks/decoder.py [--model gpt2-small] [--model llama-135m] [--model FILE] [--contexts 16,128,512,1000]
        [--rounds 5] [--steps 12] [--threads N] [--providers numba,cpu] [--full-run] [--json FILE]
        [--checkpoint FOLDER] [--genai FOLDER]

Models are files or folders of graphs, or `gpt2-small` and `llama-135m`, which are written with random weights into --folder. onnxruntime
is a development dependency. Others take part where they're installed, which takes 1 GB:

    uv run --with torch --with transformers --with onnxruntime-genai python benchmarks/decoder.py

For the named models the same weights are then written as a checkpoint, and built for onnxruntime-genai (the Llama; its builder knows no
GPT-2). For a model of your own `--checkpoint` and `--genai` name folders of the same weights.

Every peer is a process of its own, and they take turns within each round, so that what else the machine does hits all of them; figures are
medians over the rounds. Beside them a matrix-vector product of 600 MB tells the memory's bandwidth: the bound of a step is its bytes
(weights that are read, and the cache) divided by that. `ratio` is the peer's time divided by miniort's: above 1, miniort is faster.
Peak memory is that of the peer's process, with the weights that it mapped from a file as far as it read them.

`--full-run` generates from a prompt of 16 tokens to a context of 1,016, and tells how long the tokens are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from peers import CAPACITY, IntArray, Names, Process, Spec, is_installed, peers_for
from random_decoder import CONFIGS, build_genai, write, write_checkpoint

from miniort.generation import open_decoder
from miniort.generation.binding import GraphBinding
from miniort.runtime.plan import Plan

PAUSE = 0.15
"""Seconds between peers: OpenBLAS's threads go on waiting in a loop for 0.1 s after their last work, on the next one's cores."""

AGREEMENT = 100
"""Greedy steps whose tokens are compared."""

FULL_RUN = 1000
"""As many in a full run."""

TURN = 100
"""Steps of one peer before it's the next one's turn."""


@dataclass(frozen=True)
class Figures:
    """Of one peer at one context: medians over the rounds, in milliseconds."""

    peer: str
    context: int
    prefill: float
    decode: float
    fastest: float


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights: those that a step reads, and all that are held."""

    read: int
    held: int


@dataclass(frozen=True)
class Result:
    """All that was measured of one model."""

    model: str
    threads: int
    weights: Weights
    cache_bytes_per_token: int
    bandwidth: float
    load_seconds: dict[str, float]
    figures: list[Figures]
    peak_memory: dict[str, int]
    pool_peak: int
    same_tokens: dict[str, int]
    tokens: int
    logits_differ: dict[str, float | None]
    full_run_seconds: dict[str, float]


def describe(model: str, arguments: argparse.Namespace) -> tuple[Spec, Weights]:
    """What peers have to know of a model, and what its weights take."""
    folder: Path = arguments.folder
    source, checkpoint, genai = model, arguments.checkpoint, arguments.genai
    if model in CONFIGS:
        config = CONFIGS[model]
        source = str(write(config, folder / model, model))
        if is_installed("torch", "transformers"):
            checkpoint = write_checkpoint(config, folder / f"{model}-checkpoint", model)
            if is_installed("onnxruntime_genai") and config["model_type"] == "llama":
                genai = build_genai(checkpoint, folder / f"{model}-genai")
    decoder = open_decoder(source)
    binding, files = decoder.binding, decoder.source.graphs

    def names(graph: GraphBinding, path: Path) -> Names:
        return Names(
            str(path),
            graph.tokens,
            graph.mask,
            graph.positions,
            graph.logits,
            [(layer.key, layer.value) for layer in graph.past],
            [(layer.key, layer.value) for layer in graph.present],
        )

    decode = names(binding.decode, files[-1])
    prefill = decode if binding.prefill is None else names(binding.prefill, files[0])
    weights = weights_of(list(decoder.sessions.values())[-1].plan)
    spec = Spec(
        name=model,
        source=source,
        prefill=prefill,
        decode=decode,
        kv_heads=binding.kv_heads,
        head_dim=binding.head_dim,
        layers=binding.layers,
        vocabulary=binding.vocabulary_size or 1000,
        threads=arguments.threads,
        checkpoint=None if checkpoint is None else str(checkpoint),
        genai=None if genai is None else str(genai),
        providers=arguments.providers.split(",") if arguments.providers else None,
    )
    decoder.close()
    return spec, weights


def weights_of(plan: Plan) -> Weights:
    """A table that tokens are looked up in is held, and read by a step only if it's the output head as well."""
    sizes: dict[int, int] = {}
    read: set[int] = set()
    for step in plan.steps:
        for index, slot in enumerate(step.inputs):
            if isinstance(array := plan.initial[slot], np.ndarray):
                address = array.ctypes.data  # a transposed view is the same weight
                sizes[address] = array.nbytes
                if step.info.op != "Gather" or index:
                    read.add(address)
    return Weights(sum(sizes[address] for address in read), sum(sizes.values()))


def measure(spec: Spec, weights: Weights, contexts: Sequence[int], rounds: int, steps: int, full_run: bool) -> Result:
    """Run all peers in turns."""
    names = peers_for(spec)
    processes = {name: Process(name, spec) for name in [*names, "bandwidth"]}
    figures: list[Figures] = []
    bandwidths: list[float] = []
    try:
        for context in contexts:
            times: dict[str, list[list[float]]] = {name: [] for name in names}
            for number in range(rounds + 1):
                bandwidths.append(processes["bandwidth"].ask("bandwidth"))
                for name in names:
                    time.sleep(PAUSE)
                    processes[name].start(prompt_of(context, spec.vocabulary))
                    found, _, _ = processes[name].go_on(steps + 1)
                    if number:  # the first round warms up
                        times[name].append(found)
            for name in names:
                decode = [each for found in times[name] for each in found[1:]]
                prefill = median(found[0] for found in times[name])
                figures.append(Figures(name, context, prefill * 1e3, median(decode) * 1e3, min(decode) * 1e3))
        memory = {name: processes[name].ask("memory") for name in names}
        seconds, tokens, logits = long_run(processes, names, spec, FULL_RUN if full_run else AGREEMENT)
        ours = names[0]
        return Result(
            model=spec.name,
            threads=spec.threads,
            weights=weights,
            cache_bytes_per_token=spec.cache_bytes_per_token,
            bandwidth=median(bandwidths),
            load_seconds={name: processes[name].load_seconds for name in names},
            figures=figures,
            peak_memory={name: peak for name, (peak, _) in memory.items()},
            pool_peak=memory[ours][1],
            same_tokens={name: same(tokens[name], tokens[ours]) for name in names[1:]},
            tokens=len(tokens[ours]),
            logits_differ={name: None if logits[name] is None else float(np.abs(logits[name] - logits[ours]).max()) for name in names[1:]},
            full_run_seconds=seconds if full_run else {},
        )
    finally:
        for process in processes.values():
            process.stop()


def long_run(
    processes: Mapping[str, Process], names: Sequence[str], spec: Spec, steps: int
) -> tuple[dict[str, float], dict[str, list[int]], dict[str, Any]]:
    """Continue a prompt of 16 tokens, in turns. Of each peer: seconds in all, tokens, and the logits of the prompt's last position."""
    logits: dict[str, Any] = {}
    seconds, tokens = dict.fromkeys(names, 0.0), {name: list[int]() for name in names}
    for done in range(0, steps + 1, TURN):
        for name in names:
            time.sleep(PAUSE)
            if done == 0:
                processes[name].start(prompt_of(16, spec.vocabulary))
                times, found, logits[name] = processes[name].go_on(1)
            else:
                times, found, _ = processes[name].go_on(TURN)
            seconds[name] += sum(times)
            tokens[name] += found
    return seconds, tokens, logits


def same(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many of the first tokens are equal."""
    return next((index for index, (one, other) in enumerate(zip(tokens, expected, strict=True)) if one != other), len(expected))


def prompt_of(length: int, vocabulary: int) -> IntArray:
    return np.random.default_rng(length).integers(0, vocabulary, (1, length))


def report(result: Result) -> str:
    """Tables in Markdown."""
    peers = list(dict.fromkeys(each.peer for each in result.figures))
    others = peers[1:]
    lines = [
        f"## {result.model}",
        "",
        f"{result.threads} threads; {result.weights.read / 1e6:.0f} MB of weights a step; "
        f"memory bandwidth {result.bandwidth / 1e9:.1f} GB/s.",
        "",
        "| context | what | "
        + " | ".join(f"{peer} ms" for peer in peers)
        + " | "
        + " | ".join(f"ratio to {peer}" for peer in others)
        + " | of the bound |",
        "|--:|---|" + "--:|" * (len(peers) + len(others) + 1),
    ]
    for what in ("decode", "prefill"):
        for context in dict.fromkeys(each.context for each in result.figures):
            found = {each.peer: getattr(each, what) for each in result.figures if each.context == context}
            ours = found["miniort"]
            bound = (result.weights.read + context * result.cache_bytes_per_token) / result.bandwidth * 1e3
            share = f"{bound / ours:.0%}" if what == "decode" else ""
            cells = [f"{found[peer]:.1f}" for peer in peers] + [f"{found[peer] / ours:.2f}" for peer in others] + [share]
            lines.append(f"| {context:,} | {what} | " + " | ".join(cells) + " |")
    if result.full_run_seconds:
        runs = [result.full_run_seconds[peer] for peer in peers]
        cells = [f"{seconds * 1e3:.0f}" for seconds in runs] + [f"{seconds / runs[0]:.2f}" for seconds in runs[1:]] + [""]
        lines.append("| 16 to 1,016 | all | " + " | ".join(cells) + " |")
    held = result.weights.held + CAPACITY * result.cache_bytes_per_token
    lines += ["", f"Line of a step: {line(result)}.", ""]
    lines += ["| | " + " | ".join(peers) + " |", "|---|" + "--:|" * len(peers)]
    lines.append("| load, s | " + " | ".join(f"{result.load_seconds[peer]:.2f}" for peer in peers) + " |")
    lines.append("| peak memory, MB | " + " | ".join(f"{result.peak_memory[peer] / 1e6:.0f}" for peer in peers) + " |")
    beyond = " | ".join(f"{(result.peak_memory[peer] - held) / 1e6:.0f}" for peer in peers)
    lines.append(f"| less weights and cache ({held / 1e6:.0f} MB) | {beyond} |")
    same_tokens = " | ".join(str(result.same_tokens[peer]) for peer in others)
    lines.append(f"| of {result.tokens:,} greedy tokens the same | | {same_tokens} |")
    logits = " | ".join("" if (apart := result.logits_differ[peer]) is None else f"{apart:.1e}" for peer in others)
    lines.append(f"| first logits apart | | {logits} |")
    lines += ["", f"Our pool's peak: {result.pool_peak / 1e6:.0f} MB."]
    return "\n".join(lines)


def line(result: Result) -> str:
    """Time of a step against the context, by least squares, beside what the bandwidth allows."""
    ours = [each for each in result.figures if each.peer == "miniort"]
    if len(ours) < 2:
        return "needs two contexts"
    slope, intercept = np.polyfit([each.context for each in ours], [each.decode for each in ours], 1)
    least = result.weights.read / result.bandwidth * 1e3, result.cache_bytes_per_token / result.bandwidth * 1e6
    return f"{intercept:.1f} ms + {slope * 1e3:.2f} µs a token; by bandwidth {least[0]:.1f} ms + {least[1]:.2f} µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="may be given several times; default: gpt2-small and llama-135m")
    parser.add_argument("--contexts", default="16,128,512,1000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    parser.add_argument("--full-run", action="store_true")
    parser.add_argument("--checkpoint", type=Path, help="a model of your own as transformers reads it")
    parser.add_argument("--genai", type=Path, help="a model of your own as onnxruntime-genai reads it")
    parser.add_argument("--providers", help="miniort's providers, separated by commas; default: its own choice")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "miniort-benchmark", help="where built models are kept"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    contexts = [int(text) for text in arguments.contexts.split(",")]
    for model in arguments.model or list(CONFIGS):
        spec, weights = describe(model, arguments)
        results.append(measure(spec, weights, contexts, arguments.rounds, arguments.steps, arguments.full_run))
        print(report(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
