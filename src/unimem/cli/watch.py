"""`unimem report PID --watch`: the memory of a process, and what happens to it, as it happens."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from rich.console import Console, ConsoleDimensions, Group
from rich.control import Control
from rich.screen import Screen
from rich.text import Text

import unimem
from unimem.accounting.published import published
from unimem.accounting.report import Report, report
from unimem.cli import terminal
from unimem.cli.watch_state import Sample, State
from unimem.cli.watch_view import frame, whole
from unimem.system.limits import memory_limits
from unimem.system.pressure import memory_pressure, paged_in_bytes
from unimem.system.process import counters

__all__ = ["SCHEMA", "watch"]

SCHEMA = "unimem.watch/1"

# Reading the memory of a large process is work for the kernel: it gets this share of a core, and
# is read less often than asked where that is not enough.
_SHARE = 0.04
_LONGEST_WAIT = 1.0  # how long a picture stays while a sample does not come
_SHORTEST, _LONGEST = 0.1, 86400.0
_BLOCKS = "▼░▏█▁"

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# What terminals send, in the normal and in the application mode of the arrow keys.
_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up",
    "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", " ": "page down",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home",
    "\x1b[F": "end", "\x1bOF": "end", "\x1b[4~": "end",
}  # fmt: skip
# A byte that the bell is rung with.
_SIGNALS = {signal.SIGWINCH: b"w", signal.SIGTSTP: b"t", signal.SIGCONT: b"c"}
_KEY = re.compile(r"\x1b[\[O][\d;]*[A-Za-z~]|.", re.S)


def watch(pid: int, interval: float = 1.0, count: int | None = None, as_json: bool = False) -> None:
    """Show the memory of a process until it ends, or somebody has seen enough.

    On a terminal that is one picture, which keys change; elsewhere a block of text for each sample,
    or a line of JSON.

    Parameters
    ----------
    pid : int
        Its number.
    interval : float, default 1.0
        Seconds from one sample to the next. The memory of a process for which that takes too much
        of a core is read less often, and the picture says when.
    count : int, optional
        Samples to show; by default there is no end.
    as_json : bool
        Write lines of JSON, also to a terminal.

    Raises
    ------
    ProcessLookupError, PermissionError
        There is no such process, or it is not ours to look at.
    ValueError
        The interval or the count is out of range.
    """
    if not _SHORTEST <= interval <= _LONGEST:
        raise ValueError(
            f"--interval: expected {_SHORTEST:g} to {_LONGEST:.0f} seconds, got {interval:g}"
        )
    if count is not None and count < 1:
        raise ValueError(f"--count: expected at least 1, got {count}")
    state = State(pid, interval)
    with ExitStack() as stack:
        bell = stack.enter_context(_Bell())
        surface: _Surface
        if as_json:
            surface = _Lines(bell)
        elif terminal.is_terminal(sys.stdout):
            surface = stack.enter_context(_Screen(bell))
        else:
            surface = _Blocks(bell)
        _run(state, _Reader(pid, bell), surface, count)
    if state.ended:
        print(f"process {pid}: {state.ended}", file=sys.stderr if as_json else sys.stdout)


def _run(state: State, reader: _Reader, surface: _Surface, count: int | None) -> None:
    """Ask for samples and show them, and obey keys meanwhile."""
    is_asked, asked = False, -float("inf")
    while not (state.has_quit or state.ended or state.n_samples == count):
        now = time.monotonic()
        if not is_asked and not state.is_paused and now >= asked + state.interval:
            reader.ask()
            is_asked, asked = True, now
        wait: float | None = asked + state.interval - now
        if is_asked:
            wait = _LONGEST_WAIT
        elif state.is_paused:
            wait = None
        for key in surface.wait(wait):
            state.press(key)
        sample = reader.answer()
        if sample is not None:
            is_asked = False
            _take(state, sample)
        state.late_seconds = time.monotonic() - asked if is_asked else 0.0
        if not state.ended:
            surface.show(state, is_new=sample is not None)


def _take(state: State, sample: Sample | Exception) -> None:
    if isinstance(sample, ProcessLookupError) and state.first is not None:
        state.end("it has ended")
    elif isinstance(sample, Exception):
        raise sample
    else:
        state.take(sample)


# ---- reading -------------------------------------------------------------------------------------


class _Bell:
    """What a thread waits at for others and for signals, beside keys: a pipe."""

    def __enter__(self) -> _Bell:
        self.fd, self._ringing = os.pipe()
        for fd in (self.fd, self._ringing):
            os.set_blocking(fd, False)
        return self

    def __exit__(self, *_: object) -> None:
        # A reader that comes late rings nothing that was opened since.
        self._ringing, ringing = -1, self._ringing
        os.close(ringing)
        os.close(self.fd)

    def ring(self, what: bytes = b".") -> None:
        with suppress(OSError):  # full: who waits will look anyway; closed: nobody waits
            os.write(self._ringing, what)

    def heard(self) -> bytes:
        """Give what it was rung with since."""
        with suppress(BlockingIOError):
            return os.read(self.fd, 4096)
        return b""


class _Reader:
    """Reads samples in a thread of its own: the kernel lets who reads wait for a process's locks.

    It is for one thread. One that waits is left alone when the command ends.
    """

    def __init__(self, pid: int, bell: _Bell) -> None:
        self._pid, self._bell = pid, bell
        self._asked: SimpleQueue[None] = SimpleQueue()
        self._answers: SimpleQueue[Sample | Exception] = SimpleQueue()
        self._report: Report | None = None
        self._report_seconds = self._report_rest = 0.0
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self) -> None:
        """Have a sample read."""
        self._asked.put(None)

    def answer(self) -> Sample | Exception | None:
        """Give the sample that was asked for, or why there is none; None: it is being read."""
        with suppress(Empty):
            return self._answers.get_nowait()
        return None

    def _work(self) -> None:
        while True:
            self._asked.get()
            try:
                answer: Sample | Exception = self._read()
            except Exception as error:
                answer = error
            self._answers.put(answer)
            self._bell.ring()

    def _read(self) -> Sample:
        done = counters(self._pid)
        seconds, clock = time.monotonic(), time.time()
        if self._report is None or seconds >= self._report_seconds + self._report_rest:
            start = time.thread_time()
            self._report = report(self._pid)
            self._report_seconds = seconds
            self._report_rest = (time.thread_time() - start) / _SHARE
        shown = published(self._pid)
        return Sample(
            seconds=seconds,
            clock=clock,
            up_seconds=time.clock_gettime(time.CLOCK_BOOTTIME) - done.started / _TICKS_PER_SECOND,
            counters=done,
            report=self._report,
            report_seconds=self._report_seconds,
            report_rest=self._report_rest,
            published={} if shown is None else shown.counters,
            paged_in_bytes=paged_in_bytes(),
            pressure=memory_pressure(self._pid),
            limits=memory_limits(self._pid),
        )


# ---- showing -------------------------------------------------------------------------------------


class _Surface(Protocol):
    """Where samples are shown."""

    def wait(self, seconds: float | None) -> list[str]:
        """Wait for a sample, a key or the end of the time, and give the keys."""

    def show(self, state: State, *, is_new: bool) -> None:
        """Show what there is; `is_new` when a sample has come."""


class _Lines:
    """A line of JSON for each sample."""

    def __init__(self, bell: _Bell) -> None:
        self._bell = bell

    def wait(self, seconds: float | None) -> list[str]:
        select.select([self._bell.fd], [], [], seconds)
        self._bell.heard()
        return []

    def show(self, state: State, *, is_new: bool) -> None:
        if is_new:
            document = {"schema": SCHEMA, "unimem": unimem.__version__} | state.document()
            terminal.show(json.dumps(document, allow_nan=False) + "\n")


class _Blocks(_Lines):
    """A block of text for each sample."""

    def show(self, state: State, *, is_new: bool) -> None:
        if is_new:
            lines = whole(state, terminal.surface().width, blocks=terminal.can_show(_BLOCKS))
            terminal.show("".join(f"{line.plain.rstrip()}\n" for line in [*lines, Text()]))


class _Screen:
    """A picture on the whole terminal, which is as it was before whatever happens.

    Keys come one by one and are not shown. What was seen last stays when the picture goes.
    """

    def __init__(self, bell: _Bell) -> None:
        self._bell = bell
        self._console = Console(
            file=sys.stdout, force_terminal=True, force_interactive=True, highlight=False
        )
        self._has_blocks = terminal.can_show(_BLOCKS)
        self._has_colors = terminal.is_colored(sys.stdout)
        self._keys = [sys.stdin.fileno()] if sys.stdin is not None and sys.stdin.isatty() else []
        self._seen: State | None = None
        self._handlers = ExitStack()
        self._taken = ExitStack()

    def __enter__(self) -> _Screen:
        with ExitStack() as stack:
            for number, rings in _SIGNALS.items():
                # What somebody ignores stays ignored.
                if (before := signal.getsignal(number)) != signal.SIG_IGN:
                    stack.callback(signal.signal, number, before or signal.SIG_DFL)
                    signal.signal(number, lambda *_, rings=rings: self._bell.ring(rings))
            self._take()
            self._handlers = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # A terminal that was closed takes nothing back, and shows nothing.
        with suppress(OSError, termios.error), self._handlers:
            self._give_back()
            if self._seen is not None and self._seen.now is not None:
                self._seen.shows_help = False
                self._leave(self._picture(self._seen)[:-1])

    def _leave(self, lines: list[Text]) -> None:
        """Write what stays on the screen."""
        while not lines[-1]:
            lines.pop()
        for line in lines:
            self._console.print(line, no_wrap=True, overflow="crop")

    def _take(self) -> None:
        """Take the terminal: what gives it back is there before, since interrupts come any time."""
        with ExitStack() as stack:
            if self._keys:
                modes = termios.tcgetattr(self._keys[0])
                stack.callback(termios.tcsetattr, self._keys[0], termios.TCSADRAIN, modes)
                tty.setcbreak(self._keys[0], termios.TCSADRAIN)
            stack.callback(self._console.set_alt_screen, False)
            self._console.set_alt_screen(True)
            stack.callback(self._console.show_cursor, True)
            self._console.show_cursor(False)
            self._taken = stack.pop_all()

    def _give_back(self) -> None:
        self._taken.close()

    def _stop(self) -> None:
        """Stop, as Ctrl-Z asks, with the terminal as it was; go on when that is asked for."""
        self._give_back()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._take()

    def wait(self, seconds: float | None) -> list[str]:
        ready, _, _ = select.select([self._bell.fd, *self._keys], [], [], seconds)
        heard = self._bell.heard()
        if _SIGNALS[signal.SIGTSTP] in heard:
            self._stop()
        elif _SIGNALS[signal.SIGCONT] in heard:  # who stopped us did not ask; a shell was here
            self._give_back()
            self._take()
        if not set(ready) & set(self._keys):
            return []
        typed = os.read(self._keys[0], 1024).decode(errors="replace")
        if not typed:  # nobody will type any more
            self._keys = []
        return [_KEYS.get(key, key) for key in _KEY.findall(typed)]

    def show(self, state: State, *, is_new: bool) -> None:
        self._seen = state
        lines = self._picture(state)
        with self._console:  # what is printed is written at once
            self._console.control(Control.home())
            self._console.print(Screen(Group(*lines)), end="")

    def _picture(self, state: State) -> list[Text]:
        size = _size()
        self._console.size = ConsoleDimensions(size.columns, size.lines)
        lines = frame(state, size.columns, size.lines, blocks=self._has_blocks)
        return lines if self._has_colors else [Text(line.plain, no_wrap=True) for line in lines]


def _size() -> os.terminal_size:
    """Give what the terminal says; not what the environment does, which stays when it changes."""
    size = os.get_terminal_size(sys.stdout.fileno())
    return os.terminal_size((size.columns or 80, size.lines or 24))
