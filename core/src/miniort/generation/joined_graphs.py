"""The graphs of a decoder, loaded, bound and joined to the cache when a session needs them, and what is known of them afterwards.

That is what a session keeps beside an optimised graph, as JSON: whoever opens the decoder the next time has no use for the graphs as they
were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from miniort.generation.binding import DecoderBinding, GraphBinding, bind_decoder
from miniort.generation.cache_axes import CacheAxes
from miniort.generation.cache_names import LayerNames
from miniort.generation.join import Join, join_cache
from miniort.generation.last_logits import ask_for_logits
from miniort.generation.merged import CACHE_BRANCH, is_merged, take_branch
from miniort.model.loading import load_model
from miniort.model.weights import WeightStore
from miniort.runtime.model_recipe import ModelRecipe
from miniort.types import DType, dtype_from_onnx, dtype_to_onnx

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class JoinedGraph:
    """What is known of a graph that was joined to the cache.

    graph: its binding as it is now. decoder: that of the whole decoder, as it was before. takes_first_logit: whether it's told which
    logits are wanted.
    """

    graph: GraphBinding
    decoder: DecoderBinding
    join: Join
    takes_first_logit: bool

    def as_notes(self) -> Mapping[str, Any]:
        """The same as JSON has it."""
        notes = asdict(self)
        bindings = [notes["graph"], notes["decoder"]["decode"], notes["decoder"]["prefill"]]
        for binding in bindings:
            if binding is not None:
                binding["dtypes"] = {name: dtype_to_onnx(dtype) for name, dtype in binding["dtypes"].items()}
        notes["decoder"]["dtype"] = dtype_to_onnx(self.decoder.dtype)
        found: Mapping[str, Any] = json.loads(json.dumps(notes))
        return found

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> JoinedGraph:
        """What `as_notes` gave."""
        decoder, join = notes["decoder"], notes["join"]
        return cls(
            graph=_binding(notes["graph"]),
            decoder=DecoderBinding(
                **{
                    **decoder,
                    "prefill": None if decoder["prefill"] is None else _binding(decoder["prefill"]),
                    "decode": _binding(decoder["decode"]),
                    "dtype": dtype_from_onnx(decoder["dtype"]),
                }
            ),
            join=Join(**{**join, "windows": tuple(join["windows"])}),
            takes_first_logit=notes["takes_first_logit"],
        )


def _binding(notes: Mapping[str, Any]) -> GraphBinding:
    return GraphBinding(
        **{
            **notes,
            "past": tuple(LayerNames(**layer) for layer in notes["past"]),
            "present": tuple(LayerNames(**layer) for layer in notes["present"]),
            "axes": CacheAxes(*(tuple(notes["axes"][kind]) for kind in ("key", "value"))),
            "dtypes": {name: dtype_from_onnx(dtype) for name, dtype in notes["dtypes"].items()},
            "shapes": {name: None if shape is None else tuple(shape) for name, shape in notes["shapes"].items()},
        }
    )


class DecoderGraphs:
    """The graphs of a decoder. Nothing is loaded before a recipe is made use of.

    paths: one file, or that for the prompt and that for each step. bindings: as for `Decoder`.
    """

    def __init__(self, paths: Sequence[Path], weights: WeightStore, bindings: Mapping[str, str]) -> None:
        self._paths = tuple(paths)
        self._weights = weights
        self._bindings = bindings

    def recipe(self, which: str, dtype: DType | None = None) -> ModelRecipe:
        """How PREFILL or DECODE is made; notes are `JoinedGraph`'s. dtype: what the cache is made of, None for what the graph says."""
        index = 0 if which == PREFILL else -1

        def make() -> tuple[ir.Model, Mapping[str, Any]]:
            models, binding = self._bound
            model = models[index]
            if dtype is not None:
                binding = replace(binding, dtype=dtype)
            graph = binding.prefill if which == PREFILL else binding.decode
            assert graph is not None
            join, graph = join_cache(model, graph, binding)
            return model, JoinedGraph(graph, binding, join, ask_for_logits(model, graph)).as_notes()

        what = json.dumps([which, sorted(self._bindings.items()), None if dtype is None else dtype.name])
        return ModelRecipe(make, self._paths, self._paths[index].parent, what)

    @cached_property
    def _bound(self) -> tuple[Sequence[ir.Model], DecoderBinding]:
        """The graphs as they're loaded, and their binding. A merged one gives two, for the prompt and for each step."""
        roles = dict(self._bindings)
        cache_branch = roles.get(CACHE_BRANCH, CACHE_BRANCH)
        models = [load_model(path, weights=self._weights) for path in self._paths]
        if len(models) == 1 and is_merged(models[0], cache_branch):
            models.append(load_model(self._paths[0], weights=self._weights))
            for model, cached in zip(models, (False, True), strict=True):
                take_branch(model, cached, cache_branch)
            roles.pop(CACHE_BRANCH, None)  # both branches are graphs of their own now
        return models, bind_decoder([model.graph for model in models], roles)
