"""`miniort chat`: a conversation at the terminal, or with what comes down a pipe."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from miniort.default_layout import DEFAULT_LAYOUT
from miniort.errors import MiniortError
from miniort_cli.options import NAMED, Named, bind_option, parse_named, providers_option
from miniort_cli.sampling_options import processor_options, sampler_option, take_processors

if TYPE_CHECKING:
    from miniort_cli.conversation import Conversation, Turn

DEFAULT_ANSWER = 1024

HELP = """\
/reset        forget the conversation
/system TEXT  tell the model TEXT before the conversation, from now on; without TEXT, show what it's told
/save FILE    write the conversation to FILE as JSON
/undo         take the last question and its answer back
/stats        how many tokens there are, and how fast they came
/help         this
/exit         end; so does Ctrl-D

A line that ends with \\ goes on in the next one. A message that begins with / is written with //. Ctrl-C stops an answer."""


@click.command()
@click.option("--model", metavar="NAME|PATH", required=True, help="A name, a file (ONNX, GGUF), a folder, or pkg:NAME.")
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json, vocab.json or GGUF file; without it, the model's own.")
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A Jinja template to write the conversation down with; without it, the model's own.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    default=DEFAULT_ANSWER,
    show_default=True,
    help="Stop an answer after that many tokens.",
)
@sampler_option
@processor_options
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="The same seed gives the same answers.")
@click.option("--cache", callback=parse_named, metavar=NAMED, help=f"How keys and values are kept.  [default: {DEFAULT_LAYOUT}]")
@providers_option
@click.option("--prefill-chunk", type=click.IntRange(min=1), metavar="N", help="Run a long message N tokens at a time.")
@bind_option
@click.pass_context
def chat(ctx: click.Context, /, system: str | None, max_new_tokens: int, **chosen: Any) -> None:
    """Talk with a model.

    Type a message and read the answer; /help lists commands. What was said stays in the cache, so each turn costs only what is new. Where
    standard input is no terminal, each of its lines is a message, and only answers are written to standard output.
    """
    processors, draws = take_processors(chosen, [])
    sampler = chosen.pop("sampler") or (Named("categorical") if draws else None)
    cache = chosen.pop("cache") or Named(DEFAULT_LAYOUT)

    from miniort_cli.conversation import Conversation
    from miniort_cli.decoder_setup import DecoderSetup, new_generator, open_from

    setup = DecoderSetup(sampler=sampler, processors=processors, cache=cache, bindings=chosen.pop("bind"), **chosen)
    with closing(open_from(setup)) as decoder:
        conversation = Conversation(decoder, lambda: new_generator(decoder, setup), system)
        _Chat(conversation, max_new_tokens, interactive=_is_terminal()).run()


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


class _End(Exception):
    """The user has had enough."""


@dataclass
class _Chat:
    """Reads messages and commands, and writes answers. interactive: somebody sits there, so an error ends no more than what it's about."""

    conversation: Conversation
    max_new_tokens: int
    interactive: bool

    def run(self) -> None:
        if self.interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  # gives `input` a history and a line to edit
            decoder = self.conversation.decoder
            limit = "" if decoder.context_length is None else f", a context of {decoder.context_length} tokens"
            _note(f"{decoder.source.name}{limit}. /help lists commands, Ctrl-D ends.")
        with suppress(_End):
            for message in self._messages():
                try:
                    self._take(message)
                except MiniortError as error:
                    if not self.interactive:
                        raise
                    _note(f"error: {' '.join(str(error).splitlines())}")

    def _messages(self) -> Iterator[str]:
        """What the user says, line by line; a line that ends with a backslash goes on in the next one."""
        lines: list[str] = []
        while True:
            try:
                line = self._read_line("… " if lines else "> ")
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                lines = []
                click.echo()
                _note("Ctrl-D or /exit ends the chat")
                continue
            if line is None:
                if lines:
                    yield "\n".join(lines)
                return
            if line.endswith("\\"):
                lines.append(line[:-1])
                continue
            message = "\n".join([*lines, line])
            lines = []
            if message.strip():
                yield message

    def _read_line(self, prompt: str) -> str | None:
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                click.echo()
                return None
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise click.UsageError(f"messages on standard input must be UTF-8; byte {error.start} is not") from None
        return line.rstrip("\r\n") if line else None

    def _take(self, message: str) -> None:
        if message.startswith("//"):
            self._answer(message[1:])
        elif message.startswith("/"):
            self._command(message)
        else:
            self._answer(message)

    def _answer(self, message: str) -> None:
        turns = self.conversation.turns
        before = len(turns)
        pieces = self.conversation.ask(message, self.max_new_tokens)
        try:
            with closing(pieces):
                for piece in pieces:
                    click.echo(piece, nl=False)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
        finally:
            click.echo()
        if len(turns) == before:  # it was stopped before the model saw the question
            _note("stopped")
        else:
            self._explain_end(turns[-1])

    def _explain_end(self, turn: Turn) -> None:
        """Say why an answer ended where the model didn't end it."""
        if turn.finish_reason == "length":
            _note(f"stopped after {turn.new_tokens} tokens; --max-new-tokens sets how many")
        elif turn.finish_reason == "context":
            _note(f"the model's context of {self.conversation.decoder.context_length} tokens is full; /reset begins a new conversation")
        elif turn.finish_reason == "interrupted":
            _note("stopped")

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "reset": self._reset,
            "system": self._system,
            "save": self._save,
            "undo": lambda _: self.conversation.forget_last(),
            "stats": self._statistics,
            "help": lambda _: _note(HELP),
            "exit": _end,
            "quit": _end,
        }
        command = commands.get(name.strip())
        if command is None:
            raise ChatCommandError(f"there is no command /{name}; /help lists those that there are, and // begins a message with a slash")
        command(rest.strip())

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        if self.interactive:
            _note("forgotten")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = text
        else:
            _note(self.conversation.system or "nothing of yours; the template may say something by itself")

    def _save(self, text: str) -> None:
        names = _split(text)
        if len(names) != 1:
            raise ChatCommandError("/save wants the name of one file, in quotes if there's a space in it")
        path = Path(names[0]).expanduser()
        content = {"model": self.conversation.decoder.source.name, "messages": self.conversation.messages}
        try:
            path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ChatCommandError(f"{path} can't be written: {error.strerror}") from None
        if self.interactive:
            _note(f"written to {path}")

    def _statistics(self, _: str) -> None:
        turns = self.conversation.turns
        if not turns:
            _note("nothing was asked yet")
            return
        last = turns[-1]
        generating = last.seconds - (last.first_token_seconds or 0)
        rate = f", {(last.new_tokens - 1) / generating:.1f} a second" if last.new_tokens > 1 and generating > 0 else ""
        first = "" if last.first_token_seconds is None else f", the first after {last.first_token_seconds:.2f} s"
        limit = self.conversation.decoder.context_length
        used = last.tokens + last.new_tokens
        _note(f"asked with {last.tokens} tokens, {last.reused} of them from the cache; answered with {last.new_tokens}{first}{rate}")
        _note(f"{used} tokens of {limit if limit is not None else 'an unknown number'} in the context after {len(turns)} answers")


class ChatCommandError(MiniortError):
    """A command of the chat can't be done."""


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ChatCommandError(f"{text}: {error}") from None


def _end(_: str) -> None:
    raise _End


def _note(text: str) -> None:
    """Something that isn't the model's."""
    click.secho(text, err=True, dim=True)
