"""Who is measured on a decoder: miniort, and what else runs the same model here. Each continues a prompt greedily, in a process of its own.

onnxruntime runs the same graphs; transformers (torch) a checkpoint of the same weights; onnxruntime-genai a folder that its builder made.
"""

from __future__ import annotations

import os

# These pick an older, slower kernel of OpenBLAS where they're set; a benchmark wants the one for this processor.
for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(variable, None)

import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.int64]]

CAPACITY = 1024
"""Tokens that caches of a fixed size are made for."""


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
    """A model as peers are told of it: its graphs for the prompt and for each step, which may be one, and the sizes of its cache.

    checkpoint, genai: folders of the same model for transformers and for onnxruntime-genai, None where there's none.
    """

    name: str
    source: str
    prefill: Names
    decode: Names
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int
    threads: int
    checkpoint: str | None
    genai: str | None
    providers: list[str] | None

    @property
    def cache_bytes_per_token(self) -> int:
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim


class Peer(Protocol):
    """Something that continues a prompt greedily: the ids of the next tokens, one by one, and the logits of the last (None: not told)."""

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
    """onnxruntime-genai, with its cache in one buffer."""

    def __init__(self, spec: Spec) -> None:
        assert spec.genai is not None
        self.genai = import_module("onnxruntime_genai")
        config = self.genai.Config(spec.genai)
        config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {spec.threads}}}}}}}}}')
        self.model = self.genai.Model(config)

    def start(self, prompt: IntArray) -> Iterator[tuple[int, Any]]:
        parameters = self.genai.GeneratorParams(self.model)
        parameters.set_search_options(max_length=CAPACITY, do_sample=False)
        generator = self.genai.Generator(self.model, parameters)
        generator.append_tokens(prompt[0].astype(np.int32))
        while True:
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0]), None


class Transformers:
    """transformers on torch, with the cache that its `generate` takes by default."""

    def __init__(self, spec: Spec) -> None:
        self.torch, self.transformers = import_module("torch"), import_module("transformers")
        self.torch.set_num_threads(spec.threads)
        self.transformers.utils.logging.disable_progress_bar()
        warnings.simplefilter("ignore", FutureWarning)  # of names that its next version changes
        model = self.transformers.AutoModelForCausalLM
        self.model = model.from_pretrained(spec.checkpoint, dtype=self.torch.float32, local_files_only=True).eval()

    def start(self, prompt: IntArray) -> Iterator[tuple[int, Any]]:
        tokens, cache = self.torch.from_numpy(prompt), self.transformers.DynamicCache(config=self.model.config)
        while True:
            with self.torch.inference_mode():
                logits = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
                tokens = logits.argmax(-1, keepdim=True)
            yield int(tokens), logits[0].numpy()


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
    "transformers": Transformers,
    "bandwidth": Bandwidth,
}


def peers_for(spec: Spec) -> list[str]:
    """Those that can run a model here, miniort first."""
    found = ["miniort", "onnxruntime", "IO binding"]
    if spec.genai and is_installed("onnxruntime_genai"):
        found.append("genai")
    if spec.checkpoint and is_installed("torch", "transformers"):
        found.append("transformers")
    return found


def is_installed(*modules: str) -> bool:
    return all(find_spec(each) is not None for each in modules)


def serve(connection: Connection, name: str, spec: Spec) -> None:
    """A peer's process: it answers one request after the other until it's sent None.

    `start` begins with a prompt, `tokens` goes on from there by so many steps: their times in seconds, their tokens and the last logits.
    """
    started = time.perf_counter()
    peer = PEERS[name](spec)
    connection.send(time.perf_counter() - started)
    running: Iterator[tuple[int, Any]] = iter(())
    while (request := connection.recv()) is not None:
        what, argument = request
        if what == "bandwidth":
            connection.send(peer.measure())
        elif what == "memory":
            connection.send((resident_peak(), peer.pool() if isinstance(peer, Miniort) else None))
        elif what == "start":
            running = iter(())  # the cache of the last one goes first
            list(islice(peer.start(argument[:, :16]), 3))  # a processor that slept is slow at first
            running = peer.start(argument)
            connection.send(None)
        else:
            tokens, times, last = [], [time.perf_counter()], None
            for token, logits in islice(running, argument):
                times.append(time.perf_counter())
                tokens.append(token)
                last = logits  # and no others, or they'd count as the peer's memory
            connection.send(([later - earlier for earlier, later in pairwise(times)], tokens, None if last is None else np.array(last)))


def resident_peak() -> int:
    """The largest resident set of this process so far, in bytes; mapped files count as far as they were read."""
    status = Path("/proc/self/status")
    if status.exists():  # where there's this, `getrusage` begins with the peak of the process that started this one
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        assert peak is not None
        return int(peak[1]) * 1024
    import resource

    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


class Process:
    """A peer in a process of its own."""

    def __init__(self, name: str, spec: Spec) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, spec), daemon=True)
        self.process.start()
        theirs.close()
        self.load_seconds: float = self.connection.recv()

    def ask(self, what: str, argument: Any = None) -> Any:
        self.connection.send((what, argument))
        return self.connection.recv()

    def start(self, prompt: IntArray) -> None:
        """Begin with a prompt, [1, time]; it's run with the first of the steps."""
        self.ask("start", prompt)

    def go_on(self, steps: int) -> tuple[list[float], list[int], Any]:
        """The seconds that each of the next steps took, their tokens, and the logits of the last (None: not told)."""
        found: tuple[list[float], list[int], Any] = self.ask("tokens", steps)
        return found

    def stop(self) -> None:
        self.connection.send(None)
        self.process.join()
