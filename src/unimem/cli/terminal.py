"""What commands show on a terminal, and what they leave out where there is none."""

from __future__ import annotations

import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from unimem.system.text import format_bytes

__all__ = [
    "Flow",
    "bad",
    "dim",
    "good",
    "heading",
    "is_colored",
    "is_terminal",
    "one_line",
    "printable",
    "show",
    "show_path",
    "tint",
    "updates",
]

# What is ready sooner needs no bar.
_PATIENCE_SECONDS = 0.5

# A model may write anything, and a terminal would obey control characters, and those that turn the
# direction of what follows (Unicode's bidirectional embeddings, overrides and isolates) or end a
# line; these show instead.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_VISIBLE |= {
    code: f"\\u{code:04x}"
    for code in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
_VISIBLE |= {ord("\n"): "\\n", ord("\t"): "\\t"}
_VISIBLE_IN_LINES = {code: shown for code, shown in _VISIBLE.items() if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    r"""Write control characters, except line ends and tabs, as ``\x1b`` and the like.

    Examples
    --------
    >>> print(printable("one\x1b[2J"))
    one\x1b[2J
    """
    return text.translate(_VISIBLE_IN_LINES)


def one_line(text: str) -> str:
    r"""Write all control characters so, as of names and paths, which cannot fake another line then.

    Examples
    --------
    >>> print(one_line("one\ntwo"))
    one\ntwo
    """
    return text.translate(_VISIBLE)


def show(text: str) -> None:
    """Write to standard output, at once.

    Raises
    ------
    OSError
        It cannot be written; `filename` says so.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def show_path(path: str) -> None:
    """Write a path to standard output as the system has it, for programs that will open it.

    Raises
    ------
    OSError
        As `show`.
    """
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(path) + b"\n")
        sys.stdout.buffer.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


class Flow:
    r"""Text that comes in pieces, broken between words where a line of the terminal ends.

    Where standard output is no terminal, it stays as it is.

    Parameters
    ----------
    width : int, optional
        Columns of a line, 0 for none; by default those of the terminal.

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
        """Give what can be shown now: all but a word that may go on."""
        if not self._width:
            return text
        shown = ""
        for char in text:
            # Chinese and Japanese are written without spaces, and may be broken anywhere.
            is_wide = unicodedata.east_asian_width(char) in ("W", "F")
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
                self._word_width += 2 if is_wide else 1
                if self._word_width >= self._width:
                    shown += self.flush()  # no line is long enough for it
        return shown

    def flush(self) -> str:
        """Give the word that was kept back."""
        word, width = self._word, self._word_width
        self._word, self._word_width = "", 0
        if self._column + width > self._width and self._column and word:
            self._column = width
            return f"\n{word}"
        self._column += width
        return word


def dim(text: str) -> str:
    """Make text recede, where standard output shows colours."""
    return _styled(text, "\x1b[2m")


def heading(text: str) -> str:
    """Make text stand out, where standard output shows colours."""
    return _styled(text, "\x1b[1m")


def good(text: str) -> str:
    """Make text green, where standard output shows colours."""
    return _styled(text, "\x1b[32m")


def bad(text: str) -> str:
    """Make text yellow, where standard output shows colours: it is worth a look, and no error."""
    return _styled(text, "\x1b[33m")


def tint(text: str) -> str:
    """Give text the colour of bars, where standard output shows colours."""
    return _styled(text, "\x1b[36m")


def _styled(text: str, code: str) -> str:
    return f"{code}{text}\x1b[0m" if is_colored(sys.stdout) else text


def is_colored(stream: TextIO) -> bool:
    """Whether a stream shows colours."""
    # https://no-color.org: any value but an empty one counts.
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that more than lines can be written to."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def updates(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far something long is, if standard error is a terminal and it does take long.

    Parameters
    ----------
    what : str
        What is going on.

    Yields
    ------
    callable
        To be given to the library as `progress`: it takes the bytes that are done, and all bytes.
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
