"""Chat templates of the well known shapes, their errors, and their bounds."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest

from support.models.tokenizer_models import Vocab, bpe_vocab, spm_vocab
from unimem.engine.text import chat as chat_module
from unimem.engine.text import chat_template
from unimem.engine.text.chat import ChatTemplateError, chat_prompt, render_chat
from unimem.engine.text.tokenizer import Tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi! "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "1+1?"},
]

CHATML = """\
{% for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- if tools is not none %}{{- raise_exception("tools are not for this test") }}{% endif %}
{%- for message in messages %}
    {%- set content = '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n'
        + message.content | trim + '<|eot_id|>' %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

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
def test_what_templates_expect_of_their_environment(template: str, text: str) -> None:
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


def render_apart(template: str, messages: list[dict[str, str]] = TALK) -> str:
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>")


def test_a_process_of_its_own_renders_the_same() -> None:
    talk = [*TALK, {"role": "user", "content": "é \U0001f600 \udcff \0"}]
    assert render_apart(CHATML, talk) == render(CHATML, talk)
    with pytest.raises(ChatTemplateError, match="template: line 2: Expected an expression"):
        render_apart("a\nb {% if %}")


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}",
        "{% set p = '%c' * 9000 %}{% set n = namespace(l=[]) %}{% for i in range(9999) %}"
        "{% set n.l = n.l + [strftime_now(p)] %}{% endfor %}",
        "{{ 'x'.ljust(1000000000) }}",
    ],
    ids=["doubling", "strftime", "one method"],
)
def test_memory_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "_MAX_BYTES", 96 << 20)
    with pytest.raises(ChatTemplateError, match=r"MemoryError: it may take 96\.0 MiB"):
        render_apart(template)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "template",
    [
        "{{ 9 ** (9 ** 9) }}",
        pytest.param("{% for i in range(9999) %}" * 2 + "{% endfor %}" * 2, marks=SLOW),
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
            marks=SLOW,
        ),
        pytest.param(
            "{% set s = 'ab' * 4000000 %}{% for i in range(99999) %}{% if s | upper == 'x' %}"
            "{% endif %}{% endfor %}",
            marks=SLOW,
        ),
    ],
    ids=["a power", "loops", "macros", "a filter"],
)
def test_time_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "_MAX_CPU_SECONDS", 1)
    with pytest.raises(ChatTemplateError, match="more than 1 seconds of the CPU"):
        render_apart(template)


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}, {}])
def test_messages_need_role_and_content(message: Any) -> None:
    with pytest.raises(ValueError, match=r"messages\[1\]: expected a text as"):
        render_chat(CHATML, [TALK[0], message], bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def spm() -> Vocab:
    return spm_vocab()


def prompt_and_ids(vocab: Vocab, template: str) -> tuple[Tokenizer, str, list[int]]:
    """What a file with this template makes of the talk; the tokens begin a text once."""
    tokenizer = Tokenizer.from_metadata(vocab.metadata)
    prompt = chat_prompt(vocab.metadata | {"tokenizer.chat_template": template}, tokenizer, TALK)
    tokens = tokenizer.encode(prompt, special=True)
    assert (tokens[0], tokens.count(tokens[0])) == (tokenizer.bos_id, 1)
    return tokenizer, prompt, tokens


def test_prompt_of_a_file_begins_once(spm: Vocab) -> None:
    tokenizer, _, tokens = prompt_and_ids(spm, MISTRAL)
    assert tokens.count(2) == 1  # </s> after the assistant's answer
    assert tokenizer.decode(tokens, special=True).startswith("<s> [INST] Be brief.")


def test_prompt_of_a_file_whose_tokenizer_adds_nothing() -> None:
    vocab = bpe_vocab("qwen2")
    _, prompt, tokens = prompt_and_ids(vocab, LLAMA3)
    assert prompt.startswith("<|begin_of_text|><|start_header_id|>system")
    assert tokens.count(vocab.tokens.index("<|eot_id|>")) == len(TALK)


@pytest.mark.parametrize(("template", "has"), [(None, "has none"), (7, "has 7")])
def test_file_without_template_is_named(spm: Vocab, template: Any, has: str) -> None:
    tokenizer = Tokenizer.from_metadata(spm.metadata)
    with pytest.raises(ChatTemplateError, match=rf"^tokenizer\.chat_template: .*{has}"):
        chat_prompt({"tokenizer.chat_template": template}, tokenizer, TALK)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"needs jinja2.*install unimem-llm with the extra 'run'"):
        runpy.run_path(str(chat_module.__file__))
