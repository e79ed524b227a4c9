"""The help of every command, also of one below another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[cli]'")

import typer

from support.terminal.screens import show
from unimem import cli

# Names of types as typer, click and Python write them.
TYPES = r"<[^=\s][^>]*>|\b(?:list|tuple)\[|\b(?:INTEGER|FLOAT|BOOLEAN)\b"


def commands(of: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words of a command and of each command below it, and the command."""
    yield words, of
    for name, command in getattr(of, "commands", {}).items():
        yield from commands(command, *words, name)


@pytest.mark.parametrize(
    ("words", "command"),
    list(commands(typer.main.get_command(cli._app()))),
    ids=lambda each: " ".join(each or ["unimem"]) if isinstance(each, tuple) else "",
)
def test_help_names_values_in_words(words: tuple[str, ...], command: Any) -> None:
    """No type of Python, such as <list[str]>, stands where a person looks for what to write."""
    assert re.findall(TYPES, show(*words, "--help").plain) == []
    with_values = [each for each in command.params if not getattr(each, "is_flag", False)]
    assert [each.name for each in with_values if each.metavar is None] == []
