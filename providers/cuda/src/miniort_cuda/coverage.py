"""The list of ops that the provider has, as the table in `docs/cuda.md`: printed by `python -m miniort_cuda.coverage`."""

from __future__ import annotations

from miniort.kernels import Kernel, qualified_op
from miniort_cuda.kernels import FAMILIES


def table() -> str:
    """A row for each family: its ops, each with the schema versions that it covers where those aren't all from the first."""
    lines = ["| family | ops |", "|---|---|"]
    for family, kernels in FAMILIES.items():
        by_op: dict[str, list[Kernel]] = {}
        for kernel in kernels:
            by_op.setdefault(qualified_op(kernel.domain, kernel.op), []).append(kernel)
        ops = ", ".join(f"{op} {_versions(found)}" for op, found in sorted(by_op.items(), key=lambda item: item[0].lower()))
        lines.append(f"| {family} | {ops} |")
    return "\n".join(lines) + "\n"


def _versions(kernels: list[Kernel]) -> str:
    """The versions that kernels of one op cover between them: `7+`, or `9-10`."""
    first = min(kernel.since for kernel in kernels)
    last = None if any(kernel.until is None for kernel in kernels) else max(kernel.until or 0 for kernel in kernels)
    return f"{first}+" if last is None else f"{first}" if first == last else f"{first}-{last}"


if __name__ == "__main__":
    print(table(), end="")
