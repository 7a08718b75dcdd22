"""`miniort generate`: a decoder goes on from a prompt, and its text is shown as it comes."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from miniort.default_layout import DEFAULT_LAYOUT
from miniort_cli.group import INTERRUPTED
from miniort_cli.options import NAMED, Named, bind_option, check_folder, parse_named, providers_option
from miniort_cli.sampling_options import processor_options, sampler_option, take_processors

if TYPE_CHECKING:
    from miniort_cli.run import Run, Setup


def _read_schema(ctx: click.Context, param: click.Parameter, path: Path | None) -> Any:
    """The JSON schema in a file."""
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.BadParameter(f"{path} can't be read: {error.strerror}", ctx, param) from None
    except ValueError as error:
        raise click.BadParameter(f"{path} is no JSON: {error}", ctx, param) from None


def _read_prompts(ctx: click.Context, param: click.Parameter, path: Path | None) -> list[str] | None:
    """The lines of a file that aren't blank."""
    if path is None:
        return None
    try:
        prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise click.BadParameter(f"{path} can't be read: {error.strerror}", ctx, param) from None
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{path} must be UTF-8; byte {error.start} is not", ctx, param) from None
    if not prompts:
        raise click.BadParameter(f"{path} has no prompt in it", ctx, param)
    return prompts


@click.command()
@click.argument("prompt", required=False)
@click.option("--model", metavar="NAME|PATH", default="demo", show_default=True, help="A name, a file (ONNX, GGUF), a folder, or pkg:NAME.")
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json, vocab.json or GGUF file; without it, the model's own.")
@click.option("--batch", callback=_read_prompts, type=click.Path(path_type=Path), metavar="FILE", help="Prompts, one a line, all at once.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=0), metavar="N", default=100, show_default=True, help="Stop after that many tokens."
)
@click.option("--max-length", type=click.IntRange(min=1), metavar="N", help="Stop at that many tokens with the prompt.")
@click.option("--stop", "stops", multiple=True, metavar="TEXT", help="Stop before that text; may be repeated.")
@click.option(
    "--stop-token",
    "stop_tokens",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="ID",
    help="A token that ends the text; may be repeated.",
)
@sampler_option
@click.option("--num-beams", type=click.IntRange(min=1), metavar="N", help="Search for the likeliest text with N beams.")
@processor_options
@click.option(
    "--json-schema", callback=_read_schema, type=click.Path(path_type=Path), metavar="FILE", help="Write only JSON of that schema."
)
@click.option("--regex", metavar="RE", help="Write only text that the regular expression matches.")
@click.option("--choices", metavar="A,B,…", help="Write one of these texts.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="The same seed gives the same text.")
@click.option("-n", "--continuations", type=click.IntRange(min=1), metavar="N", default=1, help="Write on N times from each prompt.")
@click.option("--prompt-lookup", type=click.IntRange(min=1), metavar="N", help="Guess up to N tokens at once out of the text so far.")
@click.option("--cache", callback=parse_named, metavar=NAMED, help=f"How keys and values are kept.  [default: {DEFAULT_LAYOUT}]")
@click.option("--no-replay", "replay", flag_value=False, default=True, help="Run each step anew, in place of replaying what it calls.")
@click.option("--no-cache", is_flag=True, help="Recompute the whole history in every step: slow, to compare with.")
@click.option(
    "--save-cache", callback=check_folder, type=click.Path(path_type=Path), metavar="FILE", help="Write the cache to a file at the end."
)
@click.option("--load-cache", type=click.Path(path_type=Path), metavar="FILE", help="Don't compute again what a saved cache begins with.")
@providers_option
@click.option("--prefill-chunk", type=click.IntRange(min=1), metavar="N", help="Run a long prompt N tokens at a time.")
@bind_option
@click.option("--top-k-print", type=click.IntRange(min=1), metavar="K", help="Show the K likeliest tokens before each one that is chosen.")
@click.option("--logprobs", type=click.IntRange(min=0), metavar="N", help="Show log-probabilities of each token and the N likeliest.")
@click.option("--chat", "as_chat", is_flag=True, help="Ask: the prompt is a user's message, and only the answer is written.")
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation, with --chat.")
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A Jinja template to write the conversation down with; without it, the model's own.",
)
@click.option("--stats", is_flag=True, help="Show time and memory at the end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end, and nothing else.")
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    prompt: str | None,
    batch: list[str] | None,
    top_k_print: int | None,
    logprobs: int | None,
    stats: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Write on from a prompt.

    PROMPT is the beginning of the text; `-` reads it from standard input. An empty one starts from the model's end token. The text goes to
    standard output as it comes, tables go to standard error. Several texts are written when all are done, with an empty line between.
    """
    if batch is None and prompt is None:
        raise click.MissingParameter(ctx=ctx, param_type="argument", param_hint="'PROMPT'")
    if batch is not None and prompt is not None:
        raise click.UsageError("PROMPT and --batch contradict each other; leave one out")
    if prompt == "-":
        prompt = _read_standard_input()
    started = time.perf_counter()  # from here, because what is imported now takes a good part of the time
    setup = _setup(batch if batch is not None else [prompt or ""], max(top_k_print or 0, logprobs or 0), chosen, logprobs is not None)

    from miniort_cli.report import print_log_probabilities, print_statistics, to_json
    from miniort_cli.run import Run

    with closing(Run(setup, started=started)) as run:
        interrupted = False
        if as_json:
            for _ in run.steps():
                pass
            click.echo(json.dumps(to_json(run, top_k_print, logprobs), allow_nan=False))
        elif len(setup.prompts) * setup.continuations == 1:
            interrupted = _stream(run, top_k_print)
        else:
            _write_all(run)
        if logprobs is not None and not as_json:
            print_log_probabilities(run, logprobs)
        if stats:
            print_statistics(run)
    if interrupted:
        ctx.exit(INTERRUPTED)


def _setup(prompts: list[str], candidates: int, chosen: dict[str, Any], wants_scores: bool) -> Setup:
    """The options of the command as what is to be run. UsageError for those that contradict each other."""
    from miniort_cli.run import Chat, Setup

    grammar = {name: chosen.pop(name) for name in ("json_schema", "regex", "choices")}
    if grammar["choices"] is not None:
        grammar["choices"] = grammar["choices"].split(",")
    asked = {name: value for name, value in grammar.items() if value is not None}
    processors, draws = take_processors(chosen, [Named("grammar", asked)] if asked else [])

    if not chosen["as_chat"] and (chosen["system"] is not None or chosen["chat_template"] is not None):
        raise click.UsageError("--system and --chat-template are for conversations; add --chat")
    chat = Chat(chosen.pop("system")) if chosen.pop("as_chat") else None
    chosen.pop("system", None)
    sampler, beams = chosen.pop("sampler"), chosen.pop("num_beams")
    if beams is not None:
        if sampler is not None:
            raise click.UsageError("--num-beams and --sampler contradict each other; options go into --sampler beam:num_beams=4,…")
        if wants_scores or candidates:
            raise click.UsageError("a beam search has no single steps to show; leave --logprobs and --top-k-print out")
        sampler = Named("beam", {"num_beams": beams})
    cache, no_cache = chosen.pop("cache"), chosen.pop("no_cache")
    if no_cache and cache is not None:
        raise click.UsageError("--no-cache and --cache contradict each other; leave one out")
    if (chosen["save_cache"] or chosen["load_cache"]) and (no_cache or len(prompts) * chosen["continuations"] > 1):
        raise click.UsageError("--save-cache and --load-cache need a cache, one prompt and one continuation")
    if chosen["prompt_lookup"] and (no_cache or beams is not None or len(prompts) * chosen["continuations"] > 1):
        raise click.UsageError("--prompt-lookup needs a cache, one prompt and one continuation, and no beams")
    if not all(chosen["stops"]):
        raise click.UsageError("a --stop text must not be empty")
    return Setup(
        prompts=prompts,
        chat=chat,
        sampler=sampler or (Named("categorical") if draws else None),
        processors=processors,
        cache=None if no_cache else cache or Named(DEFAULT_LAYOUT),
        candidates=candidates if candidates or wants_scores else None,
        bindings=chosen.pop("bind"),
        **chosen,
    )


def _read_standard_input() -> str:
    """All of it, less one newline at its end, which is `echo`'s and not the prompt's."""
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt on standard input must be UTF-8; byte {error.start} is not") from None
    return text.removesuffix("\n").removesuffix("\r")


def _stream(run: Run, candidates: int | None) -> bool:
    """Write the prompt, unless it's a message, then the text as it comes, then a newline, whatever ends it.

    Returns whether that was Ctrl-C.
    """
    from miniort_cli.report import print_candidates

    try:
        if run.setup.chat is None:
            click.echo(run.setup.prompts[0], nl=False)
        for row, step in run.steps():
            if candidates is not None and step.scores is not None:
                print_candidates(run, row, step.scores.top[:candidates])
            click.echo(step.text, nl=False)
    except KeyboardInterrupt:
        return True
    finally:
        click.echo()
    return False


def _write_all(run: Run) -> None:
    """Write each text when all are done, an empty line between two."""
    for _ in run.steps():
        pass
    for index, row in enumerate(run.rows):
        if index:
            click.echo()
        click.echo(row.text if run.setup.chat is not None else row.prompt + row.text)
