"""A terminal that a test types into and reads the screen of: tmux."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.project.apt_packages import UnavailableError, install, update_lists

_PATIENCE_SECONDS = 120.0


class Terminal:
    """A shell in a terminal of 80x24, in which `unimem` is the command."""

    def __init__(self, folder: Path) -> None:
        command = folder / "unimem"
        code = "import sys; from unimem.cli import main; sys.exit(main())"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
        command.chmod(0o755)
        self._n_run = 0
        self._server = ["tmux", "-S", str(folder / "tmux"), "-f", os.devnull]
        variables = {"PATH": f"{folder}:{os.environ['PATH']}", "PS1": "$ ", "LANG": "C.UTF-8"}
        words = [f"{name}={value}" for name, value in variables.items()]
        without = [f"--unset={name}" for name in ("COLUMNS", "LINES", "LC_ALL", "NO_COLOR")]
        # As words, which the user's own shell does not run: some users have /usr/sbin/nologin.
        shell = ["env", *without, *words, "bash", "--norc", "--noprofile"]
        self._ask("new-session", "-d", "-x", "80", "-y", "24", *shell)
        self._ask("set-option", "-g", "status", "off")
        self._ask("set-option", "-g", "window-size", "manual")
        self.resize(80, 24)

    def _ask(self, *arguments: str) -> str:
        asked = [*self._server, *arguments]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout

    def close(self) -> None:
        """End the shell and what it runs."""
        subprocess.run([*self._server, "kill-server"], check=False, capture_output=True)

    def resize(self, columns: int, rows: int) -> None:
        """Give the window another size."""
        self._ask("resize-window", "-x", str(columns), "-y", str(rows))

    def press(self, *keys: str) -> None:
        """Press keys, by the names that tmux has for them."""
        self._ask("send-keys", *keys)

    def type(self, text: str) -> None:
        """Type a line."""
        self._ask("send-keys", "-l", text)
        self.press("Enter")

    def run(self, command: str) -> list[str]:
        """Run what ends by itself, and give what it wrote. The screen is cleared before."""
        self._n_run += 1
        done = f"done {self._n_run}"
        self.type(f"clear; {command}; echo done $(({self._n_run}))")  # not as it is written
        lines = self.until(lambda lines: done in lines)
        return lines[: lines.index(done)]

    def screen(self, *options: str) -> list[str]:
        """Give the lines of the screen, without spaces at their ends."""
        return [line.rstrip() for line in self._ask("capture-pane", "-p", *options).split("\n")]

    def variable(self, name: str) -> str:
        """Give what tmux knows of the terminal under a name of its."""
        return self._ask("display-message", "-p", f"#{{{name}}}").strip()

    def child(self) -> int:
        """Give the number of the process that the shell waits for."""
        pid = self.variable("pane_pid")
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def until(self, holds: Callable[[list[str]], bool]) -> list[str]:
        """Wait for a screen of which something holds, and give it."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < end:
            lines = self.screen()
            if holds(lines):
                return lines
            time.sleep(0.05)
        raise AssertionError("this is not what was waited for:\n" + "\n".join(lines))

    def until_shows(self, text: str) -> list[str]:
        """Wait for a text."""
        return self.until(lambda lines: any(text in line for line in lines))


@contextmanager
def terminal(folder: Path) -> Iterator[Terminal]:
    """Start one; skip where there is no tmux, and none can be installed."""
    try:
        if shutil.which("tmux") is None:
            update_lists()
            install({"tmux": "tmux"})
    except UnavailableError as error:
        pytest.skip(f"no terminal to look at, since there is no tmux: {error}")
    made = Terminal(folder)
    try:
        yield made
    finally:
        made.close()
