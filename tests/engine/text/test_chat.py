"""Chat prompts: templates run in a process of their own, within bounds."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest

from support.models.chats import CHATML, LLAMA3, MISTRAL, TALK
from support.models.tokenizer_models import Vocab, bpe_vocab, spm_vocab
from unimem.engine.text import chat as chat_module
from unimem.engine.text import chat_template
from unimem.engine.text.chat import chat_prompt, render_chat
from unimem.engine.text.chat_template import ChatTemplateError
from unimem.engine.text.tokenizer import Tokenizer


def render_apart(template: str, messages: list[dict[str, str]] = TALK) -> str:
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>")


def test_a_process_of_its_own_renders_the_same() -> None:
    talk = [*TALK, {"role": "user", "content": "é \U0001f600 \udcff \0"}]
    options: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    expected = chat_template.render(CHATML, talk, add_generation_prompt=True, **options)
    assert render_apart(CHATML, talk) == expected
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
    """Return the prompt and the ids for a file with this template; they begin a text once."""
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
