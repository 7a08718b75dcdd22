"""`miniort convert`: weights to a folder with ONNX graphs."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

DTYPES = ("f32", "f16", "bf16", "int8", "int4")


@click.command()
@click.argument("source", metavar="FOLDER|FILE.gguf|NAME")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", required=True, help="The folder to write; a new one.")
@click.option("--dtype", type=click.Choice(DTYPES), help="How weights are stored.  [default: as they are]")
@click.option("--opset", type=int, metavar="N", default=23, show_default=True, help="Of the graphs; lower ones run on older runtimes.")
@click.option("--all-logits", is_flag=True, help="Let the graph for prompts give logits for every token, not only for the last.")
@click.option("--force", is_flag=True, help="Replace a decoder that is in DIR already.")
def convert(source: str, output: Path, dtype: Any, opset: int, all_logits: bool, force: bool) -> None:
    """Make ONNX graphs of weights.

    The weights are a folder with config.json and safetensors, as Hugging Face has it, a GGUF file, pkg:NAME, or a model that was pulled.
    DIR gets prefill.onnx, decode.onnx, weights.bin, and copies of the tokenizer's files. int8 and int4 round weights: `miniort perplexity`
    shows what that costs.
    """
    from miniort_models.conversion import DECODE, PREFILL, WEIGHTS, check_target
    from miniort_models.convertible import find_weights, size_of, write_decoder
    from miniort_models.file_size import describe_size

    check_target(output, force)
    weights = find_weights(source)
    with _waiting(f"converting {source}"):
        write_decoder(weights, output, opset=opset, dtype=dtype, all_logits=all_logits, replace=force)
    sizes = ", ".join(f"{name} {describe_size((output / name).stat().st_size)}" for name in (PREFILL, DECODE, WEIGHTS))
    click.echo(f"{output}: {sizes} (the source has {describe_size(size_of(weights))})")
    click.echo(f"use it with --model {output}")


def _waiting(text: str) -> AbstractContextManager[object]:
    """Something that moves, on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)
