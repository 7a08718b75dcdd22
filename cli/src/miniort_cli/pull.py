"""`miniort pull`: a model from the hub, once, so that it opens by its name from then on."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from miniort_cli.convert import DTYPES

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@click.command()
@click.argument("name", metavar="OWNER/NAME")
@click.option("--revision", metavar="REVISION", default="main", show_default=True, help="A branch, a tag or a commit.")
@click.option("--file", metavar="FILE", help="The GGUF or ONNX file to take, where there are several. A part of its name is enough.")
@click.option("--onnx", is_flag=True, help="Take the ONNX graphs, even if there are safetensors.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="How the weights of graphs that are made here are stored.  [default: as they come]"
)
def pull(name: str, revision: str, file: str | None, onnx: bool, dtype: Any) -> None:
    """Get a model from the Hugging Face hub.

    From then on `--model OWNER/NAME` opens it, without the network. Safetensors are taken if there are any, else ONNX graphs, else a GGUF
    file; pickles never. Weights become ONNX graphs here. A download that was cut goes on where it stopped, with the same command.
    """
    from miniort_models.file_size import describe_size
    from miniort_models.pull import pull as pull_model

    with _watcher(name) as watcher:
        pulled = pull_model(name, revision=revision, file=file, onnx=onnx, dtype=dtype, watcher=watcher)
    model = pulled.model
    at = f"{model.revision} ({model.commit[:12]})" if model.revision != model.commit else model.commit[:12]
    if pulled.changed:
        click.echo(f"{name} is here: {describe_size(model.size)}, {at} of {model.endpoint}")
        click.echo(f"use it with --model {name}")
    else:
        click.echo(f"{name} was here already: {describe_size(model.size)}, {at} of {model.endpoint}")


def _watcher(name: str) -> AbstractContextManager[SilentWatcher]:
    """A progress bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        return nullcontext(SilentWatcher(name))
    return BarWatcher(name)


class SilentWatcher:
    """Says only what explains a long wait."""

    def __init__(self, name: str) -> None:
        self.name = name

    def waiting(self) -> None:
        """Another process pulls the same model."""
        click.echo(f"another process is pulling {self.name}; waiting for it", err=True)

    def planned(self, size: int) -> None:
        """How many bytes there will be."""

    def received(self, count: int) -> None:
        """How many have come."""

    def converting(self) -> None:
        """All have come."""


class BarWatcher(SilentWatcher):
    """Shows bytes, rate and the time that is left, on standard error."""

    def __enter__(self) -> BarWatcher:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress: Progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task: TaskID = self._progress.add_task(f"looking up {self.name}", total=None)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def planned(self, size: int) -> None:
        """How many bytes there will be."""
        self._progress.update(self._task, total=size, description=self.name)

    def received(self, count: int) -> None:
        """How many have come."""
        self._progress.advance(self._task, count)

    def converting(self) -> None:
        """All have come."""
        self._progress.update(self._task, description=f"{self.name}: making graphs", total=None)
