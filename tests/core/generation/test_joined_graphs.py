"""A decoder whose graphs were kept is as one whose graphs are loaded, bound, joined and optimised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from miniort.errors import BindingError
from miniort.generation import Decoder, Generator, generate, open_decoder
from miniort.generation import joined_graphs as module
from miniort.generation.joined_graphs import JoinedGraph

DECODERS = [
    "gpt2_optimum",
    "gpt2_optimum_legacy",
    "gpt2_optimum_legacy/decoder_model_merged.onnx",
    "gpt2_ort_convert_int8/model.onnx",
    "llama_optimum",
    "llama_genai_int4_asym/model.onnx",
    "qwen2_genai_int4/model.onnx",
]


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache that is turned on, and empty."""
    monkeypatch.setenv("MINIORT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MINIORT_GRAPH_CACHE_MB", raising=False)
    return tmp_path / "cache" / "graphs"


def no_loading(*arguments: Any, **options: Any) -> NoReturn:
    raise AssertionError("a graph is loaded, though it was kept")


def continued(decoder: Decoder) -> list[Any]:
    generator = Generator(decoder, decoder.new_cache(), decoder.new_sampler(), end_tokens=())
    generator.append_tokens(np.array([[5, 3, 8, 1]]))
    return [(step.ids.tolist(), step.logits.tobytes()) for step in generate(generator, 5)]


@pytest.mark.parametrize("name", DECODERS)
def test_the_second_time_nothing_is_loaded(data: Path, entries: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = data / "fixtures" / name
    first = open_decoder(path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "load_model", no_loading)
        kept = open_decoder(path)
    with monkeypatch.context() as patch:
        patch.setenv("MINIORT_GRAPH_CACHE_MB", "0")
        fresh = open_decoder(path)
    assert len(list(entries.iterdir())) == len(kept.sessions)
    for other in (first, fresh):
        assert continued(kept) == continued(other)
        assert (kept.binding, kept.joins, kept.cache_spec(2)) == (other.binding, other.joins, other.cache_spec(2))
        assert kept.takes_several_tokens == other.takes_several_tokens
        assert kept.padding_obstacle == other.padding_obstacle
        for mine, others in zip(kept.sessions.values(), other.sessions.values(), strict=True):
            assert mine.explain() == others.explain()
            assert [step.info for step in mine.plan.steps] == [step.info for step in others.plan.steps]


def test_bindings_tell_entries_apart(data: Path, entries: Path) -> None:
    path = data / "fixtures" / "gpt2_optimum"
    open_decoder(path)
    open_decoder(path, bindings={"mask": "attention_mask"})
    assert len(list(entries.iterdir())) == 2
    with pytest.raises(BindingError):
        open_decoder(path, bindings={"mask": "nothing"})


@pytest.mark.parametrize("name", DECODERS)
def test_notes_say_all_of_a_joined_graph(data: Path, name: str) -> None:
    for session in open_decoder(data / "fixtures" / name).sessions.values():
        joined = JoinedGraph.from_notes(session.notes)
        assert joined.as_notes() == session.notes
        assert JoinedGraph.from_notes(json.loads(json.dumps(joined.as_notes()))) == joined
        assert joined.decoder.layers == len(joined.decoder.decode.past)
