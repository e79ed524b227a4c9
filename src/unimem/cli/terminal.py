"""Output of commands on a terminal, and elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any, TextIO

from unimem.base.text import Surface, format_bytes, text_width

# Shorter work has no bar.
_PATIENCE_SECONDS = 0.5


def show(text: str) -> None:
    """Write to standard output at once; an OSError names it."""
    show_all((text,))


def show_all(pieces: Iterable[str]) -> None:
    """Write texts as they are made, as `show` does."""
    try:
        sys.stdout.writelines(pieces)
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def show_path(path: str) -> None:
    """Write a path to standard output in the system's bytes, for programs that will open it."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(path) + b"\n")
        sys.stdout.buffer.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


class Flow:
    r"""Text in pieces, wrapped between words on a terminal.

    Parameters
    ----------
    width : int, optional
        Columns of a line, 0 for none; by default those of the terminal, if standard output is one.

    Examples
    --------
    >>> flow = Flow(9)
    >>> flow.push("One day, Ma") + flow.push("ya") + flow.flush()
    'One day, \nMaya'
    """

    def __init__(self, width: int | None = None) -> None:
        if width is None:
            width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 0
        self._width = width
        self._column = 0
        self._word = ""
        self._word_width = 0

    def push(self, text: str) -> str:
        """Return what can be shown now: all but a word that may go on."""
        if not self._width:
            return text
        shown = ""
        for char in text:
            # Chinese and Japanese have no spaces, and may be broken anywhere.
            width = text_width(char)
            is_wide = width == 2
            if is_wide or char.isspace():
                shown += self.flush()
            if char == "\n":
                self._column = 0
                shown += char
            elif char.isspace():
                # A space beyond the end would begin the next line.
                shown += char if self._column < self._width else ""
                self._column += 1
            else:
                self._word += char
                self._word_width += width
                if self._word_width >= self._width:
                    shown += self.flush()  # longer than a line
        return shown

    def flush(self) -> str:
        """Return the word that was held back."""
        word, width = self._word, self._word_width
        self._word, self._word_width = "", 0
        if self._column + width > self._width and self._column and word:
            self._column = width
            return f"\n{word}"
        self._column += width
        return word


def surface() -> Surface:
    """Return the medium of standard output: the terminal's width, or the usual one."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else Surface().width
    return Surface(width, is_colored(sys.stdout), can_show("█▌░"))


def can_show(text: str) -> bool:
    """Whether standard output can encode these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def is_colored(stream: TextIO) -> bool:
    """Whether a stream shows colours."""
    # https://no-color.org: any value but an empty one counts.
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can do more than lines."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def updates(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of `what` if standard error is a terminal and it takes long.

    It yields a callback for the library's `progress`: the bytes done, and all bytes.
    """
    started = time.monotonic()
    shown: Callable[[int, int], None] | None = None
    with ExitStack() as stack:

        def update(done: int, total: int) -> None:
            nonlocal shown
            if shown is None and time.monotonic() - started > _PATIENCE_SECONDS:
                shown = _bar(stack, what)
            if shown is not None:
                shown(done, total)

        yield update if sys.stderr is not None and is_terminal(sys.stderr) else lambda *_: None


def _bar(stack: ExitStack, what: str) -> Callable[[int, int], None]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        # rich's own writes units of 1000.
        def render(self, task: Task) -> Text:
            return Text("" if task.speed is None else f"{format_bytes(task.speed)}/s")

    bar = stack.enter_context(
        Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(binary_units=True),
            Rate(),
            TimeRemainingColumn(),
            console=Console(stderr=True, no_color=True),
            transient=True,
        )
    )
    task = bar.add_task(what, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


def document_head(schema: str) -> dict[str, Any]:
    """Return the first fields of a command's JSON document: its schema, and unimem's version."""
    return {"schema": schema, "unimem": version("unimem-llm")}
