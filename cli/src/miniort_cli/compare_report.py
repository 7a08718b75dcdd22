"""What `miniort compare` found: tables for people, one object for JSON, and the files of the node where two runs part."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from miniort.kernels import qualified_op
from miniort.runtime.comparison import Difference, Divergence, Search, statistics
from miniort_cli.tables import print_table


@dataclass(frozen=True)
class Contender:
    """One engine: who ran its nodes, the median seconds of a run, and how far each output is from the baseline's (whose own are empty)."""

    label: str
    placement: str
    seconds: float
    differences: Mapping[str, Difference]
    search: Search | None


@dataclass(frozen=True)
class Comparison:
    """One graph on all engines; `baseline` is the number of the one that the others were compared with."""

    path: Path
    feeds: Mapping[str, Any]
    contenders: Sequence[Contender]
    baseline: int

    @property
    def passed(self) -> bool:
        """Whether no output differs by more than the tolerance, nor any value where nodes were compared."""
        searches = [each.search for each in self.contenders if each.search is not None]
        outputs_pass = all(each.passed for contender in self.contenders for each in contender.differences.values())
        return outputs_pass and all(search.divergence is None for search in searches)


def print_comparison(comparison: Comparison) -> None:
    """Times, differences, and the searches."""
    base = comparison.contenders[comparison.baseline]
    rows = [
        (each.label, f"{each.seconds * 1000:.3f}", f"{base.seconds / each.seconds:.2f}", each.placement) for each in comparison.contenders
    ]
    shapes = ", ".join(f"{name} {list(np.shape(value))}" for name, value in comparison.feeds.items())
    click.echo(f"{comparison.path.name}: {_shortened(shapes)}")
    click.echo()
    print_table(("run by", "ms", "speed", "nodes"), rows, title=f"times; speed 1 is that of {base.label}", right=("ms", "speed"))
    click.echo()
    differences = [
        (each.label, name, scientific(apart.absolute), scientific(apart.relative), verdict(apart), _note(apart))
        for each in comparison.contenders
        for name, apart in each.differences.items()
    ]
    columns = ("run by", "output", "absolute", "relative", "result", "note")
    print_table(columns, differences, title=f"largest differences from {base.label}", right=("absolute", "relative"))
    for each in comparison.contenders:
        if each.search is not None:
            click.echo()
            _print_search(each, base, each.search)


def _shortened(text: str) -> str:
    return text if len(text) <= 240 else f"{text[:240]} …"


def _print_search(contender: Contender, base: Contender, search: Search) -> None:
    found = search.divergence
    if found is None:
        click.echo(f"{contender.label}: no node differs from {base.label}; {search.compared} values were compared")
        return
    node = found.node
    click.echo(
        f"{contender.label}: the first node that differs from {base.label} is {node.path!r} ({qualified_op(node.domain, node.op)}, on "
        f"{node.provider}); {found.agreed} values before it agree"
    )
    apart = found.difference
    click.echo(
        f"its output {found.output!r}: largest difference {scientific(apart.absolute)} absolute, {scientific(apart.relative)} relative"
        f"{_where(found)}"
    )
    rows = [_row("input", each.name, each.value, each.difference) for each in found.inputs if each.value is not None]
    rows += [_row("found", found.output, found.found, apart), _row("wanted", found.output, found.wanted, None)]
    columns = ("value", "name", "type", "shape", "least", "mean", "greatest", "nan", "inf", "difference")
    print_table(columns, rows, right=columns[4:])


def _where(found: Divergence) -> str:
    apart = found.difference
    if apart.note:
        return f" ({apart.note})"
    if isinstance(found.found, list):
        return ""
    pair = (np.asarray(found.found)[apart.place], np.asarray(found.wanted)[apart.place])
    return f", at {list(apart.place)}: found {pair[0]}, wanted {pair[1]}"


def _row(kind: str, name: str, value: Any, apart: Difference | None) -> tuple[str, ...]:
    difference = "-" if apart is None else scientific(apart.absolute)
    if isinstance(value, list):
        return kind, name, f"sequence of {len(value)}", "-", "-", "-", "-", "-", "-", difference
    found = statistics(value)
    numbers = ("-" if number is None else f"{number:.6g}" for number in (found.least, found.mean, found.greatest))
    return kind, name, found.dtype, str(list(found.shape)), *numbers, str(found.nans), str(found.infinities), difference


def _note(apart: Difference) -> str:
    return apart.note or ("" if apart.passed else f"at {list(apart.place)}")


def scientific(number: float) -> str:
    """`1.2e-05`; 0 as it is."""
    return "0" if number == 0 else f"{number:.1e}"


def verdict(apart: Difference) -> str:
    """`ok` or `DIFFERS`."""
    return "ok" if apart.passed else "DIFFERS"


def to_json(comparison: Comparison) -> dict[str, Any]:
    """All of it as values that JSON has; times in seconds, a number that isn't finite is null."""
    contenders = []
    for each in comparison.contenders:
        found: dict[str, Any] = {
            "run_by": each.label,
            "nodes": each.placement,
            "seconds": each.seconds,
            "differences": {name: asdict(apart) for name, apart in each.differences.items()},
        }
        if each.search is not None:
            divergence = each.search.divergence
            found["compared_values"] = each.search.compared
            found["divergence"] = None if divergence is None else _divergence_json(divergence)
        contenders.append(found)
    result: dict[str, Any] = _finite(
        {
            "model": str(comparison.path),
            "passed": comparison.passed,
            "baseline": comparison.contenders[comparison.baseline].label,
            "contenders": contenders,
        }
    )
    return result


def _divergence_json(found: Divergence) -> dict[str, Any]:
    node = found.node
    return {
        "node": node.path,
        "op": qualified_op(node.domain, node.op),
        "provider": node.provider,
        "output": found.output,
        "difference": asdict(found.difference),
        "agreed": found.agreed,
        "inputs": [
            {
                "name": each.name,
                "statistics": None if each.value is None or isinstance(each.value, list) else asdict(statistics(each.value)),
                "difference": None if each.difference is None else asdict(each.difference),
            }
            for each in found.inputs
        ],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_divergence(folder: Path, found: Divergence, model: Path) -> None:
    """Write the node's inputs, what was found and what was wanted as .npy, and `node.json` that says which file is which."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    values = [(f"input_{index}", each.name, each.value) for index, each in enumerate(found.inputs)]
    for stem, name, value in [*values, ("found", found.output, found.found), ("wanted", found.output, found.wanted)]:
        if value is None or isinstance(value, list):
            continue
        array = np.asarray(value)
        if array.dtype.kind == "V":
            array = array.astype(np.float32)  # .npy has no bfloat16; float32 holds all of its values
        np.save(folder / f"{stem}.npy", array)
        files[f"{stem}.npy"] = name
    described = {"model": str(model), **_finite(_divergence_json(found)), "files": files}
    (folder / "node.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
