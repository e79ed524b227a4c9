"""Chats: messages rendered into a prompt by the chat template of a model file.

The template is a foreign program. A process of its own runs it (`chat_template.py`) with limits of
memory and time: Python has no other way to bound an expression, such as strings that double. Each
prompt has a new process with full limits, which starts in about 0.15 s.
"""

from __future__ import annotations

import json
import os
import reprlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from unimem.base.install_hint import install_hint
from unimem.base.text import format_bytes
from unimem.engine.text.tokenizer import Tokenizer

if find_spec("jinja2") is None:
    raise ImportError(f"unimem.engine needs jinja2: {install_hint('run')}")

from unimem.engine.text.chat_template import ChatTemplateError

_TEMPLATE_KEY = "tokenizer.chat_template"
_CHILD = os.path.join(os.path.dirname(__file__), "chat_template.py")
# Far above the needs of real templates. Python and Jinja alone take 30 MiB and 0.15 s.
_MAX_BYTES, _MAX_CPU_SECONDS, _MAX_SECONDS = 512 << 20, 10, 60


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
) -> str:
    """Render messages into a prompt, which may begin with `bos_token`.

    Parameters
    ----------
    template : str
        The Jinja source.
    messages : sequence of mappings
        Each with a ``role`` (``system``, ``user``, ``assistant``) and a ``content``.
    bos_token, eos_token : str
        Texts of the tokens that begin and end a text, or "".
    add_generation_prompt : bool
        Whether the text ends with the beginning of the assistant's answer.

    Raises
    ------
    ChatTemplateError
        The template is no valid Jinja, fails, refuses the messages, or exceeds its limits.
    ValueError
        A message lacks its role or content.
    OSError
        The process that renders it cannot be started.

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
    answer = _ask_child(
        template=template,
        messages=[dict(message) for message in messages],
        bos_token=bos_token,
        eos_token=eos_token,
        add_generation_prompt=add_generation_prompt,
        memory_bytes=_MAX_BYTES,
        cpu_seconds=_MAX_CPU_SECONDS,
    )
    if "error" in answer:
        most = f": it may take {format_bytes(_MAX_BYTES)}" if answer["out_of_memory"] else ""
        raise ChatTemplateError(answer["error"] + most)
    return str(answer["text"])


def _ask_child(**asked: Any) -> Any:
    """Have a process render, and return its answer."""
    # A preloaded library would use up memory of the limit.
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-S", _CHILD],
            input=json.dumps(asked).encode(),
            env=variables,
            capture_output=True,
            timeout=_MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ChatTemplateError(
            f"chat template: it takes more than {_MAX_SECONDS} seconds"
        ) from None
    if done.returncode < 0:
        raise ChatTemplateError(
            f"chat template: it takes more than {_MAX_CPU_SECONDS} seconds of the CPU, or more "
            f"than {format_bytes(_MAX_BYTES)}: its process was ended by signal {-done.returncode}"
        )
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ChatTemplateError(f"chat template: the process that renders it has failed: {why}")
    return json.loads(done.stdout)


def chat_prompt(
    metadata: Mapping[str, Any], tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]
) -> str:
    """Render messages by the template in a file's metadata, for the tokenizer of the same file.

    The prompt is for ``tokenizer.encode(prompt, special=True)``, without a first token that
    `encode` adds anyway.

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
