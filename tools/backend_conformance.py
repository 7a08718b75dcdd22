"""Run the ONNX project's own backend tests on miniort, onnxruntime and onnx's reference evaluator, all by the same runner.

    uv run python tools/backend_conformance.py [--backends miniort,onnxruntime,reference] [--write]

`--write` renews docs/conformance.md. A test passes if the runner's own function returns; a backend that calls a model incompatible fails.
Each peer's suite runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import unittest
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "docs" / "conformance.md"

REASONS = {
    "test_bernoulli": "its random draws are unspecified: the recorded ones are those of one NumPy generator",
    "test_loop16_seq_none": (
        "the runner asks for the length of a sequence's element, and this one holds a scalar: no result can pass; ours is the recorded one"
    ),
    "test_attention_4d_causal_fp16_expanded": (
        "the recorded result is rounded to float16 at other places than the function body that the test runs says"
    ),
}
"""Why a test may fail, by the beginning of its name. A failure without a reason is a defect."""


@dataclass(frozen=True)
class Outcome:
    """What became of the suite: names of the tests that passed, and each failed one's error."""

    passed: tuple[str, ...]
    failed: dict[str, str]

    @property
    def total(self) -> int:
        return len(self.passed) + len(self.failed)


class ReferenceBackend:
    """onnx's reference evaluator as a backend."""

    @staticmethod
    def supports_device(device: str) -> bool:
        return device == "CPU"

    @staticmethod
    def is_compatible(model: Any, device: str = "CPU", **_: Any) -> bool:
        return True

    @staticmethod
    def prepare(model: Any, device: str = "CPU", **_: Any) -> Any:
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(model)

        class Prepared:
            @staticmethod
            def run(inputs: Any, **_: Any) -> Any:
                feeds = dict(zip(evaluator.input_names, inputs, strict=False)) if isinstance(inputs, list | tuple) else inputs
                return tuple(evaluator.run(None, feeds))

        return Prepared()


def backend_named(name: str) -> Any:
    """The backend of that name."""
    if name == "reference":
        return ReferenceBackend
    return importlib.import_module({"miniort": "miniort.backend", "onnxruntime": "onnxruntime.backend"}[name])


def run_suite(backend: Any) -> Outcome:
    """Every CPU test of the suite, one after the other, in this process."""
    import onnx.backend.test

    passed, failed = [], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite = onnx.backend.test.BackendTest(backend, __name__)
        items = {name: item for items in suite._test_items.values() for name, item in items.items() if name.endswith("_cpu")}
        for name, item in items.items():
            name = name.removesuffix("_cpu")
            try:
                item.func(unittest.TestCase())
                passed.append(name)
            except (Exception, unittest.SkipTest) as error:
                # Whatever a backend raises, the test has not passed.
                failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Outcome(tuple(passed), failed)


def run_in_process(name: str) -> Outcome:
    """The suite in a process of its own, so that a peer that crashes doesn't end the comparison."""
    done = subprocess.run([sys.executable, __file__, "--json", name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: the suite ended with status {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Outcome(tuple(found["passed"]), found["failed"])


def reason_for(name: str) -> str | None:
    """Why a test may fail; None for a defect."""
    return next((reason for prefix, reason in REASONS.items() if name.startswith(prefix)), None)


def versions() -> dict[str, str]:
    """Versions of the peers."""
    import onnx
    import onnxruntime

    return {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}


def document(outcomes: dict[str, Outcome]) -> str:
    """docs/conformance.md."""
    ours = outcomes["miniort"]
    labels = {"miniort": "miniort, `cpu` provider", "onnxruntime": f"onnxruntime {versions()['onnxruntime']}, CPU"}
    labels["reference"] = "onnx's reference evaluator"
    rows = [f"| {labels[name]} | {len(each.passed):,} | {len(each.failed):,} |" for name, each in outcomes.items()]
    failures = [f"| `{name}` | {reason_for(name) or 'a defect'} |" for name in sorted(ours.failed)]
    return "\n".join(
        [
            "# Conformance",
            "",
            f"The ONNX project's own backend tests, as onnx {versions()['onnx']} has them: {ours.total:,} tests on the CPU, run by its own",
            "runner (`onnx.backend.test.BackendTest`) over [`miniort.backend`](protocols/backend.md). This page is made by",
            "`uv run python tools/backend_conformance.py --write`; a test runs the suite again and compares.",
            "",
            "| runtime | passed | failed |",
            "|---|---|---|",
            *rows,
            "",
            "## What miniort doesn't pass",
            "",
            "| test | why |",
            "|---|---|",
            *failures,
            "",
            "## Beyond the suite",
            "",
            "The suite's node tests are of the newest version of each op. `tests/conformance/test_versions_sweep.py` runs every op of the",
            "default domain and of `ai.onnx.ml` at every schema version from opset 7 on, on cases drawn at random, against onnxruntime",
            "where that has the version and the reference evaluator otherwise. Where the two differ, the test says which one the",
            "specification contradicts, and why.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="miniort,onnxruntime,reference")
    parser.add_argument("--write", action="store_true", help="renew docs/conformance.md")
    parser.add_argument("--json", metavar="BACKEND", help="run one backend in this process and print its outcome")
    arguments = parser.parse_args()
    if arguments.json:
        outcome = run_suite(backend_named(arguments.json))
        print(json.dumps({"passed": outcome.passed, "failed": outcome.failed}))
        return
    outcomes = {name: run_in_process(name) for name in arguments.backends.split(",")}
    for name, outcome in outcomes.items():
        print(f"{name}: {len(outcome.passed)} of {outcome.total} pass")
    for name, error in outcomes.get("miniort", Outcome((), {})).failed.items():
        print(f"  {name}: {reason_for(name) or error}")
    if arguments.write:
        DOCUMENT.write_text(document(outcomes))


if __name__ == "__main__":
    main()
