"""The directive `command-help`: the help of every command of `unimem`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

CALL = [sys.executable, "-c", "import sys, unimem_command; sys.exit(unimem_command.main())"]
SURROUNDINGS = {"COLUMNS": "90", "NO_COLOR": "1", "TERM": "dumb"}


def help_of(words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the help of a command, and of those that it lists."""
    done = subprocess.run(
        [*CALL, *words, "--help"],
        env=os.environ | SURROUNDINGS,
        capture_output=True,
        text=True,
        check=True,
    )
    yield words, done.stdout.strip("\n")
    listed = done.stdout.partition("\nCommands:\n")[2]
    for name in re.findall(r"^  (\w+)  ", listed, re.MULTILINE):
        yield from help_of((*words, name))


class CommandHelp(Directive):  # type: ignore[misc]
    """`.. command-help::`."""

    def run(self) -> list[nodes.Node]:
        """Make a section of each command."""
        sections: list[nodes.Node] = []
        for words, text in help_of(()):
            name = " ".join(("unimem", *words))
            section = nodes.section(ids=[nodes.make_id(name)], names=[name])
            section += nodes.title(text=name)
            section += nodes.literal_block(text, text, language="text")
            sections.append(section)
        return sections


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
