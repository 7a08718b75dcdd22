"""How long miniort takes for real models, compared with onnxruntime on as many threads and, if asked for, onnx.reference.

The runtimes take turns, round by round, and the median of each counts, so that what else the machine does hits all of them alike. The last
ratio is that of the fastest runs, which on a busy machine says more.

    python benchmarks/vision.py                            # every model; downloads some wheels once
    python benchmarks/vision.py light_resnet50 ddddocr_det --rounds 20
    python benchmarks/vision.py --providers numba,cpu
    python benchmarks/vision.py --list
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from vision_models import MODELS, Feed, RealModel


def main() -> None:
    """Measure the models that were asked for, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of models; all of them if none is given")
    parser.add_argument("--rounds", type=int, default=11, help="how often each runtime runs each model (default 11)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each runtime (default 2)")
    parser.add_argument("--providers", default="cpu", help="miniort's providers, in the order in which they're asked (default cpu)")
    parser.add_argument("--reference", action="store_true", help="measure onnx.reference too, in one round: it's slow")
    parser.add_argument("--list", action="store_true", help="print the models' names and leave")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(MODELS))
        return
    if unknown := [name for name in arguments.models if name not in MODELS]:
        parser.error(f"no model is called {', '.join(unknown)}; --list prints all names")
    reference = f"{'reference':>14}{'ratio':>8}" if arguments.reference else ""
    print(f"{'model':<22}{'miniort':>12}{'onnxruntime':>14}{'ratio':>8}{'fastest':>9}{reference}")
    for name in arguments.models or MODELS:
        print(measured(MODELS[name], arguments), flush=True)


def measured(model: RealModel, arguments: argparse.Namespace) -> str:
    """One line: the median of each runtime in milliseconds, miniort's as a multiple of onnxruntime's, and that of their fastest runs."""
    feed = model.feed(np.random.default_rng(0))
    runs = {
        "miniort": open_miniort(model, feed, arguments.threads, arguments.providers.split(",")),
        "onnxruntime": open_onnxruntime(model, feed, arguments.threads),
    }
    for run in runs.values():
        run()  # what is allocated or tuned once isn't measured
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            time.sleep(0.2)  # the peer's threads spin for a while after their last work, OpenBLAS's for 0.1 s
            run()  # and this one's have to wake up
            times[name].append(seconds(run))
    ours, theirs = (median(times[name]) * 1e3 for name in ("miniort", "onnxruntime"))
    fastest = min(times["miniort"]) / min(times["onnxruntime"])
    line = f"{model.name:<22}{ours:>9.2f} ms{theirs:>11.2f} ms{ours / theirs:>8.2f}{fastest:>9.2f}"
    if arguments.reference:
        try:
            reference = seconds(open_reference(model, feed)) * 1e3
        except Exception as error:  # whatever it can't do, the line says so
            return f"{line}  onnx.reference: {type(error).__name__}"
        line += f"{reference:>11.1f} ms{ours / reference:>8.4f}"
    return line


def seconds(run: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def open_miniort(model: RealModel, feed: Feed, threads: int, providers: list[str]) -> Callable[[], Any]:
    """A run of the model by miniort."""
    from miniort import InferenceSession, SessionOptions

    session = InferenceSession(model.path(), SessionOptions(intra_op_num_threads=threads), providers=providers)
    return lambda: session.run(None, feed)


def open_onnxruntime(model: RealModel, feed: Feed, threads: int) -> Callable[[], Any]:
    """A run of the model by onnxruntime, with all of its optimizations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(model.path()), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feed)


def open_reference(model: RealModel, feed: Feed) -> Callable[[], Any]:
    """A run of the model by the ONNX project's reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(model.path()))
    return lambda: evaluator.run(None, feed)


if __name__ == "__main__":
    main()
