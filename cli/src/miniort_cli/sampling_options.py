"""Options that say how tokens are chosen, the same for every command that generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from miniort_cli.options import NAMED, Named, parse_all_named, parse_named


@dataclass(frozen=True)
class Shortcut:
    """An option of the command that stands for a logits processor with one option of its own. `draws`: it's of use to sampling alone."""

    processor: str
    option: str
    type: type
    draws: bool
    help: str

    @property
    def flag(self) -> str:
        """Such as `--top-k`."""
        return "--" + self.processor.replace("_", "-")


SHORTCUTS = (
    Shortcut("temperature", "temperature", float, True, "Divide logits by it: below 1 surer, above 1 bolder."),
    Shortcut("top_k", "k", int, True, "Draw from the K likeliest tokens."),
    Shortcut("top_p", "p", float, True, "Draw from the likeliest tokens whose probabilities reach P."),
    Shortcut("min_p", "p", float, True, "Draw from tokens at least P times as likely as the likeliest."),
    Shortcut("typical_p", "p", float, True, "Draw from the most typical tokens whose probabilities reach P."),
    Shortcut("repetition_penalty", "penalty", float, False, "Make tokens that are in the text less likely, by a factor."),
    Shortcut("frequency_penalty", "penalty", float, False, "Lower tokens by how often they were generated."),
    Shortcut("presence_penalty", "penalty", float, False, "Lower tokens that were generated."),
    Shortcut("no_repeat_ngram", "size", int, False, "No run of that many tokens twice."),
    Shortcut("min_new_tokens", "count", int, False, "No end before so many tokens."),
)

_SAMPLER_HELP = "What chooses the next token.  [default: greedy; categorical with --temperature, --top-k, --top-p, --min-p or --typical-p]"


def sampler_option(command: Any) -> Any:
    """Adds `--sampler`."""
    return click.option("--sampler", metavar=NAMED, callback=parse_named, help=_SAMPLER_HELP)(command)


def processor_options(command: Any) -> Any:
    """Adds the shortcuts and `--processor`."""
    command = click.option(
        "--processor", "processors", callback=parse_all_named, multiple=True, metavar=NAMED, help="A logits processor; may be repeated."
    )(command)
    for shortcut in reversed(SHORTCUTS):
        metavar = "N" if shortcut.type is int else "X"
        command = click.option(shortcut.flag, shortcut.processor, type=shortcut.type, metavar=metavar, help=shortcut.help)(command)
    return command


def take_processors(chosen: dict[str, Any], more: list[Named]) -> tuple[list[Named], bool]:
    """The logits processors among the options, which are taken out, and `more`; and whether one of them is of use to sampling alone.

    UsageError if one is asked for twice.
    """
    given = {shortcut.processor: chosen.pop(shortcut.processor) for shortcut in SHORTCUTS}
    processors = [Named(each.processor, {each.option: given[each.processor]}) for each in SHORTCUTS if given[each.processor] is not None]
    processors += [*more, *chosen.pop("processors")]
    names = [processor.name for processor in processors]
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(f"the logits processor {name} is asked for twice")
    return processors, any(shortcut.draws and given[shortcut.processor] is not None for shortcut in SHORTCUTS)
