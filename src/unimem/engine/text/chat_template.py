"""Chat templates: messages made into the text that a model was trained to continue.

A template is a Jinja program in the model file. It gets the environment that Hugging Face's
``apply_chat_template`` gives it (``transformers/utils/chat_template_utils.py`` in
https://github.com/huggingface/transformers). Since it is somebody else's program, it runs in
Jinja's sandbox, with a limit of steps and of output. `unimem.engine.text.chat` runs this
file as a process of its own, with limits of memory and time.
"""

from __future__ import annotations

import json
import resource
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatTemplateError", "main", "render"]

# Far above what real templates need: they have up to 30 kB, and take some hundred steps a message.
_MAX_TEMPLATE_CHARS = 1 << 20
_MAX_OUTPUT_CHARS = 1 << 24
_MAX_STEPS = 2_000_000


class ChatTemplateError(ValueError):
    """The file has no chat template, or it fails with these messages."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, without the operators that take hours or all memory in one step."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or _size(left) * _size(right) > _MAX_OUTPUT_CHARS:
            raise SecurityError(f"the result of {operator} may be too large")
        return super().call_binop(context, operator, left, right)


def _size(operand: Any) -> float:
    """By how much an operand makes a product large."""
    return abs(operand) if isinstance(operand, int | float) else len(operand)


class _Generation(Extension):
    """``{% generation %}``: tells a trainer what the assistant wrote; here it is text as any."""

    tags = {"generation"}  # noqa: RUF012 - declared like this in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()


def render(template: str, messages: Sequence[Mapping[str, str]], **variables: str | bool) -> str:
    """Render messages by a template, in this process.

    The template is given `variables` beside the messages.
    """
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(
            f"chat template: expected at most {_MAX_TEMPLATE_CHARS} characters, got {len(template)}"
        )
    try:
        pieces = _ENVIRONMENT.from_string(template).generate(
            messages=messages, tools=None, documents=None, **variables
        )
        return _collect(pieces)
    except Exception as error:  # a template can raise whatever its expressions can
        line = _line_of(error)
        where = f"line {line}: " if line else ""
        name = "" if isinstance(error, TemplateError) else type(error).__name__
        said = ": ".join(filter(None, (name, str(error))))
        raise ChatTemplateError(f"chat template: {where}{said}") from error


def _collect(pieces: Iterator[str]) -> str:
    """Run a template and join what it writes, as long as neither gets too much.

    The steps are counted by a trace function, since nothing else sees a loop that neither calls
    nor writes. It takes the place of a debugger's until the template has ended.
    """
    steps = 0

    def count(_frame: FrameType, _event: str, _arg: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > _MAX_STEPS:
            raise SecurityError(f"it takes more than {_MAX_STEPS} steps")
        return count

    parts: list[str] = []
    room = _MAX_OUTPUT_CHARS
    outer = sys.gettrace()
    sys.settrace(count)
    try:
        for piece in pieces:
            room -= len(piece)
            if room < 0:
                raise SecurityError(f"it writes more than {_MAX_OUTPUT_CHARS} characters")
            parts.append(piece)
    finally:
        sys.settrace(outer)
    return "".join(parts)


def _line_of(error: Exception) -> int | None:
    """Line of the template at which an error was raised; Jinja puts it into the traceback."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "<template>"
    ]
    return lines[-1] if lines else None


def main() -> None:
    """Render what standard input asks for within its limits; write the text, or the error."""
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
