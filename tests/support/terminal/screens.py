"""The output of a command: on a terminal of some width, in a pipe, or on a real terminal.

`show` runs it in this process, which is the fastest; `run_command` and `show_on_terminal` have a
process of their own, in which the imports are made, and `run_anew` an interpreter.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import typer
from rich.cells import cell_len

from support.processes.warm_python import run_script
from unimem import cli
from unimem.cli import main

# A program that has the command line; what comes before it may change how commands work.
MAIN = "import sys; from unimem.cli import main; sys.exit(main())"
# A text that neither fits into a line nor may reach a terminal as it is.
HOSTILE = "evil\x1b[2J\nname\u202e " + "x" * 300 + " 日本語" * 30
COLOUR = re.compile(r"\x1b\[[\d;]*m")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class Screen(NamedTuple):
    """The exit code, and what was written."""

    code: int
    out: str
    err: str

    @property
    def plain(self) -> str:
        """The output without colours."""
        return COLOUR.sub("", self.out)

    @property
    def lines(self) -> list[str]:
        """The lines of `plain`."""
        return self.plain.splitlines()

    @property
    def widest(self) -> int:
        """The columns of the longest line."""
        return max(map(cell_len, self.lines))


class _Stream(io.TextIOWrapper):
    def __init__(self, encoding: str, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors="backslashreplace")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(self.encoding)


@cache
def _program() -> Any:
    """Make the command once: that takes longer than most commands do."""
    return typer.main.get_command(make_app())


make_app = cli._app
# With it typer makes other options of the command.
NO_SHELL = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"


def show(
    *arguments: object, columns: int | None = None, encoding: str = "utf-8", **environment: str
) -> Screen:
    """Run a command; with columns, on a terminal of that width."""
    out, err = (_Stream(encoding, is_terminal=columns is not None) for _ in range(2))
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    env |= {"TERM": "xterm"} | environment
    env |= {"COLUMNS": str(columns)} if columns else {}
    with (
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.object(sys, "stdout", out),
        mock.patch.object(sys, "stderr", err),
        mock.patch.object(cli, "_app", make_app if NO_SHELL in env else _program),
    ):
        code = main([os.fsdecode(str(word)) for word in arguments])
    return Screen(code, out.text(), err.text())


def start_command(*arguments: object, code: str = MAIN, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process of its own, with pipes."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(words, encoding="utf-8", **options)


def run_anew(*arguments: object, **options: Any) -> Screen:
    """Run a command in a process of its own, as `start_command`."""
    with start_command(*arguments, **options) as process:
        out, err = process.communicate()
    return Screen(process.returncode, out or "", err or "")


def run_command(
    *arguments: object, code: str = MAIN, stdout: str | None = None, stderr: str | None = None
) -> Screen:
    """Run a command in a process of its own, which begins with the imports made.

    Its standard streams may be files.
    """
    done = run_script(code, *map(str, arguments), out=stdout, err=stderr)
    return Screen(done.returncode, done.stdout, done.stderr)


def show_on_terminal(*arguments: object, code: str = MAIN, **environment: str) -> Screen:
    """Run a command in a process of its own, on a terminal of 80 columns and 24 lines."""
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    env |= {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"} | environment
    shown = b""
    name = os.ttyname(theirs)

    def read() -> None:
        nonlocal shown
        with suppress(OSError):  # EIO: the other side was closed
            while part := os.read(ours, 4096):
                shown += part

    reader = threading.Thread(target=read)
    reader.start()
    try:
        done = run_script(code, *map(str, arguments), out=name, err=name, environment=env)
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return Screen(done.returncode, shown.decode(), "")
