"""What can only be seen on a machine with an NVIDIA card: run it there, `python tests/providers/cuda_device.py`, and keep its output.

It runs the provider kit and a generated kernel for every elementwise op, generates with every packaged decoder on every device layout and
with recorded steps, compares with the CPU's tokens, counts copies, and measures decode and prefill times against onnxruntime's CUDA
provider (where that is installed) and the card's own bandwidth. It takes less than six minutes, and ends with exit status 1 if anything is
wrong. It needs miniort-cuda with CuPy, onnxruntime, pytest and hypothesis.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import parser

from miniort import InferenceSession
from miniort.generation import Decoder, Generator, generate, open_decoder
from miniort.graph.elementwise_body import DOMAIN, FUSED_ELEMENTWISE
from miniort.plugins import PluginManager, create_plugin_manager
from miniort.providers import check_provider, list_providers
from miniort.runtime.comparison import difference
from miniort.testing.operators import NoOracleError, build_case, check_case, operator_versions
from miniort.types import dtype_from_onnx

LAYOUTS = ("static", "paged", "concat_bhtd")
FIXTURES = Path(__file__).resolve().parents[1] / "data" / "fixtures"
KIT_SECONDS = 120.0
PROMPT_LENGTHS = (8, 128)
DECODE_STEPS = 32
RECORDING = [("cuda", {"enable_cuda_graph": 1}), "cpu"]

Say = Callable[[str], None]


class Draws:
    """Draws from hypothesis strategies for a script: one example of each."""

    def __call__(self, strategy: Any) -> Any:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `example` is meant for looking at a strategy, as we do here
            return strategy.example()


def run_kit(plugins: PluginManager, providers: Sequence[str], ops: frozenset[str], seconds: float, say: Say) -> bool:
    """Cases of the provider's ops, newest versions first, for as long as there's time. Whether all gave what an oracle gives."""
    operators = [each for each in operator_versions() if each.domain == "" and each.op in ops]
    operators.sort(key=lambda each: -each.version)
    ran, wrong, end = 0, 0, time.monotonic() + seconds
    for operator in operators:
        if time.monotonic() > end:
            break
        try:
            check_case(build_case(Draws(), operator), operator, providers, plugins=plugins)
        except NoOracleError:
            continue
        except Exception as error:
            wrong += 1
            say(f"  WRONG {operator}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        ran += 1
    say(f"kit: {ran} of {len(operators)} ops and versions, {wrong} wrong")
    return wrong == 0


CHAINS = {
    "y = {op}(x)": (
        *("Abs", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Reciprocal", "Relu"),
        *("Round", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Swish", "Tanh"),
    ),
    "y = {op}(x, z)": ("Add", "Div", "Max", "Min", "Mul", "PRelu", "Pow", "Sub", "Sum"),
    "t = {op}(x, z)  y = Where(t, x, z)": ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
    "a = Less(x, z)  b = IsNaN(x)  t = {op}(a, b)  y = Where(t, x, z)": ("And", "Or", "Xor"),
    "a = Less(x, z)  t = Not(a)  y = Where(t, x, z)": ("Not",),
}
"""Chains by what they're written as, and the ops that each is tried with. A `Neg` comes behind all of them."""


def check_chains(plugins: PluginManager, ops: frozenset[str] | None, say: Say) -> bool:
    """Whether generated kernels give what the CPU gives: each elementwise op (or these), each float type, one operand repeated in rows."""
    ran, wrong = 0, 0
    for text, members in CHAINS.items():
        for op in (op for op in members if ops is None or op in ops):
            for kind in ("float", "float16", "bfloat16"):
                body = f"{text.format(op=op).replace('y =', 'r =')}  y = Neg(r)"
                model = parser.parse_model(
                    f'<ir_version: 10, opset_import: ["": 24]> g ({kind}[n, 1000] x, {kind}[1000] z) => ({kind}[n, 1000] y) {{ {body} }}'
                )
                ours, theirs = (InferenceSession(model, providers=each, plugins=plugins) for each in (["cuda", "cpu"], ["cpu"]))
                dtype = dtype_from_onnx(model.graph.input[0].type.tensor_type.elem_type)
                rng = np.random.default_rng(0)
                feeds = {name: rng.uniform(0.25, 2, shape).astype(dtype) for name, shape in (("x", (33, 1000)), ("z", (1000,)))}
                apart = difference(ours.run(None, feeds)[0], theirs.run(None, feeds)[0])
                fused = [node.op for node in ours.explain().nodes] == [f"{DOMAIN}.{FUSED_ELEMENTWISE}"]
                if not apart.passed or not fused:
                    wrong += 1
                    say(f"  WRONG {op} of {kind}: {apart if fused else 'it is in no chain'}")
                ran += 1
    say(f"chains: {ran} of one op and one type, {wrong} wrong")
    return wrong == 0


def greedy(decoder: Decoder, layout: str, prompt: np.ndarray, count: int) -> list[int]:
    """The likeliest tokens after a prompt [1, time]."""
    generator = Generator(decoder, decoder.new_cache(layout), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(prompt)
    return [int(step.ids[0]) for step in generate(generator, count)]


def check_decoders(plugins: PluginManager, folders: Sequence[Path], layouts: Sequence[str], count: int, say: Say) -> bool:
    """Whether each decoder gives the CPU's tokens on each layout, with two copies in a decode step."""
    right = True
    for folder in folders:
        prompt = np.random.default_rng(0).integers(0, 500, (1, 9))
        wanted = greedy(open_decoder(folder, providers=["cpu"], plugins=plugins), "concat_bhtd", prompt, count)
        decoder = open_decoder(folder, providers=["cuda", "cpu"], plugins=plugins)
        copies = list(decoder.sessions.values())[-1].explain().copies
        for layout in layouts:
            same = greedy(decoder, layout, prompt, count) == wanted
            right &= same and len(copies) == 2
            say(f"{folder.name}, {layout}: tokens {'as on the CPU' if same else 'DIFFER'}, {len(copies)} copies in a decode step")
    return right


def check_recorded_steps(plugins: PluginManager, folders: Sequence[Path], count: int, say: Say) -> bool:
    """Whether decoders give the CPU's tokens where steps are replayed as CUDA graphs, and some are. Says which aren't recorded, and why."""
    right, replayed = True, 0
    for folder in folders:
        prompt = np.random.default_rng(0).integers(0, 500, (1, 9))
        wanted = greedy(open_decoder(folder, providers=["cpu"], plugins=plugins), "static", prompt, count)
        decoder = open_decoder(folder, providers=RECORDING, plugins=plugins)
        same = greedy(decoder, "static", prompt, count) == wanted
        counts = decoder.replay_counts
        assert counts is not None
        right &= same
        replayed += counts.replayed
        how = f"{counts.replayed} of {count} steps replayed" if counts.recorded else f"not recorded: {counts.obstacle}"
        say(f"{folder.name}, as a CUDA graph: tokens {'as on the CPU' if same else 'DIFFER'}, {how}")
    return right and replayed > 0


def measure(decoder: Decoder, layout: str, lengths: Sequence[int], steps: int) -> Iterator[tuple[int, float, float]]:
    """For each prompt length: milliseconds to the first token, and the median of a decode step."""
    for length in lengths:
        prompt = np.random.default_rng(1).integers(0, 200, (1, length))
        greedy(decoder, layout, prompt, 3)
        generator = Generator(decoder, decoder.new_cache(layout), decoder.new_sampler("greedy"), end_tokens=())
        generator.append_tokens(prompt)
        marks = [time.perf_counter()]
        marks += [time.perf_counter() for _ in generate(generator, steps)]
        durations = np.diff(marks) * 1000
        yield length, float(durations[0]), statistics.median(durations[1:].tolist())


def measure_all(plugins: PluginManager, folder: str | Path, layouts: Sequence[str], lengths: Sequence[int], steps: int, say: Say) -> None:
    """Times on the device and on the CPU."""
    ways: dict[str, Any] = {"cuda": ["cuda", "cpu"], "cuda as a CUDA graph": RECORDING, "cpu": ["cpu"]}
    for way, providers in ways.items():
        decoder = open_decoder(folder, providers=providers, plugins=plugins)
        for layout in layouts if providers is not RECORDING else ("static",):
            for length, first, each in measure(decoder, layout, lengths, steps):
                say(f"{decoder.source.name}, {way}, {layout}: prompt of {length}: {first:.2f} ms, then {each:.3f} ms a token")
        weights = decoder.weights.nbytes
        memory = next(iter(decoder.sessions.values())).providers[0].provider.memory()
        say(f"  weights {weights:,} bytes; active {memory.active:,}, reserved {memory.reserved:,}, peak {memory.peak:,}")


def measure_onnxruntime(folder: Path, length: int, repeats: int, say: Say) -> None:
    """A prefill by onnxruntime's CUDA provider, where it's installed."""
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        say("onnxruntime: no CUDA provider here; pip install onnxruntime-gpu to compare")
        return
    from miniort.generation.decoder_feeds import StepSizes, decoder_feeds
    from miniort.model.loading import load_model

    path = folder / "model.onnx"
    feeds = decoder_feeds([load_model(path).graph], StepSizes(1, length, 0), 0)
    assert feeds is not None
    session = onnxruntime.InferenceSession(str(path), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        session.run(None, feeds[0])
        times.append((time.perf_counter() - start) * 1000)
    say(f"{folder.name}, onnxruntime CUDA: prefill of {length}: {statistics.median(times[2:]):.2f} ms")


def measure_bandwidth(say: Say) -> None:
    """How fast the card copies its own memory: what a decode step can't be faster than, for the bytes of its weights."""
    import cupy

    source = cupy.zeros(1 << 28, cupy.float32)
    target = cupy.empty_like(source)
    times = []
    for _ in range(5):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        target[...] = source
        cupy.cuda.Device().synchronize()
        times.append(time.perf_counter() - start)
    say(f"bandwidth: {2 * source.nbytes / min(times) / 1e9:.0f} GB/s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything. Exit status 0 if all is right, 1 if something is wrong, 2 without a card."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kit-seconds", type=float, default=KIT_SECONDS, help="how long the provider kit may take")
    chosen = options.parse_args(arguments)
    plugins = create_plugin_manager()
    info = list_providers(plugins).get("cuda")
    availability = None if info is None else check_provider(info)
    if availability is None or not availability.ok:
        print(f"no card to run on: {'miniort-cuda is not installed' if availability is None else availability.reason}")
        return 2
    from miniort_cuda.kernels import KERNELS

    print(availability.reason)
    start = time.monotonic()
    right = run_kit(plugins, ("cuda", "cpu"), frozenset(kernel.op for kernel in KERNELS if kernel.domain == ""), chosen.kit_seconds, print)
    right &= check_chains(plugins, None, print)
    folders = sorted(path for path in FIXTURES.iterdir() if path.is_dir())
    right &= check_decoders(plugins, folders, LAYOUTS, 16, print)
    right &= check_recorded_steps(plugins, folders, 16, print)
    measure_all(plugins, "demo", LAYOUTS, PROMPT_LENGTHS, DECODE_STEPS, print)
    measure_onnxruntime(FIXTURES / "llama_optimum", PROMPT_LENGTHS[0], 10, print)
    measure_bandwidth(print)
    print(f"{'all right' if right else 'SOMETHING IS WRONG'}, in {time.monotonic() - start:.0f} s")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
