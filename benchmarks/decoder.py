"""Time per token of a decoder: miniort with and without its cache, and onnxruntime on the same graphs.

    uv run python benchmarks/decoder.py [--model demo|FOLDER|FILE] [--contexts 16,64,128] [--rounds 7]

The peers take turns within each round, in one process, with the same number of threads; figures are medians over the rounds. `ratio` is
onnxruntime's time divided by miniort's: above 1, miniort is faster.
"""

from __future__ import annotations

import os

# These pick an older, slower kernel of OpenBLAS where they're set; a benchmark wants the one for this processor.
for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(variable, None)

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import onnxruntime

from miniort.generation import Decoder, Generator, generate, open_decoder
from miniort.generation.binding import GraphBinding

STEPS = 8


def prompt_of(length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(length).integers(3, 256, (1, length))


def time_miniort(decoder: Decoder, length: int, cached: bool) -> tuple[float, float]:
    """Seconds for the prompt with the first token, and the median of the next tokens."""
    generator = Generator(decoder, decoder.new_cache() if cached else None, decoder.new_sampler(), end_tokens=())
    generator.append_tokens(prompt_of(length))
    times = [time.perf_counter(), *(time.perf_counter() for _ in generate(generator, STEPS + 1))]
    steps = np.diff(times)
    return float(steps[0]), float(median(steps[1:]))


class OnnxRuntimeDecoder:
    """The usual loop over onnxruntime: each step's presents are fed back as the next one's past."""

    def __init__(self, decoder: Decoder, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.sessions = [
            onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]) for path in decoder.source.graphs
        ]
        self.binding = decoder.binding

    def time(self, length: int) -> tuple[float, float]:
        binding = self.binding
        prefill = binding.prefill or binding.decode
        nothing = np.zeros((1, binding.kv_heads, 0, binding.head_dim), binding.dtype)
        past = {name: nothing for layer in prefill.past for name in (layer.key, layer.value)}
        tokens = prompt_of(length)
        times = [time.perf_counter()]
        total = 0
        for step in range(STEPS + 1):
            graph = prefill if step == 0 else binding.decode
            total += tokens.shape[1]
            names, found = self.run(self.sessions[0 if step == 0 else -1], graph, tokens, total, past)
            outputs = dict(zip(names, found, strict=True))
            tokens = outputs[graph.logits][:, -1:].argmax(-1).astype(np.int64)
            past = {
                name: outputs[new]
                for old, present in zip(binding.decode.past, graph.present, strict=True)
                for name, new in ((old.key, present.key), (old.value, present.value))
            }
            times.append(time.perf_counter())
        steps = np.diff(times)
        return float(steps[0]), float(median(steps[1:]))

    @staticmethod
    def run(session: Any, graph: GraphBinding, tokens: Any, total: int, past: dict[str, Any]) -> tuple[list[str], list[Any]]:
        feeds = {graph.tokens: tokens, **past}
        if graph.mask:
            feeds[graph.mask] = np.ones((1, total), np.int64)
        if graph.positions:
            feeds[graph.positions] = np.arange(total - tokens.shape[1], total)[None]
        return [each.name for each in session.get_outputs()], session.run(None, feeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--contexts", default="16,64,128,240")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    decoder = open_decoder(arguments.model)
    peer = OnnxRuntimeDecoder(decoder, threads)
    print(
        f"{arguments.model}: miniort {joined(decoder)}; onnxruntime {onnxruntime.__version__}; {threads} threads; {arguments.rounds} rounds"
    )
    print(f"{'context':>8} {'':>8} {'miniort ms':>11} {'no cache ms':>12} {'onnxruntime ms':>15} {'ratio':>6}")
    for context in (int(text) for text in arguments.contexts.split(",")):
        peers: dict[str, Callable[[], tuple[float, float]]] = {
            "miniort": lambda context=context: time_miniort(decoder, context, True),  # type: ignore[misc]
            "no cache": lambda context=context: time_miniort(decoder, context, False),  # type: ignore[misc]
            "onnxruntime": lambda context=context: peer.time(context),  # type: ignore[misc]
        }
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
        for number in range(arguments.rounds + 1):
            for name, measure in peers.items():
                time.sleep(0.1)  # the peer's threads spin for a while after their last work
                figures = measure()
                if number:  # the first round warms up
                    rounds[name].append(figures)
        for index, what in enumerate(("prefill", "decode")):
            ours, uncached, theirs = (median(each[index] for each in rounds[name]) * 1000 for name in peers)
            print(f"{context:>8} {what:>8} {ours:>11.2f} {uncached:>12.2f} {theirs:>15.2f} {theirs / ours:>6.2f}")


def joined(decoder: Decoder) -> str:
    return "; ".join(f"{name}: {join.reason}" for name, join in decoder.joins.items())


if __name__ == "__main__":
    main()
