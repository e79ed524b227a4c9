"""`unimem report PID --watch`: the memory of a process, and what happens to it, as it happens."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue

from rich.console import Console, Group, RenderableType

from unimem.accounting.samples import Sample, Sampler
from unimem.cli import terminal
from unimem.cli.documents import document_head
from unimem.cli.html_page import page_at_end
from unimem.cli.screen import Screen
from unimem.cli.watch_state import State
from unimem.cli.watch_view import LEAST_WIDTH, frame, whole

__all__ = ["SCHEMA", "watch"]

SCHEMA = "unimem.watch/1"

_LONGEST_WAIT = 1.0  # how long a picture stays while a sample does not come
_SHORTEST, _LONGEST = 0.1, 86400.0
_BLOCKS = "▼░▌█▁"

# A sample or why there is none, a key, or a signal.
_Event = Sample | Exception | str | signal.Signals
_Events = SimpleQueue[_Event]
_Show = Callable[[State, _Event | None], None]


def watch(
    pid: int,
    interval: float = 1.0,
    count: int | None = None,
    as_json: bool = False,
    html: str | None = None,
) -> None:
    """Show the memory of a process until it ends, or somebody has seen enough.

    On a terminal that is one picture, which keys change; elsewhere a block of text for each of
    `count` samples, or a line of JSON. At the end it writes the page `html`.

    Raises
    ------
    ProcessLookupError, PermissionError
        There is no such process, or it is not ours to look at.
    ValueError
        The interval or the count is out of range.
    OSError
        The page cannot be written.
    """
    if not _SHORTEST <= interval <= _LONGEST:
        expected = f"expected {_SHORTEST:g} to {_LONGEST:.0f} seconds"
        raise ValueError(f"--interval: {expected}, got {interval:g}")
    if count is not None and count < 1:
        raise ValueError(f"--count: expected at least 1, got {count}")
    state, events = State(pid, interval), _Events()
    with ExitStack() as stack:
        if html is not None:
            stack.enter_context(page_at_end(html, lambda: (state.now, state.growth)))
        show: _Show = _print_json if as_json else _print_lines
        if not as_json and terminal.is_terminal(sys.stdout):
            show = stack.enter_context(_picture(state, events))
        _run(state, Sampler(pid), events, count, show)
    if state.ended:
        print(f"process {pid}: {state.ended}", file=sys.stderr if as_json else sys.stdout)


def _run(state: State, sampler: Sampler, events: _Events, count: int | None, show: _Show) -> None:
    """Ask for samples and show them, and obey keys and signals meanwhile."""
    is_asked, asked = False, -float("inf")
    while not (state.has_quit or state.ended or state.n_samples == count):
        now = time.monotonic()
        if not is_asked and not state.is_paused and now >= asked + state.interval:
            # The kernel lets who reads wait for a process's locks. A thread that waits is left
            # alone when the command ends.
            threading.Thread(target=_read, args=(sampler, events), daemon=True).start()
            is_asked, asked = True, now
        wait = None if state.is_paused else max(0.0, asked + state.interval - now)
        event = None
        with suppress(Empty):
            event = events.get(timeout=_LONGEST_WAIT if is_asked else wait)
        if isinstance(event, str):
            state.press(event)
        elif isinstance(event, (Sample, Exception)):
            is_asked = False
            if isinstance(event, Sample):
                state.take(event)
            elif isinstance(event, ProcessLookupError) and state.first is not None:
                state.ended = "it has ended"
            else:
                raise event
        state.late_seconds = time.monotonic() - asked if is_asked else 0.0
        if not state.ended:
            show(state, event)


def _read(sampler: Sampler, events: _Events) -> None:
    try:
        events.put(sampler.sample())
    except Exception as error:
        events.put(error)


def _print_json(state: State, event: _Event | None) -> None:
    if isinstance(event, Sample):
        document = document_head(SCHEMA) | state.document()
        terminal.show(json.dumps(document, allow_nan=False) + "\n")


def _print_lines(state: State, event: _Event | None) -> None:
    if not isinstance(event, Sample):
        return
    width = max(terminal.surface().width, LEAST_WIDTH)
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(Group(*whole(state, width, blocks=terminal.can_show(_BLOCKS))))
    terminal.show("".join(f"{line.rstrip()}\n" for line in [*capture.get().splitlines(), ""]))


@contextmanager
def _picture(state: State, events: _Events) -> Iterator[_Show]:
    """Take the whole terminal for a picture. What was seen last stays when it goes."""
    screen = Screen(events.put)

    def draw() -> list[RenderableType]:
        width, height = screen.resize()
        return frame(state, width, height, blocks=terminal.can_show(_BLOCKS))

    def show(_: State, event: _Event | None) -> None:
        if isinstance(event, signal.Signals):
            screen.obey(event)
        screen.show(draw())

    try:
        with screen:
            yield show
    finally:
        if state.now is not None:
            state.shows_help = False
            with suppress(OSError):  # the terminal was closed
                screen.leave(draw()[:-1])
