"""A picture on the whole terminal, what it is made of, and what is typed there."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Self

from rich.console import (
    Console,
    ConsoleDimensions,
    ConsoleOptions,
    Group,
    RenderableType,
    RenderResult,
)
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from unimem.cli import terminal

__all__ = ["Fitted", "Screen", "grid", "line_of"]

# What terminals send, in the normal and in the application mode of the arrow keys.
_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up",
    "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", " ": "page down",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home",
    "\x1b[F": "end", "\x1bOF": "end", "\x1b[4~": "end",
}  # fmt: skip
_KEY = re.compile(r"\x1b[\[O][\d;]*[A-Za-z~]|.", re.S)


class Screen:
    """The whole terminal, which is as it was before whatever happens.

    Keys come one by one and are not shown.

    Parameters
    ----------
    put : callable
        Takes each key, from another thread, and signals, which `obey` is to be called for.
    """

    def __init__(self, put: Callable[[str | signal.Signals], None]) -> None:
        self._put = put
        self._console = Console(
            color_system="auto" if terminal.is_colored(sys.stdout) else None,
            force_terminal=True,
            force_interactive=True,
        )
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._handlers, self._taken = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for number in (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT):
                # What somebody ignores stays ignored.
                if (before := signal.getsignal(number)) != signal.SIG_IGN:
                    stack.callback(signal.signal, number, before or signal.SIG_DFL)
                    signal.signal(number, lambda n, _: self._put(signal.Signals(n)))
            self._take()
            self._handlers = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # A terminal that was closed takes nothing back.
        with suppress(OSError, termios.error), self._handlers:
            self._taken.close()

    @contextmanager
    def _reading(self, fd: int) -> Iterator[None]:
        """Read keys in a thread, up to the end and no further: what is typed then is a shell's."""
        end, ending = os.pipe()
        thread = threading.Thread(target=self._read_keys, args=(fd, end), daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.close(ending)
            thread.join()
            os.close(end)

    def _read_keys(self, fd: int, end: int) -> None:
        with suppress(OSError):  # until the terminal is closed
            while end not in select.select([fd, end], [], [])[0]:
                if not (typed := os.read(fd, 1024).decode(errors="replace")):
                    break
                for key in _KEY.findall(typed):
                    self._put(_KEYS.get(key, key))

    def _take(self) -> None:
        """Take the terminal: what gives it back is there before, since interrupts come any time."""
        with ExitStack() as stack:
            if self._keys is not None:
                modes = termios.tcgetattr(self._keys)
                stack.callback(termios.tcsetattr, self._keys, termios.TCSADRAIN, modes)
                tty.setcbreak(self._keys, termios.TCSADRAIN)
                stack.enter_context(self._reading(self._keys))
            stack.callback(self._live.stop)
            self._live.start()
            self._taken = stack.pop_all()

    def obey(self, number: signal.Signals) -> None:
        """Stop, as Ctrl-Z asks, with the terminal as it was; take it again when it goes on."""
        if number == signal.SIGWINCH:
            return
        self._taken.close()
        if number == signal.SIGTSTP:
            handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)
            signal.signal(signal.SIGTSTP, handler)
        self._take()

    def resize(self) -> tuple[int, int]:
        """Take note of the terminal's columns and lines, and return them."""
        # What the terminal says, not what the environment does, which stays when it changes.
        size = os.get_terminal_size(sys.stdout.fileno())
        self._console.size = ConsoleDimensions(size.columns or 80, size.lines or 24)
        return self._console.size

    def show(self, parts: list[RenderableType]) -> None:
        """Show a picture of the size that `resize` gave."""
        self._live.update(Group(*parts), refresh=True)

    def leave(self, parts: list[RenderableType]) -> None:
        """Write what stays when the picture is gone, without the empty lines at its end."""
        while parts and isinstance(parts[-1], Text) and not parts[-1]:
            parts.pop()
        with suppress(OSError):  # the terminal was closed
            self._console.print(Group(*parts))


class Fitted:
    """Text that is made for the columns that are left for it.

    Parameters
    ----------
    draw : callable
        Takes their number.
    """

    def __init__(self, draw: Callable[[int], Text]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._draw(options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def line_of(*parts: str | Text | tuple[str, str]) -> Text:
    """Put texts, each with its style, one after the other in a line that is never broken."""
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


def grid(*cells: Fitted | str | tuple[str, str] | Text) -> Table:
    """Put texts side by side in a line; the one that is fitted gets what is left of it."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for cell in cells:
        ratio = 1 if isinstance(cell, Fitted) else None
        table.add_column(no_wrap=True, overflow="crop", ratio=ratio)
    table.add_row(*(cell if isinstance(cell, Fitted) else line_of(cell) for cell in cells))
    return table
