"""Time per token of decoders: miniort beside onnxruntime, plain and with IO binding, on the same graphs and the same number of threads.

    uv run python benchmarks/decoder.py [--model gpt2-small] [--model llama-135m] [--model FILE] [--contexts 16,128,512,1000]
        [--rounds 5] [--steps 12] [--threads N] [--providers numba,cpu] [--full-run] [--genai FOLDER] [--json FILE]

Models are files or folders of graphs, or `gpt2-small` and `llama-135m`, which are written with random weights into --folder.

Every peer is a process of its own, and they take turns within each round, so that what else the machine does hits all of them; figures are
medians over the rounds. Beside them a matrix-vector product of 600 MB tells the memory's bandwidth: the bound of a step is its bytes
(weights that are read, and the cache) divided by that. `ratio` is the peer's time divided by miniort's: above 1, miniort is faster.

`--full-run` generates from a prompt of 16 tokens to a context of 1,016. `--genai FOLDER` adds onnxruntime-genai with a model that its
builder made; its weights are others, so only its times are compared.
"""

from __future__ import annotations

import os

# These pick an older, slower kernel of OpenBLAS where they're set; a benchmark wants the one for this processor.
for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(variable, None)

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import islice, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.int64]]

PAUSE = 0.15
"""Seconds between peers: OpenBLAS's threads go on waiting in a loop for 0.1 s after their last work, on the next one's cores."""

CAPACITY = 1024
"""Tokens that caches of a fixed size are made for."""

AGREEMENT = 100
"""Greedy steps whose tokens are compared."""


@dataclass(frozen=True)
class Names:
    """A graph's inputs and outputs by meaning, for peers that know only names. past, present: (key, value) by layer."""

    file: str
    tokens: str
    mask: str | None
    positions: str | None
    logits: str
    past: list[tuple[str, str]]
    present: list[tuple[str, str]]


@dataclass(frozen=True)
class Spec:
    """A model as peers are told of it: its graphs for the prompt and for each step, which may be one, and the sizes of its cache."""

    name: str
    source: str
    prefill: Names
    decode: Names
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int
    threads: int
    genai: str | None
    providers: list[str] | None

    @property
    def cache_bytes_per_token(self) -> int:
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim


class Peer(Protocol):
    """Something that continues a prompt greedily: the ids of the next tokens, one by one, and the logits of the last."""

    def start(self, prompt: IntArray) -> Iterator[tuple[int, Any]]: ...


class Miniort:
    def __init__(self, spec: Spec) -> None:
        from miniort import SessionOptions
        from miniort.generation import open_decoder

        self.decoder = open_decoder(spec.source, options=SessionOptions(intra_op_num_threads=spec.threads), providers=spec.providers)

    def start(self, prompt: IntArray) -> Iterator[tuple[int, Any]]:
        from miniort.generation import Generator, generate

        decoder = self.decoder
        generator = Generator(decoder, decoder.new_cache("static", max_length=CAPACITY), decoder.new_sampler(), end_tokens=())
        generator.append_tokens(prompt)
        for step in generate(generator):
            yield int(step.ids[0]), step.logits[0]

    def pool(self) -> int:
        """The most bytes that its buffer pools ever lent at once."""
        return sum(each.provider.memory().peak for session in self.decoder.sessions.values() for each in session.providers)


class OnnxRuntime:
    """The usual loop: each step's presents are fed back as the next one's past."""

    def __init__(self, spec: Spec) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = spec.threads
        options.log_severity_level = 3
        self.spec = spec
        self.decode = onnxruntime.InferenceSession(spec.decode.file, options, providers=["CPUExecutionProvider"])
        one = spec.prefill.file == spec.decode.file
        self.prefill = self.decode if one else onnxruntime.InferenceSession(spec.prefill.file, options, providers=["CPUExecutionProvider"])

    def empty(self) -> Any:
        return np.zeros((1, self.spec.kv_heads, 0, self.spec.head_dim), np.float32)

    def feeds(self, names: Names, tokens: IntArray, total: int) -> dict[str, Any]:
        found: dict[str, Any] = {names.tokens: tokens}
        if names.mask:
            found[names.mask] = np.ones((1, total), np.int64)
        if names.positions:
            found[names.positions] = np.arange(total - tokens.shape[1], total)[None]
        return found

    def start(self, prompt: IntArray) -> Iterator[tuple[int, Any]]:
        names, session, tokens = self.spec.prefill, self.prefill, prompt
        past = {name: self.empty() for pair in names.past for name in pair}
        total = prompt.shape[1]
        while True:
            wanted = [names.logits, *(name for pair in names.present for name in pair)]
            logits, *presents = session.run(wanted, {**self.feeds(names, tokens, total), **past})
            tokens = logits[:, -1:].argmax(-1)
            yield int(tokens[0, 0]), logits[0, -1]
            names, session = self.spec.decode, self.decode
            past = dict(zip([name for pair in names.past for name in pair], presents, strict=True))
            total += 1


class OnnxRuntimeBinding(OnnxRuntime):
    """With IO binding: presents stay onnxruntime's own values and aren't seen by Python."""

    def start(self, prompt: IntArray) -> Iterator[tuple[int, Any]]:
        import onnxruntime

        value = onnxruntime.OrtValue.ortvalue_from_numpy
        names, session, tokens = self.spec.prefill, self.prefill, prompt
        past = [value(self.empty()) for pair in names.past for _ in pair]
        total = prompt.shape[1]
        while True:
            binding = session.io_binding()
            for name, array in self.feeds(names, tokens, total).items():
                binding.bind_cpu_input(name, array)
            for name, kept in zip([name for pair in names.past for name in pair], past, strict=bool(names.past)):
                binding.bind_ortvalue_input(name, kept)
            for name in [names.logits, *(name for pair in names.present for name in pair)]:
                binding.bind_output(name)
            session.run_with_iobinding(binding)
            outputs = binding.get_outputs()
            logits, past = outputs[0].numpy(), outputs[1:]
            tokens = logits[:, -1:].argmax(-1)
            yield int(tokens[0, 0]), logits[0, -1]
            names, session = self.spec.decode, self.decode
            total += 1


class GenAI:
    """onnxruntime-genai on a folder of its own, with its cache in one buffer."""

    def __init__(self, spec: Spec) -> None:
        self.genai = import_module("onnxruntime_genai")
        self.model = self.genai.Model(self.genai.Config(spec.genai))

    def start(self, prompt: IntArray) -> Iterator[tuple[int, Any]]:
        parameters = self.genai.GeneratorParams(self.model)
        parameters.set_search_options(max_length=CAPACITY, do_sample=False)
        generator = self.genai.Generator(self.model, parameters)
        generator.append_tokens(prompt[0].astype(np.int32))
        while True:
            generator.generate_next_token()
            yield int(generator.get_sequence(0)[-1]), None


class Bandwidth:
    """A matrix-vector product of 600 MB by BLAS: what a step could be at best."""

    def __init__(self, spec: Spec) -> None:
        self.matrix = np.ones((150_000, 1000), np.float32)
        self.vector = np.ones(1000, np.float32)
        self.result = np.empty(150_000, np.float32)

    def measure(self) -> float:
        """Bytes per second; the best of a few."""
        times = []
        for _ in range(3):
            started = time.perf_counter()
            self.matrix.dot(self.vector, self.result)
            times.append(time.perf_counter() - started)
        return self.matrix.nbytes / min(times)


PEERS: Mapping[str, Callable[[Spec], Any]] = {
    "miniort": Miniort,
    "onnxruntime": OnnxRuntime,
    "IO binding": OnnxRuntimeBinding,
    "genai": GenAI,
    "bandwidth": Bandwidth,
}


def serve(connection: Connection, name: str, spec: Spec) -> None:
    """A peer's process: it answers one request after the other until it's sent None."""
    started = time.perf_counter()
    peer = PEERS[name](spec)
    connection.send(time.perf_counter() - started)
    while (request := connection.recv()) is not None:
        what, argument, steps = request
        if what == "bandwidth":
            connection.send(peer.measure())
        elif what == "memory":
            connection.send((resident_peak(), peer.pool() if isinstance(peer, Miniort) else None))
        elif what == "tokens":
            found = list(islice(peer.start(argument), steps))
            connection.send(([token for token, _ in found], None if found[0][1] is None else np.array(found[0][1])))
        else:
            list(islice(peer.start(argument[:, :16]), 3))  # a processor that slept is slow at first
            times = [time.perf_counter(), *(time.perf_counter() for _ in islice(peer.start(argument), steps + 1))]
            connection.send([later - earlier for earlier, later in pairwise(times)])


def resident_peak() -> int:
    """The largest resident set of this process so far, in bytes; mapped files count as far as they were read."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Process:
    """A peer in a process of its own."""

    def __init__(self, name: str, spec: Spec) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, spec), daemon=True)
        self.process.start()
        theirs.close()
        self.load_seconds: float = self.connection.recv()

    def ask(self, what: str, argument: Any = None, steps: int = 0) -> Any:
        self.connection.send((what, argument, steps))
        return self.connection.recv()

    def stop(self) -> None:
        self.connection.send(None)
        self.process.join()


@dataclass(frozen=True)
class Figures:
    """Of one peer at one context: medians over the rounds, in milliseconds."""

    peer: str
    context: int
    prefill: float
    decode: float
    fastest: float


@dataclass(frozen=True)
class Result:
    """All that was measured of one model."""

    model: str
    threads: int
    weight_bytes: int
    cache_bytes_per_token: int
    bandwidth: float
    load_seconds: dict[str, float]
    figures: list[Figures]
    peak_memory: dict[str, int]
    pool_peak: int
    tokens_agree: dict[str, bool]
    logits_differ: dict[str, float]
    full_run_seconds: dict[str, float]


def describe(model: str, folder: Path, threads: int, genai: str | None, providers: list[str] | None) -> tuple[Spec, int]:
    """What peers have to know of a model, and the bytes of weights that one step reads."""
    from miniort.generation import open_decoder
    from miniort.generation.binding import GraphBinding

    source = model
    from random_decoder import CONFIGS, write

    if model in CONFIGS:
        source = str(write(CONFIGS[model], folder / model, model))
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
    session = list(decoder.sessions.values())[-1]
    constants = {
        id(value): value for step in session.plan.steps for slot in step.inputs if (value := session.plan.initial[slot]) is not None
    }
    looked_up = {id(session.plan.initial[step.inputs[0]]) for step in session.plan.steps if step.info.op == "Gather"}
    products = {
        id(session.plan.initial[slot])
        for step in session.plan.steps
        if step.info.op in ("MatMul", "Gemm", "Transpose")
        for slot in step.inputs
    }
    read = sum(each.nbytes for key, each in constants.items() if hasattr(each, "nbytes") and (key not in looked_up or key in products))
    spec = Spec(
        model,
        source,
        prefill,
        decode,
        binding.kv_heads,
        binding.head_dim,
        binding.layers,
        binding.vocabulary_size or 1000,
        threads,
        genai,
        providers,
    )
    decoder.close()
    return spec, read


def measure(spec: Spec, weight_bytes: int, contexts: Sequence[int], rounds: int, steps: int, full_run: bool) -> Result:
    """Run all peers in turns."""
    names = ["miniort", "onnxruntime", "IO binding", *(["genai"] if spec.genai else [])]
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
                    found = processes[name].ask("times", prompt_of(context, spec.vocabulary), steps)
                    if number:  # the first round warms up
                        times[name].append(found)
            for name in names:
                decode = [each for found in times[name] for each in found[1:]]
                prefill = median(found[0] for found in times[name])
                figures.append(Figures(name, context, prefill * 1e3, median(decode) * 1e3, min(decode) * 1e3))
        memory = {name: processes[name].ask("memory") for name in names}
        compared = [name for name in names if name != "genai"]
        answers = {name: processes[name].ask("tokens", prompt_of(16, spec.vocabulary), AGREEMENT) for name in compared}
        ours = answers["miniort"]
        runs = {}
        if full_run:
            for name in names:
                time.sleep(PAUSE)
                runs[name] = sum(processes[name].ask("times", prompt_of(16, spec.vocabulary), 1000))
        return Result(
            spec.name,
            spec.threads,
            weight_bytes,
            spec.cache_bytes_per_token,
            median(bandwidths),
            {name: processes[name].load_seconds for name in names},
            figures,
            {name: peak for name, (peak, _) in memory.items()},
            memory["miniort"][1],
            {name: answers[name][0] == ours[0] for name in compared[1:]},
            {name: float(np.abs(answers[name][1] - ours[1]).max()) for name in compared[1:]},
            runs,
        )
    finally:
        for process in processes.values():
            process.stop()


def prompt_of(length: int, vocabulary: int) -> IntArray:
    return np.random.default_rng(length).integers(0, vocabulary, (1, length))


def report(result: Result) -> str:
    """Tables in Markdown."""
    peers = list(dict.fromkeys(each.peer for each in result.figures))
    others = peers[1:]
    lines = [
        f"## {result.model}",
        "",
        f"{result.threads} threads; {result.weight_bytes / 1e6:.0f} MB of weights a step; "
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
            bound = (result.weight_bytes + context * result.cache_bytes_per_token) / result.bandwidth * 1e3
            share = f"{bound / ours:.0%}" if what == "decode" else ""
            cells = [f"{found[peer]:.1f}" for peer in peers] + [f"{found[peer] / ours:.2f}" for peer in others] + [share]
            lines.append(f"| {context:,} | {what} | " + " | ".join(cells) + " |")
    if result.full_run_seconds:
        runs = result.full_run_seconds
        cells = [f"{runs[peer] * 1e3:.0f}" for peer in peers] + [f"{runs[peer] / runs['miniort']:.2f}" for peer in others] + [""]
        lines.append("| 16 to 1,016 | all | " + " | ".join(cells) + " |")
    cache = 1024 * result.cache_bytes_per_token
    lines += ["", f"Line of a step: {line(result)}.", ""]
    lines += ["| | " + " | ".join(peers) + " |", "|---|" + "--:|" * len(peers)]
    lines.append("| load, s | " + " | ".join(f"{result.load_seconds[peer]:.2f}" for peer in peers) + " |")
    lines.append("| peak memory, MB | " + " | ".join(f"{result.peak_memory[peer] / 1e6:.0f}" for peer in peers) + " |")
    lines.append(
        f"| less weights and cache ({(result.weight_bytes + cache) / 1e6:.0f} MB) | "
        + " | ".join(f"{(result.peak_memory[peer] - result.weight_bytes - cache) / 1e6:.0f}" for peer in peers)
        + " |"
    )
    lines += [
        "",
        f"Our pool's peak: {result.pool_peak / 1e6:.0f} MB. "
        + "; ".join(
            f"{name}: {AGREEMENT} greedy tokens {'the same' if same else 'DIFFER'}, first logits {result.logits_differ[name]:.1e} apart"
            for name, same in result.tokens_agree.items()
        )
        + ".",
    ]
    return "\n".join(lines)


def line(result: Result) -> str:
    """Time of a step against the context, by least squares, beside what the bandwidth allows."""
    ours = [each for each in result.figures if each.peer == "miniort"]
    if len(ours) < 2:
        return "needs two contexts"
    slope, intercept = np.polyfit([each.context for each in ours], [each.decode for each in ours], 1)
    least = result.weight_bytes / result.bandwidth * 1e3, result.cache_bytes_per_token / result.bandwidth * 1e6
    return f"{intercept:.1f} ms + {slope * 1e3:.2f} µs a token; by bandwidth {least[0]:.1f} ms + {least[1]:.2f} µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="may be given several times; default: gpt2-small and llama-135m")
    parser.add_argument("--contexts", default="16,128,512,1000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    parser.add_argument("--full-run", action="store_true")
    parser.add_argument("--genai")
    parser.add_argument("--providers", help="miniort's providers, separated by commas; default: its own choice")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "miniort-benchmark", help="where built models are kept"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    providers = arguments.providers.split(",") if arguments.providers else None
    for model in arguments.model or ["gpt2-small", "llama-135m"]:
        spec, weight_bytes = describe(model, arguments.folder, arguments.threads, arguments.genai, providers)
        contexts = [int(text) for text in arguments.contexts.split(",")]
        results.append(measure(spec, weight_bytes, contexts, arguments.rounds, arguments.steps, arguments.full_run))
        print(report(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
