"""The usual loop over onnxruntime on a decoder's own graphs: each step's presents are fed back as the next one's past."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from miniort.errors import PluginError
from miniort.generation.join import Join
from miniort.generation.step_feeds import Step, past_feeds, step_feeds
from miniort.types import IntArray

if TYPE_CHECKING:
    from miniort.generation import Decoder
    from miniort.generation.binding import GraphBinding

_AS_EXPORTED = Join(False, "onnxruntime runs the graphs as they are")


class OnnxRuntimePeer:
    """Continues one prompt greedily. PluginError if onnxruntime isn't installed, or can't open or run the graphs.

    threads: as for a session; None for onnxruntime's own default.
    """

    def __init__(self, decoder: Decoder, threads: int | None) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise PluginError("onnxruntime isn't installed, so there's nothing to measure against: pip install onnxruntime") from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads:
            options.intra_op_num_threads = threads
        self.version: str = onnxruntime.__version__
        self._binding = decoder.binding
        try:
            self._sessions = [
                onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]) for path in decoder.source.graphs
            ]
        except Exception as error:
            raise _failed("open", error) from error
        merged = len(self._sessions) == 1 and self._binding.prefill is not None
        self._choice = next((each.name for each in self._sessions[0].get_inputs() if each.type == "tensor(bool)"), None) if merged else None

    def tokens(self, prompt: IntArray) -> Iterator[int]:
        """The ids that follow a prompt, [1, time], without end."""
        binding, tokens, total = self._binding, prompt, prompt.shape[1]
        graph, session = binding.prefill or binding.decode, self._sessions[0]
        past = self._empty_past(binding.decode if self._choice else graph)
        while True:
            new = tokens.shape[1]
            step = Step(tokens, np.arange(total - new, total)[None], np.ones((1, total), np.int64), np.arange(total), every_logit=False)
            shape = (1, binding.kv_heads, total - new, binding.head_dim)
            feeds = step_feeds(graph, _AS_EXPORTED, step, None, shape)  # type: ignore[arg-type]  # nothing appends, so there's no cache
            if self._choice:
                feeds[self._choice] = np.array([graph is binding.decode])
            try:
                found = session.run(None, {**feeds, **past})
            except Exception as error:
                raise _failed("run", error) from error
            outputs = dict(zip([each.name for each in session.get_outputs()], found, strict=True))
            logits = outputs[graph.logits]
            token = int((logits[0, -1] if logits.ndim == 3 else logits[0]).argmax())
            yield token
            past = {}
            for old, present in zip(binding.decode.past, graph.present, strict=True):
                past[old.key] = outputs[present.key]
                past[old.value] = outputs[present.value]
            graph, session = binding.decode, self._sessions[-1]
            tokens, total = np.array([[token]]), total + 1

    def _empty_past(self, graph: GraphBinding) -> dict[str, Any]:
        """A past without tokens, of the types that the graph itself takes."""
        binding, found = self._binding, dict[str, Any]()
        for names in graph.past:
            key, value = (
                np.zeros((1, binding.kv_heads, 0, size), graph.dtypes[names.key]) for size in (binding.head_dim, binding.value_head_dim)
            )
            found |= past_feeds(replace(graph, past=(names,)), [(key, value)])
        return found


def _failed(what: str, error: Exception) -> PluginError:
    """onnxruntime raises classes of its own that aren't public."""
    return PluginError(f"onnxruntime can't {what} the model's graphs: {str(error).splitlines()[0]}")
