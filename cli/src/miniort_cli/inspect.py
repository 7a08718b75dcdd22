"""`miniort inspect`: what a model is, what its inputs mean, and what becomes of its graph."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click

from miniort.errors import BindingError, MiniortError
from miniort_cli.decoder_facts import DecoderFacts, describe_decoder
from miniort_cli.graph_facts import GraphFacts, read_facts
from miniort_cli.options import Providers, bind_option, providers_option

if TYPE_CHECKING:
    from miniort import InferenceSession
    from miniort.generation import DecoderSource
    from miniort.model.weights import WeightStore
    from miniort.plugins import PluginManager

LEVELS = ("none", "basic", "all")
"""Optimisation levels whose graphs are counted; the last is what a session uses by default."""


@dataclass(frozen=True)
class BuiltGraph:
    """One graph as sessions build it: ops by level, and of the last level which provider has how many of each op, and why some have none.

    `trouble` says why no session could be built.
    """

    ops: dict[str, dict[str, int]] = field(default_factory=dict)
    providers: dict[str, dict[str, int]] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    copies: int = 0
    trouble: str | None = None


@dataclass(frozen=True)
class Inspection:
    """All that is said of a model. `decoder` is None for what isn't one, and `not_a_decoder` says why."""

    model: str
    files: list[GraphFacts]
    decoder: DecoderFacts | None
    not_a_decoder: str | None
    graphs: dict[str, BuiltGraph]


@click.command()
@click.argument("model")
@providers_option
@bind_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else.")
def inspect(model: str, providers: Providers, bind: dict[str, str], as_json: bool) -> None:
    """Say what a model is: its inputs and outputs, weights, ops, and for a decoder what each input means.

    MODEL is a name, any ONNX file, or a folder with a decoder. Nothing of it is run but a decoder's graphs, for a few tokens.
    """
    found = inspect_model(model, providers, bind)
    if as_json:
        click.echo(json.dumps(_to_json(found), allow_nan=False))
        return
    from miniort_cli.inspect_report import print_inspection

    print_inspection(found)


def inspect_model(model: str, providers: Providers = "auto", bindings: dict[str, str] | None = None) -> Inspection:
    """Everything about a model. MiniortError if it isn't there, is damaged, or `bindings` don't fit."""
    from miniort.generation import find_source
    from miniort.model.weights import WeightStore
    from miniort.plugins import create_plugin_manager

    plugins, weights = create_plugin_manager(), WeightStore()
    source = find_source(model, plugins)
    files = [read_facts(path) for path in source.graphs]
    reason: str | None = None
    try:
        decoder, graphs = _open_decoder(source, providers, bindings or {}, weights, plugins)
    except BindingError as error:
        if bindings:
            raise
        decoder, reason = None, str(error)
        graphs = {path.name: _build(path, providers, weights, plugins) for path in source.graphs}
    return Inspection(source.name, files, decoder, reason, graphs)


def _open_decoder(
    source: DecoderSource, providers: Providers, bindings: dict[str, str], weights: WeightStore, plugins: PluginManager
) -> tuple[DecoderFacts, dict[str, BuiltGraph]]:
    """Its binding, and its graphs at each level. BindingError if it's no decoder."""
    from miniort import SessionOptions
    from miniort.generation import Decoder

    ops: dict[str, dict[str, dict[str, int]]] = {}
    for level in LEVELS:
        options = SessionOptions(graph_optimization_level=level)
        opened = Decoder(source, providers=providers, options=options, weights=weights, plugins=plugins, bindings=bindings)
        with closing(opened) as decoder:
            for name, session in decoder.sessions.items():
                ops.setdefault(name, {})[level] = _ops(session)
            if level == LEVELS[-1]:
                facts = describe_decoder(decoder)
                graphs = {name: _placed(session, ops[name]) for name, session in decoder.sessions.items()}
    return facts, graphs


def _build(path: Any, providers: Providers, weights: WeightStore, plugins: PluginManager) -> BuiltGraph:
    """A graph that's no decoder's, at each level; or why it can't be built."""
    from miniort import InferenceSession, SessionOptions

    ops: dict[str, dict[str, int]] = {}
    built = BuiltGraph()
    try:
        for level in LEVELS:
            options = SessionOptions(graph_optimization_level=level)
            with closing(InferenceSession(path, options, providers, weights=weights, plugins=plugins)) as session:
                ops[level] = _ops(session)
                built = _placed(session, ops)
    except MiniortError as error:
        from miniort.errors import ModelError, ProviderError

        if isinstance(error, ModelError | ProviderError) and not ops:
            raise  # a damaged file, or a provider that isn't there
        return BuiltGraph(ops, trouble=str(error))
    return built


def _ops(session: InferenceSession) -> dict[str, int]:
    counts = Counter(node.op for node in session.explain().nodes)
    return dict(counts.most_common())


def _placed(session: InferenceSession, ops: dict[str, dict[str, int]]) -> BuiltGraph:
    explanation = session.explain()
    providers: dict[str, Counter[str]] = {}
    unsupported: dict[str, str] = {}
    for node in explanation.nodes:
        if node.provider is None:
            unsupported[node.op] = "; ".join(f"{refusal.provider}: {refusal.reason}" for refusal in node.refusals)
        else:
            providers.setdefault(node.provider, Counter())[node.op] += 1
    return BuiltGraph(ops, {name: dict(counts.most_common()) for name, counts in providers.items()}, unsupported, len(explanation.copies))


def _to_json(found: Inspection) -> dict[str, Any]:
    return asdict(found)
