"""Interrupts before every line that some code runs, and which threads still run some code."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any


class Interrupt(KeyboardInterrupt):
    """What a signal's handler might raise."""


def at_each_line(call: Callable[[], object], *files: str) -> Iterator[None]:
    """Call again and again, each time interrupted one line later, until no line is left.

    Of the lines in files whose paths have one of these in them.
    """
    for n in itertools.count(1):
        if not is_interrupted(call, n, *files):
            return
        yield


def is_interrupted(call: Callable[[], object], n: int, *files: str) -> bool:
    """Call, interrupted before the nth line of such files; whether it got so far."""
    n_lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n_lines
        if not any(file in frame.f_code.co_filename for file in files) or _is_of_an_end(frame):
            return None
        if event == "line" and not _is_at_a_nop(frame):
            n_lines += 1
            if n_lines == n:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def _is_at_a_nop(frame: FrameType) -> bool:
    """Whether nothing is done here, and no signal handled, as at the line of a `try`.

    Python 3.11 takes it for outside of the `try` around it, whose `finally` would not run.
    """
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["NOP"]


def _is_of_an_end(frame: FrameType | None) -> bool:
    """Whether an object is going, in which nothing can be raised."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def others_in(module: ModuleType) -> list[int]:
    """Other threads that run code of a module."""
    found = []
    for ident, frame in sys._current_frames().items():
        here: FrameType | None = frame
        while here is not None and here.f_code.co_filename != module.__file__:
            here = here.f_back
        if here is not None and ident != threading.get_ident():
            found.append(ident)
    return found
