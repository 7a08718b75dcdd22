"""Record what Hugging Face transformers makes of chat templates: the oracle of the chat templates' tests.

    python tools/record_chat_templates.py tests/data/chat_templates.json

Needs transformers, which is no dependency of miniort. The templates are written here, each with something that real ones use.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

TEMPLATES = {
    "turns": """{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>\\n' }}
{%- endif %}
""",
    "indented": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set loop_messages = messages %}
{%- endif %}
    {% if system != '' %}
    [SYSTEM] {{ system }}
    {% endif %}
{% for message in loop_messages %}
    {% generation %}
    [{{ message.role | upper }} {{ loop.index0 }}] {{ message.content | trim }}{{ eos_token if message.role == 'assistant' }}
    {% endgeneration %}
{% endfor %}
""",
    "json": """{{ messages | tojson }}
{{ messages | tojson(indent=2) }}
{{ '<&>"é' | tojson }}{{ tools is none }}{{ documents is defined }}{{ nothing is defined }}""",
    "alternating": """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}
{% endfor %}""",
    "namespace": """{%- set state = namespace(users=0, last='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif %}
{%- if message.role == 'user' %}{%- set state.users = state.users + 1 %}{%- set state.last = message.content.split()[-1] %}{% endif %}
{%- if state.users > 2 %}{% break %}{% endif %}
{%- endfor %}
{{ state.users }} {{ state.last }} {{ '%05.2f' | format(1.5) }} {{ messages | map(attribute='role') | join(', ') }}
{% macro said(m) %}({{ m.role }}: {{ m.content }}){% endmacro %}
{% for message in messages %}{{ said(message) }}{% endfor %}""",
}

CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "What's <b>2 & 3</b>?\n"}],
    [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "  three\n"},
        {"role": "user", "content": "naïve 😀"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "five"},
    ],
]


def main() -> None:
    """Write each template, conversation and prompt or none, and what it's rendered as; null where transformers raises."""
    cases = []
    for name, template in TEMPLATES.items():
        for messages in CONVERSATIONS:
            for prompt in (True, False):
                try:
                    rendered, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt, **SPECIAL)
                    text = rendered[0]
                except Exception as error:
                    text, said = None, str(error)
                case = {"template": name, "messages": messages, "add_generation_prompt": prompt, "text": text}
                cases.append(case if text is not None else case | {"error": said})
    content = {"transformers": transformers.__version__, "special_tokens": SPECIAL, "templates": TEMPLATES, "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
