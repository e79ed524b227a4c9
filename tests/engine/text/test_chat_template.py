"""Chat templates of well-known shapes, rendered in this process, and their errors."""

from __future__ import annotations

from typing import Any

import pytest

from support.models.chats import CHATML, LLAMA3, MISTRAL, TALK
from unimem.engine.text import chat_template
from unimem.engine.text.chat_template import ChatTemplateError

# As Gemma's: a system message is put before the user's first, and the assistant is the model.
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set talk = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set talk = messages -%}
{%- endif -%}
{%- for message in talk -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""


def render(template: str, messages: list[dict[str, str]] = TALK, **options: Any) -> str:
    given: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    given |= {"add_generation_prompt": True} | options
    return chat_template.render(template, messages, **given)


def test_chatml() -> None:
    talk = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)
    assert render(CHATML) == talk + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == talk
    assert render(CHATML, TALK[1:2]).startswith("<|im_start|>system\nYou are helpful.<|im_end|>\n")


def test_llama3() -> None:
    talk = "".join(
        f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content'].strip()}<|eot_id|>"
        for m in TALK
    )
    assert render(LLAMA3) == f"<s>{talk}<|start_header_id|>assistant<|end_header_id|>\n\n"


def test_mistral() -> None:
    assert render(MISTRAL) == "<s>[INST] Be brief.\n\nHi! [/INST] Hello.</s>[INST] 1+1?[/INST]"
    with pytest.raises(ChatTemplateError, match=r"line 10: roles must alternate user/assistant"):
        render(MISTRAL, TALK[2:])


def test_gemma() -> None:
    turns = [("user", "Be brief.\n\nHi!"), ("model", "Hello."), ("user", "1+1?")]
    talk = "".join(f"<start_of_turn>{role}\n{said}<end_of_turn>\n" for role, said in turns)
    assert render(GEMMA) == f"<s>{talk}<start_of_turn>model\n"
    with pytest.raises(ChatTemplateError, match=r"line 11: roles must alternate"):
        render(GEMMA, TALK[2:])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for x in 'abc' %}{% if x == 'b' %}{% break %}{% endif %}{{ x }}{% endfor %}", "a"),
        ("{% generation %}{{ eos_token }}{% endgeneration %}.", "</s>."),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks, lstrip_blocks
        ("{{ tools is none and documents is none }}", "True"),
        ("{% set n = namespace(i=1) %}{% set n.i = n.i + 1 %}{{ n.i * 3 }}{{ '-' * 3 }}", "6---"),
        ("{{ strftime_now('%d') | length }}", "2"),
        ("{{ '<' }}{{ messages[1].content }}", "<Hi! "),  # nothing is escaped
    ],
)
def test_the_environment_has_everything_templates_expect(template: str, text: str) -> None:
    assert render(template) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # Mistakes name the line.
        ("a\nb {% if %}", "line 2: Expected an expression"),
        ("a\n\n{{ raise_exception('not ' + eos_token) }}", "line 3: not </s>"),
        ("a\n{{ nothing.at.all }}", "line 2: 'nothing' is undefined"),
        ("{{ 1 / 0 }}", "line 1: ZeroDivisionError"),
        ("{% for m in messages %}\n{{ m.role + 1 }}{% endfor %}", "line 2: TypeError"),
        ("{% include 'other' %}", "line 1: TypeError: no loader"),
        ("{{ ''.__class__.__mro__ }}", "line 1: access to attribute '__class__'.*unsafe"),
        ("{{ messages.append(1) }}", "line 1: access to attribute 'append'.*unsafe"),
        ("{{ messages[0].update(role='user') }}", "line 1: access to attribute 'update'.*unsafe"),
        ("{{" + "(" * 3000 + ")" * 3000 + "}}", "RecursionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "line 1: RecursionError"),
        # Input and output are bounded.
        ("{% for i in range(100001) %}{% endfor %}", "Range too big"),
        ("{{ '-' * 20000000 }}", "more than 16777216 characters"),
        ("{% for i in range(9999) %}{{ '-' * 9999 }}{% endfor %}", "more than 16777216 characters"),
        ("-" * ((1 << 20) + 1), "expected at most 1048576 characters"),
    ],
    ids=lambda text: text[:40],
)
def test_errors(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(template)


def test_a_long_talk_is_within_the_bounds() -> None:
    talk = [{"role": role, "content": "word " * 99} for role in ("user", "assistant")] * 1000
    assert render(MISTRAL, talk).count("[INST]") == 1000
