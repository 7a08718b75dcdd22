"""`miniort chat` and `miniort generate --chat`: conversations with the demo model, which is given a template for the purpose."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from miniort.generation import Generator, generate, open_decoder

Miniort = Callable[..., Result]
Answer = Callable[[str], str]

TEMPLATE = """\
{% for message in messages %}
{{ message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
COMMAND = [sys.executable, "-c", "from miniort_cli.main import main; main()"]
SHORT = ("--max-new-tokens", "8")

SLOW_SAMPLER = """
import time
from miniort.generation.sampling import SamplerInfo
from miniort.plugins import hookimpl

@hookimpl
def miniort_samplers():
    def sample(logits, rngs):
        time.sleep(0.05)
        return logits.argmax(axis=-1)
    return [SamplerInfo("slow", lambda: sample)]
"""


@pytest.fixture
def model(demo_copy: Callable[..., Path]) -> Path:
    """The demo model with a chat template."""
    folder = demo_copy()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def answer() -> Iterator[Callable[[str], str]]:
    """What the demo model goes on with by itself, without a cache: eight tokens."""
    decoder = open_decoder("demo")
    tokenizer = decoder.open_tokenizer()
    processors = decoder.new_processors(decoder.source.processors)

    def go_on(text: str) -> str:
        generator = Generator(decoder, None, decoder.new_sampler(), processors)
        tokens = tokenizer.encode(text)
        generator.append_tokens(tokens)
        new = [int(each.ids[0]) for each in generate(generator, 8)]
        return tokenizer.decode([*tokens, *new])[len(text) :]

    yield go_on
    decoder.close()


def test_each_turn_is_told_what_was_said_before(miniort: Miniort, model: Path, tmp_path: Path, answer: Answer) -> None:
    saved = tmp_path / "said.json"
    result = miniort("chat", "--model", str(model), "--system", "Speak.", *SHORT, stdin=f"Who art thou?\nAnd thy name?\n/save {saved}\n")
    assert result.exit_code == 0, result.stderr
    first = answer("system: Speak.\nuser: Who art thou?\nassistant:")
    history = f"system: Speak.\nuser: Who art thou?\nassistant: {first}\nuser: And thy name?\nassistant:"
    second = answer(history)
    assert result.stdout == f"{first}\n{second}\n"
    assert json.loads(saved.read_text(encoding="utf-8")) == {
        "model": "demo-copy",
        "messages": [
            {"role": "system", "content": "Speak."},
            {"role": "user", "content": "Who art thou?"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "And thy name?"},
            {"role": "assistant", "content": second},
        ],
    }


def test_only_what_is_new_is_run(miniort: Miniort, model: Path) -> None:
    result = miniort("chat", "--model", str(model), *SHORT, stdin="Who art thou?\n/stats\nAnd thy name?\n/stats\n")
    told = [line for line in result.stderr.splitlines() if line.startswith("asked with")]
    first, second = ([int(word) for word in line.replace(",", " ").split() if word.isdecimal()] for line in told)
    assert first[1] == 0
    # The answer's last token was chosen and not run; "assistant:" was the end of the prompt, so nothing before it is run again.
    assert first[0] <= second[1] < second[0]


def test_commands(miniort: Miniort, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "what was said"
    save = f'/save "{path}"'
    lines = ["/stats", "/system", "one", "/reset", "two", "three", "/undo", "/help", "/system Be brief.", "  ", "//four\\", "five", save]
    result = miniort("chat", "--model", str(model), "--max-new-tokens", "3", stdin="\n".join([*lines, "/exit", "never"]))
    assert result.exit_code == 0, result.stderr
    said = json.loads(path.read_text(encoding="utf-8"))["messages"]
    assert [each["content"] for each in said if each["role"] != "assistant"] == ["Be brief.", "two", "/four\nfive"]
    assert [each["role"] for each in said] == ["system", "user", "assistant", "user", "assistant"]
    for told in ("nothing was asked yet", "nothing of yours", "/save FILE    write the conversation", "stopped after 3 tokens"):
        assert told in result.stderr


def test_a_full_context(miniort: Miniort, demo_copy: Callable[..., Path]) -> None:
    folder = demo_copy(n_positions=24)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    result = miniort("chat", "--model", str(folder), stdin="one\n")
    assert "the model's context of 24 tokens is full; /reset begins a new conversation" in result.stderr
    result = miniort("chat", "--model", str(folder), stdin="one\ntwo\n")
    assert result.exit_code == 2
    assert "more than the model's 24; /reset begins a new one" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/dance", "there is no command /dance; /help lists"),
        ("/save", "wants the name of one file"),
        ("/save a b", "wants the name of one file"),
        ("/save 'a", "No closing quotation"),
        ("/save /no/such/folder/file", "can't be written: No such file or directory"),
    ],
)
def test_a_command_that_is_wrong_ends_what_comes_down_a_pipe(miniort: Miniort, model: Path, line: str, said: str) -> None:
    result = miniort("chat", "--model", str(model), stdin=f"{line}\nnever\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_cache_that_lets_go_is_filled_again(miniort: Miniort, model: Path) -> None:
    """Its answers are those of the whole history as far as a window shows it; here the window is wide enough for all."""
    arguments = ("chat", "--model", str(model), *SHORT)
    stdin = "one\ntwo\n/undo\nthree\n"
    wanted = miniort(*arguments, stdin=stdin)
    found = miniort(*arguments, "--cache", "window:window=200,sinks=0,rewind=1", stdin=stdin)
    assert (found.exit_code, found.stdout) == (0, wanted.stdout)


# ------------------------------------------------------------------------------------------------ generate --chat


def test_generate_answers_a_message(miniort: Miniort, model: Path, answer: Answer) -> None:
    result = miniort("generate", "Who art thou?", "--chat", "--model", str(model), *SHORT)
    assert result.stdout == answer("user: Who art thou?\nassistant:") + "\n"
    result = miniort("generate", "Who art thou?", "--chat", "--system", "Speak.", "--model", str(model), *SHORT)
    assert result.stdout == answer("system: Speak.\nuser: Who art thou?\nassistant:") + "\n"


def test_several_messages_at_once(miniort: Miniort, model: Path, tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "prompts").write_text("one\nWho art thou, O Lord?\n")
    result = miniort("generate", "--batch", str(tmp_path / "prompts"), "--chat", "--model", str(model), *SHORT)
    first, second = result.stdout.removesuffix("\n").split("\n\n")
    assert first == answer("user: one\nassistant:")
    assert second == answer("user: Who art thou, O Lord?\nassistant:")


def test_a_template_of_the_user(miniort: Miniort, tmp_path: Path, generate_json: Callable[..., dict[str, Any]]) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}, and")
    found = generate_json("the LORD said", "--chat", "--chat-template", str(tmp_path / "mine.jinja"), *SHORT)
    plain = generate_json("the LORD said, and", *SHORT)
    assert found["tokens"] == plain["tokens"]
    assert found["prompt"] == "the LORD said"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "hi", "--chat"), "demo has no chat template"),
        (("generate", "hi", "--system", "x"), "--system and --chat-template are for conversations; add --chat"),
        (("chat", "--model", "demo"), "demo has no chat template"),
        (("chat",), "Missing option '--model'"),
        (("chat", "--model", "demo", "--chat-template", "none.jinja"), "none.jinja can't be read"),
        (("chat", "--model", "demo", "--sampler", "none"), "none"),
    ],
)
def test_one_line_says_what_is_wrong(miniort: Miniort, arguments: tuple[str, ...], said: str) -> None:
    result = miniort(*arguments, stdin="")
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_conversation_that_the_template_refuses(miniort: Miniort, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ raise_exception('no system here') if messages[0].role == 'system' else 'user:' }}")
    result = miniort("chat", "--model", str(model), "--system", "x", stdin="hello\n")
    assert result.exit_code == 2
    assert "the chat template refuses this conversation: no system here" in result.stderr


# ------------------------------------------------------------------------------------------------ at a terminal


class Terminal:
    """The other end of a chat at a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process, self.end = process, end
        self.shown = ""

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Read until some text was shown since the last call."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self.end], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"waited for {text!r}, and there is {self.shown!r}"
            self.shown += os.read(self.end, 65536).decode("utf-8", errors="replace")
        self.shown = self.shown.split(text, 1)[1]

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def interrupt(self, text: str) -> None:
        """Send SIGINT until some text is shown: readline overlooks one that comes between its prompt and its wait for a key."""
        for _ in range(10):
            self.process.send_signal(signal.SIGINT)
            with suppress(AssertionError):
                self.wait_for(text, seconds=3)
                return
        raise AssertionError(f"interrupted, and waited for {text!r}; there is {self.shown!r}")


@contextmanager
def terminal(*arguments: str, site: Path) -> Iterator[Terminal]:
    import pty

    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    process = subprocess.Popen([*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True)
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals of this kind")
def test_at_a_terminal(model: Path, install_plugin: Callable[[str, str], Path]) -> None:
    """Ctrl-C stops an answer and nothing else, errors are said and forgiven, Ctrl-D ends."""
    site = install_plugin("slow", SLOW_SAMPLER)
    with terminal("chat", "--model", str(model), "--sampler", "slow", site=site) as chat:
        chat.wait_for("/help lists commands, Ctrl-D ends.")
        chat.wait_for("> ")
        chat.type("In the beginning God created\n")
        chat.wait_for("created\r\n")
        chat.wait_for(" ")  # a word of the answer, of which there would be more for ten seconds
        chat.process.send_signal(signal.SIGINT)
        chat.wait_for("stopped\x1b")  # and no "stopped after … tokens"
        chat.wait_for("> ")
        chat.type("/dance\n")
        chat.wait_for("error: there is no command /dance")
        chat.wait_for("> ")
        chat.interrupt("Ctrl-D or /exit ends the chat")
        chat.wait_for("> ")
        chat.type("/stats\n")
        chat.wait_for("asked with")
        chat.wait_for("> ")
        chat.type("\x04")
        assert chat.process.wait(60) == 0
