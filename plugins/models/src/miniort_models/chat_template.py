"""Chat templates: how a model wants a conversation written down, as a Jinja template that comes with it.

Templates are programs of strangers, so they run in Jinja's sandbox. What they find in it is what `transformers` gives them
("Chat templates" in its documentation): the same settings, `raise_exception`, `strftime_now` and a `tojson` that doesn't escape HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniort.errors import ChatTemplateError, ModelError

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_JSON_FILE = "chat_template.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class JinjaChatTemplate:
    """A `ChatTemplate` in Jinja. name: what messages call it. special_tokens: what the template knows as `bos_token` and so on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.name = name
        self._template = self._compile(source)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The conversation as text. ChatTemplateError that says what the template doesn't like, such as a role that it doesn't know."""
        try:
            return str(
                self._template.render(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    tools=None,
                    documents=None,
                    **self.special_tokens,
                )
            )
        except Exception as error:  # a template is a program, and may fail in any way
            raise ChatTemplateError(f"{self.name}: the chat template refuses this conversation: {error}") from None

    def _compile(self, source: str) -> jinja2.Template:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import Node
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}` marks what the assistant says, for training; here it changes nothing."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> list[Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"{self.name}: the chat template is no Jinja that can be read: line {error.lineno}: {error}") from None


def find_chat_template(folders: Sequence[Path]) -> JinjaChatTemplate | None:
    """The template in the first of the folders that has one: `chat_template.jinja`, or in `tokenizer_config.json`. None where none has.

    Of several templates in `tokenizer_config.json` it's the one called `default`. ModelError for a file that is damaged.
    """
    for folder in folders:
        config = _read_config(folder / TOKENIZER_CONFIG_FILE)
        special = special_tokens_of(config)
        path = folder / TEMPLATE_FILE
        if path.is_file():
            return read_chat_template(path, special)
        for name, content in ((TOKENIZER_CONFIG_FILE, config), (TEMPLATE_JSON_FILE, _read_config(folder / TEMPLATE_JSON_FILE))):
            source = _choose(content.get("chat_template"), folder / name)
            if source is not None:
                return JinjaChatTemplate(source, special, str(folder / name))
    return None


def has_chat_template(folders: Sequence[Path]) -> bool:
    """Whether one of the folders has a template, told without reading it."""
    for folder in folders:
        if (folder / TEMPLATE_FILE).is_file() or (folder / TEMPLATE_JSON_FILE).is_file():
            return True
        config = folder / TOKENIZER_CONFIG_FILE
        if config.is_file() and b'"chat_template"' in config.read_bytes():
            return True
    return False


def open_chat_template(folders: Sequence[Path]) -> JinjaChatTemplate:
    """The template in the first of the folders that has one. ChatTemplateError if none has, or it can't be read."""
    found = find_chat_template(folders)
    if found is None:
        raise ChatTemplateError(f"{folders[0]} holds no chat template; name one with --chat-template FILE")
    return found


def read_chat_template(path: Path, special_tokens: Mapping[str, str] = {}) -> JinjaChatTemplate:
    """A template in a file of its own. ChatTemplateError if it can't be read."""
    try:
        return JinjaChatTemplate(path.read_text(encoding="utf-8"), special_tokens, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"{path} can't be read: {error}") from None


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a `tokenizer_config.json` names; each is a text, or an object with the text as `content`."""
    found = {}
    for word in _SPECIAL_TOKENS:
        said = config.get(word)
        text = said.get("content") if isinstance(said, dict) else said
        if isinstance(text, str):
            found[word] = text
    return found


def _choose(said: Any, path: Path) -> str | None:
    """A template, or of a list of named ones `default`."""
    if said is None or isinstance(said, str):
        return said
    try:
        named = {each["name"]: each["template"] for each in said}
    except (TypeError, KeyError):
        raise ModelError(f"{path}: chat_template must be a text or a list of named ones; get it again") from None
    if "default" not in named:
        raise ModelError(f"{path} has the chat templates {', '.join(sorted(named))}, but none called default; leave one in {TEMPLATE_FILE}")
    return str(named["default"])


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON: {error}; get it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must be a JSON object, found {type(content).__name__}")
    return content


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
