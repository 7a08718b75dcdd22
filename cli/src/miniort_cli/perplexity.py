"""`miniort perplexity`: how well a model foretells a text, and how much worse another one does."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from miniort_cli.options import providers_option

if TYPE_CHECKING:
    from miniort.generation import TextLikelihood, Tokenizer


@dataclass(frozen=True)
class _Measured:
    """A model, the ids that it was given, what it gives them, and how many bytes of the text these are."""

    model: str
    ids: list[int]
    likelihood: TextLikelihood
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.likelihood.nats / math.log(2) / self.bytes

    def figures(self) -> dict[str, float]:
        """By their names in the JSON object."""
        found = self.likelihood
        return {
            "tokens": found.tokens,
            "bytes": self.bytes,
            "nats_per_token": found.nats_per_token,
            "perplexity": found.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens_per_second": found.tokens / found.seconds,
        }


@click.command()
@click.argument("model")
@click.argument("text", type=click.Path(path_type=Path))
@click.option("--against", metavar="MODEL", help="A second model, such as the first one with smaller weights, to compare with.")
@click.option(
    "--window", type=click.IntRange(min=2), metavar="N", help="Tokens that the model sees at once.  [default: its context, up to 1024]"
)
@click.option(
    "--stride", type=click.IntRange(min=1), metavar="N", help="Tokens between the beginnings of two windows.  [default: half a window]"
)
@click.option("--max-tokens", type=click.IntRange(min=2), metavar="N", help="Only the first N tokens of the text.")
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json, vocab.json or GGUF file; without it, each model's own.")
@providers_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else.")
def perplexity(model: str, text: Path, against: str | None, as_json: bool, **options: Any) -> None:
    """Measure how well a model foretells a text.

    TEXT is a file. Each token is foretold from those before it, as far back as the model sees. The perplexity is how many tokens, equally
    likely, would be as hard to tell apart: the lower, the better. Bits per byte can be compared between models with different tokenizers.
    """
    from miniort_cli.tables import print_table

    content = _read(text)
    measured = [_measure(each, content, **options) for each in (model, against) if each is not None]
    same_tokens = len({tuple(each.ids) for each in measured}) == 1
    ratio = measured[1].likelihood.perplexity / measured[0].likelihood.perplexity if len(measured) > 1 and same_tokens else None
    if as_json:
        rows = [{"model": each.model, **{key: _finite(value) for key, value in each.figures().items()}} for each in measured]
        click.echo(json.dumps({**rows[0], **({"against": rows[1], "ratio": _finite(ratio)} if against else {})}, allow_nan=False))
        return
    labels = ("tokens", "bytes", "nats per token", "perplexity", "bits per byte", "tokens per second")
    columns = [list(each.figures().values()) for each in measured]
    rows_of_text = [
        (label, *(_format(value) for value in values)) for label, values in zip(labels, zip(*columns, strict=True), strict=True)
    ]
    print_table(("figure", *(each.model for each in measured)), rows_of_text, right=tuple(each.model for each in measured))
    if against is None:
        return
    if ratio is None:
        more = measured[1].bits_per_byte / measured[0].bits_per_byte - 1
        click.echo(f"the models split the text into different tokens; by bytes {against} needs {more:+.2%} bits")
    else:
        click.echo(f"perplexity of {against}: {ratio:.4f} times that of {model} ({ratio - 1:+.2%})")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise click.UsageError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path} must be UTF-8; byte {error.start} is not") from None


_LONGEST_WINDOW = 1024
"""The default where a model sees more: attention to all of a long context costs more than it tells."""


def _measure(
    model: str, text: str, *, tokenizer: str | None, providers: Any, window: int | None, stride: int | None, max_tokens: int | None
) -> _Measured:
    from miniort.generation import open_decoder, text_likelihood
    from miniort_models.tokenizer import open_tokenizer

    with closing(open_decoder(model, providers=providers)) as decoder:
        own = decoder.open_tokenizer() if tokenizer is None else open_tokenizer(Path(tokenizer))
        ids = own.encode(text)[:max_tokens]
        limit = decoder.context_length
        size = window or min(_LONGEST_WINDOW, limit or _LONGEST_WINDOW)
        found = text_likelihood(decoder, ids, window=size, stride=stride, progress=_shown(decoder.source.name, len(ids)))
        return _Measured(decoder.source.name, ids, found, _bytes_foretold(ids, own))


def _shown(model: str, tokens: int) -> Callable[[TextLikelihood], None] | None:
    """Shows on a terminal how far it is, on one line that's overwritten and gone at the end."""
    if not sys.stderr.isatty():
        return None

    def show(so_far: TextLikelihood) -> None:
        done = so_far.tokens + 1 == tokens
        text = f"{model}: {so_far.tokens + 1:,} of {tokens:,} tokens, perplexity {so_far.perplexity:,.4f}"
        click.echo("\r\x1b[K" + ("" if done else text), nl=False, err=True)

    return show


def _bytes_foretold(ids: list[int], tokenizer: Tokenizer) -> int:
    """Bytes of all tokens but the first, which nothing foretells; the first may be a special token without a text."""
    return len(tokenizer.decode(ids).encode()) - len(tokenizer.decode(ids[:1]).encode())


def _format(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
