"""Chat templates: messages made into the text that a model was trained to continue.

A template is a Jinja program in the model file. It gets the environment that Hugging Face's
``apply_chat_template`` gives it (``transformers/utils/chat_template_utils.py`` in
https://github.com/huggingface/transformers). Since it is somebody else's program, it runs in
Jinja's sandbox, and its steps and its output are bounded. Its variables are not: a template that is
made for it can still use up memory.
"""

from __future__ import annotations

import json
import reprlib
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import FrameType
from typing import Any

try:
    from jinja2 import TemplateError, TemplateSyntaxError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    raise ImportError(
        f"unimem.engine needs {error.name}: install unimem-llm with the extra 'run'"
    ) from error

from unimem.engine.tokenizer import Tokenizer

__all__ = ["ChatTemplateError", "chat_prompt", "render_chat"]

_TEMPLATE_KEY = "tokenizer.chat_template"

# Far above what real templates need: some 30 kB long, some hundred steps a message.
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


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
) -> str:
    """Write messages as a template says.

    Parameters
    ----------
    template : str
        The Jinja source.
    messages : sequence of mappings
        Each with a ``role`` (``system``, ``user``, ``assistant``) and a ``content``.
    bos_token, eos_token : str
        Texts of the tokens that begin and end a text, empty if there is none.
    add_generation_prompt : bool
        Whether the text ends with what introduces the assistant's answer.

    Returns
    -------
    str
        The prompt. It may begin with `bos_token`.

    Raises
    ------
    ChatTemplateError
        The template is no valid Jinja, fails, refuses the messages, or does more than it may; with
        the line of the template.
    ValueError
        A message lacks its role or content.

    Examples
    --------
    >>> render_chat(
    ...     "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}",
    ...     [{"role": "user", "content": "Hello"}],
    ...     bos_token="<s>",
    ...     eos_token="</s>",
    ... )
    '[user] Hello</s>'
    """
    for i, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(
                    f"messages[{i}]: expected a text as {key!r}, got {reprlib.repr(message)}"
                )
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(
            f"chat template: expected at most {_MAX_TEMPLATE_CHARS} characters, got {len(template)}"
        )
    try:
        pieces = _ENVIRONMENT.from_string(template).generate(
            messages=[dict(message) for message in messages],
            bos_token=bos_token,
            eos_token=eos_token,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
        )
        return _collect(pieces)
    except Exception as error:  # a template can raise whatever its expressions can
        line = _line_of(error)
        where = f"line {line}: " if line else ""
        what = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise ChatTemplateError(f"chat template: {where}{what}{error}") from error


def _collect(pieces: Iterator[str]) -> str:
    """Run a template and join what it writes, as long as neither gets too much.

    The steps are counted by a trace function, since nothing else sees a loop that neither calls
    nor writes. One that is there already, a debugger's, rests meanwhile.
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


def chat_prompt(
    metadata: Mapping[str, Any], tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]
) -> str:
    """Write messages as the model file says.

    Parameters
    ----------
    metadata : mapping
        The file's metadata.
    tokenizer : Tokenizer
        The tokenizer of the same file.
    messages : sequence of mappings
        As for `render_chat`.

    Returns
    -------
    str
        The prompt for ``tokenizer.encode(prompt, special=True)``. The token that begins a text is
        left out where `encode` puts it in front anyway.

    Raises
    ------
    ChatTemplateError
        The file has no template, or `render_chat` raises.
    """
    template = metadata.get(_TEMPLATE_KEY)
    if not isinstance(template, str):
        has = "none" if template is None else reprlib.repr(template)
        raise ChatTemplateError(
            f"{_TEMPLATE_KEY}: expected a chat template, but the file has {has}; "
            f"write the whole prompt yourself, or use a model that was made for chat"
        )
    bos, eos = (
        "" if token is None else tokenizer.decode([token], special=True)
        for token in (tokenizer.bos_id, tokenizer.eos_id)
    )
    prompt = render_chat(template, messages, bos_token=bos, eos_token=eos)
    return prompt.removeprefix(bos) if tokenizer.add_bos else prompt
