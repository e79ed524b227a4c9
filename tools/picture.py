"""A picture of a command on a terminal: ``python tools/picture.py FILE.svg [WORD ...]``.

It runs ``unimem WORD ...`` on a terminal of 80 columns, by default ``unimem run -n 60``, and draws
what that showed. README.md has the picture of such a run.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

__all__ = ["draw", "record"]

_WIDTH = 80
# No font is fetched from elsewhere.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.S)


def record(words: list[str]) -> str:
    """Run a command on a terminal, and return what it showed."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": str(_WIDTH), "LINES": "50"}
    env.pop("NO_COLOR", None)
    shown = b""
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env):
        os.close(theirs)
        with suppress(OSError):  # EIO: the command has ended
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def draw(title: str, shown: str) -> str:
    """Return an SVG of text with a terminal's colours."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown.rstrip()), highlight=False)
    svg = console.export_svg(title=title, theme=MONOKAI, code_format=_FORMAT, unique_id="unimem")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    """Draw what the command line asks for."""
    file, *words = sys.argv[1:]
    words = words or ["run", "-n", "60"]
    shown = record([sys.executable, "-m", "unimem", *words])
    Path(file).write_text(draw(f"$ unimem {' '.join(words)}", shown), encoding="utf-8")


if __name__ == "__main__":
    main()
