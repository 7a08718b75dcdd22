"""A model after the graph passes, to look at or to write to a file that any runtime loads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from miniort.errors import ModelError
from miniort.graph.passes import Change
from miniort.model.loading import ModelLike, all_nodes, load_model
from miniort.model.plain_form import MAP_TYPES
from miniort.model.schemas import schema_version
from miniort.plugins import PluginManager
from miniort.runtime.session import InferenceSession, SessionOptions

INLINE_LIMIT = 1 << 30
"""Bytes of weights up to which they're kept in the model's own file, whose format ends at 2 GiB."""
_SMALLEST_EXTERNAL = 1024


@dataclass(frozen=True)
class OptimisedModel:
    """What passes made of a model. `model` is onnx-ir's, `changes` says what each pass did and why, in order.

    nodes_before, nodes_after: of the graph and all that lies in it, functions not among them.
    """

    model: ir.Model
    changes: Sequence[Change]
    nodes_before: int
    nodes_after: int

    @property
    def opsets(self) -> Mapping[str, int]:
        """The opsets that the model imports, by domain."""
        return dict(self.model.opset_imports)

    def save(self, path: str | os.PathLike[str], *, external_data: bool | None = None) -> Sequence[Path]:
        """Write the model to a file, and give the files that were written.

        external_data: keep weights in a file of their own beside it, called as the model's and `.data`; None for only where there are more
        than 1 GiB of them. ModelError if the folder isn't there or the model has what ONNX can't say; nothing half-written stays.
        """
        target = Path(path).absolute()
        if not target.parent.is_dir():
            raise ModelError(f"{target}: there is no folder {target.parent}; make it first")
        self._check_form(target)
        weights = sum(value.const_value.nbytes for graph in self.model.graphs() for value in graph.initializers.values()
                      if value.const_value is not None)  # fmt: skip
        apart = weights > INLINE_LIMIT if external_data is None else external_data
        data = f"{target.name}.data"
        names = [data, target.name] if apart else [target.name]
        try:
            with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
                ir.save(
                    self.model,
                    Path(folder) / target.name,
                    format="protobuf",
                    external_data=data if apart else None,
                    size_threshold_bytes=_SMALLEST_EXTERNAL,
                )
                written = [name for name in names if (Path(folder) / name).exists()]
                for name in written:
                    os.replace(Path(folder) / name, target.parent / name)
        except OSError as error:
            raise ModelError(f"{target}: can't be written ({error.strerror or error})") from error
        return [target.parent / name for name in written]

    def _check_form(self, target: Path) -> None:
        if self.model.meta.get(MAP_TYPES):
            raise ModelError(f"{target}: the model has outputs that are maps, which can't be written again; keep its own file")
        for node in all_nodes(self.model):
            imported = self.model.opset_imports.get(node.domain, 0)
            if node.version is None or schema_version(node.op_type, node.domain, node.version) == schema_version(
                node.op_type, node.domain, imported
            ):
                continue
            raise ModelError(
                f"{target}: node {node.name!r} is a {node.op_type} of opset {node.version}, and the model imports opset {imported}, which "
                "has another one; the level 'extended' writes all nodes in one opset where that can be"
            )


def optimise_model(
    model: ModelLike,
    level: str = "extended",
    *,
    providers: str | Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
    base_dir: str | os.PathLike[str] | None = None,
    plugins: PluginManager | None = None,
) -> OptimisedModel:
    """Run the passes that a session of this level would run, and give the graph that it would compile.

    model, base_dir: as for `InferenceSession`; an onnx-ir model is changed in place. level: `none`, `basic`, `extended` or
    `all`, which may make ops that only miniort has.
    providers: whose ops passes may make, as for `InferenceSession`. Raises what building a session raises.
    """
    loaded = load_model(model, base_dir)
    before = _count(loaded)
    session = InferenceSession(loaded, SessionOptions(level), providers, plugins=plugins)
    optimised = session.model
    used = {node.domain for node in all_nodes(optimised)}
    for domain in [domain for domain in optimised.opset_imports if domain not in used and domain]:
        del optimised.opset_imports[domain]
    return OptimisedModel(optimised, session.changes, before, _count(optimised))


def _count(model: ir.Model) -> int:
    return sum(1 for _ in ir.traversal.RecursiveGraphIterator(model.graph))
