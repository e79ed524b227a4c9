"""Interrupts before every line of some code, and threads that run it."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any


class Interrupt(KeyboardInterrupt):
    """An interrupt, as a signal handler might raise it."""


def at_each_line(
    call: Callable[[], object], *files: str, also_ends: bool = False
) -> Iterator[None]:
    """Repeat a call, each time interrupted one line later, until it ends.

    Lines count if the path of their file contains one of `files`; with `also_ends` those of
    finalizers, too, which are cut off there and raise nothing.
    """
    for n in itertools.count(1):
        if not is_interrupted(call, n, *files, also_ends=also_ends):
            return
        yield


def is_interrupted(
    call: Callable[[], object], n: int, *files: str, also_ends: bool = False
) -> bool:
    """Call, with an interrupt before the nth line; return whether the call reached it."""
    n_lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n_lines
        if not any(file in frame.f_code.co_filename for file in files):
            return None
        if not also_ends and _is_of_an_end(frame):
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
    return also_ends and n_lines >= n


def _is_at_a_nop(frame: FrameType) -> bool:
    """Tell whether the line does nothing and handles no signal, as a `try`.

    Python 3.11 takes it for outside the `try`, and would not run its `finally`.
    """
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["NOP"]


def _is_of_an_end(frame: FrameType | None) -> bool:
    """Tell whether a finalizer runs, which cannot raise."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def others_in(module: ModuleType) -> list[int]:
    """Return the other threads that run code of a module."""
    found = []
    for ident, frame in sys._current_frames().items():
        here: FrameType | None = frame
        while here is not None and here.f_code.co_filename != module.__file__:
            here = here.f_back
        if here is not None and ident != threading.get_ident():
            found.append(ident)
    return found
