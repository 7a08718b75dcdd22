"""What raising makes of decoders that exporters wrote: the table in docs/raising.md.

Usage: python tools/raising_table.py FOLDER   (prints a Markdown table of every .onnx file in it, and in its folders)
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from miniort.runtime.optimise import optimise_model

NORMALIZATIONS = frozenset(
    {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
)
RAISED = ("Attention", "LayerNormalization", "RMSNormalization", "RotaryEmbedding", "Gelu", "Swish")
LONG_FORMS = frozenset(
    {"Softmax", "IsNaN", "Where", "Erf", "Tanh", "Sigmoid", "Exp", "Pow", "Sqrt", "Reciprocal", "Div", "ReduceMean", "ReduceSum", "Neg"}
    | {"Sin", "Cos", "Expand", "Tile", "Trilu", "Shape", "Size", "Range", "ConstantOfShape", "Einsum"}
)
"""What the long forms of raised ops are made of."""
HEADER = "| file | nodes | after | raised | left in layers |\n|---|---:|---:|---|---|"


@dataclass(frozen=True)
class Row:
    """One model: its nodes before and after, the raised ops that it has then, and what raising should have removed inside layers."""

    name: str
    before: int
    after: int
    raised: Counter[str]
    left: Counter[str]

    def __str__(self) -> str:
        raised = ", ".join(f"{self.raised[op]} {op}" for op in RAISED if self.raised[op]) or "–"
        left = ", ".join(f"{count} {op}" for op, count in sorted(self.left.items())) or "none"
        return f"| {self.name} | {self.before} | {self.after} | {raised} | {left} |"


def row(path: Path, name: str) -> Row:
    """The row of one file."""
    optimised = optimise_model(path, providers=["cpu"])
    nodes = list(ir.traversal.RecursiveGraphIterator(optimised.model.graph))
    raised = Counter(node.op_type for node in nodes if node.domain == "" and node.op_type in RAISED)
    return Row(name, optimised.nodes_before, optimised.nodes_after, raised, Counter(_left(nodes)))


def _left(nodes: list[ir.Node]) -> Iterator[str]:
    """The ops behind a first normalisation that are parts of long forms, or compute whole numbers."""
    inside: set[ir.Value | None] = set()
    for node in nodes:
        if node.op_type in NORMALIZATIONS or any(value in inside for value in node.inputs):
            inside.update(node.outputs)
            whole = node.outputs[0].dtype == ir.DataType.INT64
            if node.domain == "" and (node.op_type in LONG_FORMS or whole):
                yield node.op_type


def rows(folder: Path) -> Iterator[Row]:
    """A row for each model in a folder and in its folders, by name."""
    for path in sorted(folder.rglob("*.onnx")):
        name = path.relative_to(folder).as_posix().removesuffix(".onnx").removesuffix("/model")
        yield row(path, name)


def main() -> None:
    """Print the table."""
    print(HEADER)
    for each in rows(Path(sys.argv[1])):
        print(each)


if __name__ == "__main__":
    main()
