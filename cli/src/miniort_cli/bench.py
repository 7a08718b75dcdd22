"""`miniort bench`: how fast a decoder runs here, alone or beside onnxruntime on the same graphs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from statistics import median
from typing import TYPE_CHECKING

import click

from miniort.default_layout import DEFAULT_LAYOUT
from miniort_cli.options import NAMED, Named, Providers, bind_option, parse_named, providers_option

if TYPE_CHECKING:
    from miniort.generation import Decoder
    from miniort.types import IntArray
    from miniort_cli.onnxruntime_peer import OnnxRuntimePeer

DEFAULT_CONTEXTS = (16, 512, 1000)

PAUSE = 0.05
"""Seconds between two peers: a peer's threads spin for a while after their last work."""


@dataclass(frozen=True)
class Times:
    """Of one peer: milliseconds of a prompt with its first token, and of each token after it; medians over the rounds."""

    prefill_ms: float
    decode_ms: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class ContextResult:
    """At one context: miniort, and the peer if there's one."""

    context: int
    miniort: Times
    peer: Times | None

    @property
    def decode_ratio(self) -> float | None:
        """The peer's time of a step divided by miniort's: above 1, miniort is faster."""
        return None if self.peer is None else self.peer.decode_ms / self.miniort.decode_ms

    @property
    def prefill_ratio(self) -> float | None:
        """The same of the prompt."""
        return None if self.peer is None else self.peer.prefill_ms / self.miniort.prefill_ms

    @property
    def tokens_agree(self) -> bool | None:
        """Whether both chose the same tokens."""
        return None if self.peer is None else self.peer.tokens == self.miniort.tokens


def parse_contexts(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`"16,512"` -> `(16, 512)`."""
    if value is None:
        return None
    try:
        contexts = tuple(int(text) for text in value.split(","))
    except ValueError:
        contexts = (0,)
    if min(contexts) < 1:
        raise click.BadParameter(f"{value!r} isn't a list of numbers of tokens with commas between, such as 16,512", ctx, param)
    return contexts


@click.command()
@click.argument("model")
@click.option("--against", type=click.Choice(["onnxruntime"]), help="Run this on the same graphs as well, in turns.")
@click.option(
    "--contexts",
    callback=parse_contexts,
    metavar="N,N",
    help="Lengths of prompts, in tokens.  [default: those of 16, 512 and 1000 that the model has room for]",
)
@click.option("--new-tokens", type=click.IntRange(min=2), default=16, show_default=True, help="Tokens that follow each prompt.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="How often each is measured, after one to warm up."
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of each.  [default: the cores that this process may use]")
@click.option("--cache", callback=parse_named, default=DEFAULT_LAYOUT, show_default=True, metavar=NAMED, help="The cache's layout.")
@providers_option
@bind_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    model: str,
    against: str | None,
    contexts: Sequence[int] | None,
    new_tokens: int,
    rounds: int,
    threads: int | None,
    cache: Named,
    providers: Providers,
    bind: dict[str, str],
    as_json: bool,
) -> None:
    """Measure MODEL, a decoder: the time of prompts and of the tokens that follow, with random prompts and greedy tokens."""
    from miniort.generation import open_decoder
    from miniort.runtime.session import SessionOptions
    from miniort_cli.onnxruntime_peer import OnnxRuntimePeer

    started = time.perf_counter()
    with closing(open_decoder(model, providers=providers, options=SessionOptions(intra_op_num_threads=threads), bindings=bind)) as decoder:
        load_seconds = time.perf_counter() - started
        contexts = _contexts(contexts, new_tokens, decoder.context_length)
        started = time.perf_counter()
        peer = OnnxRuntimePeer(decoder, threads) if against else None
        peer_load_seconds = time.perf_counter() - started
        results = [_measure(decoder, cache, peer, context, new_tokens, rounds) for context in contexts]
    if as_json:
        rows = [
            {**asdict(each), "decode_ratio": each.decode_ratio, "prefill_ratio": each.prefill_ratio, "tokens_agree": each.tokens_agree}
            for each in results
        ]
        found: dict[str, object] = {"model": model, "against": against, "load_seconds": load_seconds, "results": rows}
        if peer is not None:
            found |= {"peer_version": peer.version, "peer_load_seconds": peer_load_seconds}
        click.echo(json.dumps(found))
        return
    _print(results, against)
    loaded = f"loaded in {load_seconds:.2f} s"
    click.echo(f"\n{loaded}{f'; {against} {peer.version} in {peer_load_seconds:.2f} s' if peer is not None else ''}")


def _contexts(asked: Sequence[int] | None, new_tokens: int, limit: int | None) -> Sequence[int]:
    """The contexts to measure. GenerationError for one that's asked for and that the model has no room for with the new tokens."""
    from miniort.errors import GenerationError

    if limit is None:
        return asked or DEFAULT_CONTEXTS
    most = limit + 1 - new_tokens  # the last new token isn't run any more
    if most < 1:
        raise GenerationError(f"{new_tokens} new tokens are more than the model's context of {limit}; give fewer --new-tokens")
    for context in asked or ():
        if context > most:
            raise GenerationError(
                f"{context} tokens and {new_tokens} new ones are more than the model's context of {limit}; "
                f"give --contexts of at most {most}, or fewer --new-tokens"
            )
    return asked or [context for context in DEFAULT_CONTEXTS if context <= most] or [most]


def _measure(decoder: Decoder, cache: Named, peer: OnnxRuntimePeer | None, context: int, new_tokens: int, rounds: int) -> ContextResult:
    import numpy as np

    prompt = np.random.default_rng(context).integers(0, decoder.vocabulary_size or 100, (1, context))
    runs: list[Callable[[IntArray], Iterator[int]]] = [lambda given: _continued(decoder, cache, given)]
    if peer is not None:
        runs.append(peer.tokens)
    found: list[list[tuple[list[float], tuple[int, ...]]]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for index, run in enumerate(runs):
            time.sleep(PAUSE)
            times, tokens = [time.perf_counter()], []
            for token in islice(run(prompt), new_tokens):
                times.append(time.perf_counter())
                tokens.append(token)
            if number:  # the first round warms up
                found[index].append(([later - earlier for earlier, later in pairwise(times)], tuple(tokens)))
    figures = [
        Times(
            median(steps[0] for steps, _ in each) * 1e3,
            median(step for steps, _ in each for step in steps[1:]) * 1e3,
            each[0][1],
        )
        for each in found
    ]
    return ContextResult(context, figures[0], figures[1] if peer is not None else None)


def _continued(decoder: Decoder, cache: Named, prompt: IntArray) -> Iterator[int]:
    from miniort.generation import Generator, generate

    generator = Generator(decoder, decoder.new_cache(cache.name, **cache.options), decoder.new_sampler(), end_tokens=())
    generator.append_tokens(prompt)
    for step in generate(generator):
        yield int(step.ids[0])


def _print(results: Sequence[ContextResult], against: str | None) -> None:
    from miniort_cli.tables import print_table

    columns = ["context", "prompt ms", "token ms"]
    rows = [[f"{each.context:,}", f"{each.miniort.prefill_ms:.1f}", f"{each.miniort.decode_ms:.2f}"] for each in results]
    if against:
        columns += [f"{against} prompt ms", f"{against} token ms", "prompt ratio", "token ratio", "same tokens"]
        for row, each in zip(rows, results, strict=True):
            assert each.peer is not None
            row += [f"{each.peer.prefill_ms:.1f}", f"{each.peer.decode_ms:.2f}", f"{each.prefill_ratio:.2f}", f"{each.decode_ratio:.2f}"]
            row.append("yes" if each.tokens_agree else "NO")
    print_table(columns, rows, right=columns)
    if against:
        click.echo(f"ratio: {against}'s time divided by miniort's; above 1, miniort is faster")
