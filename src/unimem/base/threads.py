"""Run work in several threads and leave none behind, even after an interrupt."""

from __future__ import annotations

import errno
import os
import time
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from queue import Empty, SimpleQueue

from unimem.errors import ClosedError

_TICK_SECONDS = 0.05


def run_in_threads(
    n: int, work: Callable[[], object], *, stop: Callable[[], object], tick: Callable[[], object]
) -> None:
    """Do a piece of work in n threads; all have ended when this returns or raises.

    `work` is called once in each, and `tick` in this thread, 20 times a second. `stop` makes `work`
    return soon; it is called repeatedly at the end, and after any error.

    Raises
    ------
    BaseException
        The error of the first thread, of `tick`, or an interrupt.
    ClosedError
        In a forked child, which has none of the threads.
    OSError
        The system starts no more threads.
    """
    pid = os.getpid()
    started: list[int] = []
    failed: list[BaseException] = []
    ended: deque[None] = deque()
    all_ended: SimpleQueue[None] = SimpleQueue()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)
            stop()
        finally:
            ended.append(None)
            if len(ended) == n:
                all_ended.put(None)

    def is_forked() -> bool:
        return os.getpid() != pid

    def have_ended() -> bool:
        stop()  # each time, since an interrupt may have prevented it
        return len(ended) == len(started) or is_forked()

    try:
        # A single call of C, so that `started` has exactly the existing threads after an interrupt.
        # Starting a `threading.Thread` takes many steps.
        with starting_threads():
            started.extend(map(start_new_thread, repeat(run, n), repeat(())))
        next_tick = time.monotonic() + _TICK_SECONDS
        while len(ended) < n:
            try:
                all_ended.get(timeout=max(0.0, next_tick - time.monotonic()))
            except Empty:
                tick()
                next_tick = time.monotonic() + _TICK_SECONDS
            if is_forked():
                raise ClosedError("a forked child has none of the threads that worked here")
        if failed:
            raise failed[0]
    finally:
        try:
            wait_until(have_ended)
        finally:
            wait_until(have_ended)  # an interrupt may have prevented the first
            failed.clear()  # its traceback refers to this frame


@contextmanager
def starting_threads() -> Iterator[None]:
    """Turn the error of a thread that cannot be started into an OSError that names the limits."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        why = (
            f"{error}: 'ulimit -u', or pids.max of the cgroup, limits how many there are, and "
            "'ulimit -v' the memory for their stacks"
        )
        raise OSError(errno.EAGAIN, why) from None


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until `holds()` is true, and only then raise an error of a signal handler.

    It polls, since waiting for a thread does not survive an interrupt: Python may take the thread
    for ended. An interrupt at the call itself is raised at once, so a caller that must not miss the
    end calls it in a `try`, and again in its `finally`.
    """
    held: BaseException | None = None
    while True:
        try:
            while not holds():
                time.sleep(0.001)
            break
        except BaseException as error:
            held = error
    if held is not None:
        raise held
