"""Chat templates: rendered as transformers does, found in a model's folder, and harmless."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from miniort.errors import ChatTemplateError, ModelError
from miniort.generation import DecoderSource, open_decoder
from miniort_models.chat_template import JinjaChatTemplate, find_chat_template, has_chat_template, open_chat_template, read_chat_template

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "chat_templates.json").read_text(encoding="utf-8"))
HELLO = [{"role": "user", "content": "Hello"}]


def rendered(source: str, messages: list[dict[str, str]] = HELLO, special: Mapping[str, str] = {}) -> str:
    return JinjaChatTemplate(source, special, "a template").render(messages)


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{case['template']}-{len(case['messages'])}")
def test_it_is_rendered_as_transformers_does(case: dict[str, Any]) -> None:
    template = JinjaChatTemplate(RECORDED["templates"][case["template"]], RECORDED["special_tokens"], "a template")
    if case["text"] is None:
        with pytest.raises(ChatTemplateError, match="refuses this conversation") as caught:
            template.render(case["messages"])
        assert case["error"] in str(caught.value)
    else:
        assert template.render(case["messages"], add_generation_prompt=case["add_generation_prompt"]) == case["text"]


def test_the_date() -> None:
    assert rendered("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
        "{{ raise_exception.__globals__.json }}",
        "{% include '/etc/passwd' %}",
        "{{ nothing.at.all }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_may_not_do(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"^a template: the chat template refuses this conversation: "):
        rendered(source)


def test_messages_are_left_as_they_are() -> None:
    messages = [{"role": "user", "content": "a"}]
    rendered("{% for m in messages %}{% set m = 3 %}{% endfor %}", messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(ChatTemplateError, match="the chat template is no Jinja that can be read: line 2: "):
        rendered("fine\n{% if %}")


# ------------------------------------------------------------------------------------------------ where it's from


def fill(folder: Path, **contents: object) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_in_tokenizer_config(tmp_path: Path) -> None:
    special = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    fill(tmp_path, tokenizer_config={"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", **special})
    assert has_chat_template([tmp_path])
    assert open_chat_template([tmp_path]).render(HELLO) == "<s>Hello</s>"


def test_the_default_of_several(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    fill(tmp_path, tokenizer_config={"chat_template": named})
    assert open_chat_template([tmp_path]).render(HELLO) == "plain"
    fill(tmp_path, tokenizer_config={"chat_template": named[:1]})
    with pytest.raises(ModelError, match="has the chat templates tool_use, but none called default"):
        find_chat_template([tmp_path])


def test_in_a_file_of_its_own_which_goes_first(tmp_path: Path) -> None:
    fill(tmp_path, tokenizer_config={"chat_template": "old", "bos_token": "<s>"})
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }} new")
    assert open_chat_template([tmp_path]).render(HELLO) == "<s> new"
    other = fill(tmp_path / "other", chat_template={"chat_template": "as JSON"})
    assert has_chat_template([other])
    assert open_chat_template([other, tmp_path]).render(HELLO) == "as JSON"


def test_where_there_is_none(tmp_path: Path) -> None:
    fill(tmp_path, tokenizer_config={"eos_token": "</s>"})
    assert not has_chat_template([tmp_path])
    assert find_chat_template([tmp_path]) is None
    with pytest.raises(ChatTemplateError, match="holds no chat template"):
        open_chat_template([tmp_path])


@pytest.mark.parametrize(
    ("content", "said"), [("{", "can't be read as JSON"), ("[]", "must be a JSON object"), ('{"chat_template": 3}', "must be")]
)
def test_damaged_files_are_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=said) as caught:
        find_chat_template([tmp_path])
    assert "tokenizer_config.json" in str(caught.value)


def test_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match=r"mine\.jinja can't be read"):
        read_chat_template(tmp_path / "mine.jinja")
    with pytest.raises(ChatTemplateError, match="can't be read"):
        read_chat_template(tmp_path / "none.jinja")


def test_a_decoder_without_a_template() -> None:
    decoder = open_decoder("demo")
    with pytest.raises(ChatTemplateError, match="demo has no chat template: it wasn't trained for conversations"):
        decoder.open_chat_template()
    decoder.source = DecoderSource("named", (), chat_template=lambda: JinjaChatTemplate("hi", {}, "x"))
    assert decoder.open_chat_template().render(HELLO) == "hi"
    decoder.close()
