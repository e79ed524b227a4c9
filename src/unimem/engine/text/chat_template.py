"""The program that renders a chat template, in a process of its own.

A template is a Jinja program in the model file. It runs in Jinja's sandbox, with the environment of
Hugging Face's ``apply_chat_template`` (``transformers/utils/chat_template_utils.py`` in
https://github.com/huggingface/transformers). `unimem.engine.text.chat` starts this file with limits
of memory and time.
"""

from __future__ import annotations

import json
import resource
import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Far above the needs of real templates, which have up to 30 kB.
_MAX_TEMPLATE_CHARS = 1 << 20
_MAX_OUTPUT_CHARS = 1 << 24


class ChatTemplateError(ValueError):
    """The file has no chat template, or it fails with these messages."""


class _Generation(Extension):
    """``{% generation %}``: marks the assistant's text for trainers; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - declared like this in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def render(template: str, messages: Sequence[Mapping[str, str]], **variables: str | bool) -> str:
    """Render messages and `variables` by a template, in this process."""
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(
            f"chat template: expected at most {_MAX_TEMPLATE_CHARS} characters, got {len(template)}"
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    try:
        text = environment.from_string(template).render(
            messages=messages, tools=None, documents=None, **variables
        )
    except Exception as error:  # a template can raise whatever its expressions can
        line = _line_of(error)
        where = f"line {line}: " if line else ""
        name = "" if isinstance(error, TemplateError) else type(error).__name__
        said = ": ".join(filter(None, (name, str(error))))
        raise ChatTemplateError(f"chat template: {where}{said}") from error
    if len(text) > _MAX_OUTPUT_CHARS:
        raise ChatTemplateError(
            f"chat template: it writes more than {_MAX_OUTPUT_CHARS} characters"
        )
    return text


def _line_of(error: Exception) -> int | None:
    """Return the line of the template that raised an error, from Jinja's traceback."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "<template>"
    ]
    return lines[-1] if lines else None


def main() -> None:
    """Render the request on standard input within its limits; write the text, or the error."""
    asked = json.load(sys.stdin)
    nbytes, seconds = asked.pop("memory_bytes"), asked.pop("cpu_seconds")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    try:
        answer: dict[str, Any] = {"text": render(**asked)}
    except ChatTemplateError as error:
        is_memory = isinstance(error.__cause__, MemoryError)
        answer = {"error": str(error), "out_of_memory": is_memory}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
