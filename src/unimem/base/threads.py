"""Run work in several threads and leave none of them behind, also after an interrupt."""

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

__all__ = ["run_in_threads", "starting_threads", "wait_until"]

_TICK_SECONDS = 0.05


def run_in_threads(
    n: int, work: Callable[[], object], *, stop: Callable[[], object], tick: Callable[[], object]
) -> None:
    """Do a piece of work in several threads; all have ended when this returns or raises.

    Parameters
    ----------
    n : int
        Threads, at least 1.
    work : callable
        Called in each, once.
    stop : callable
        Makes `work` return soon. Called again and again at the end, and before that once something
        was raised, in any of the threads or here.
    tick : callable
        Called in this thread, 20 times a second.

    Raises
    ------
    BaseException
        What the first of the threads raised, or `tick`, or an interrupt.
    ClosedError
        In the child of a fork (one that `tick` makes), which has none of the threads.
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
        stop()  # each time: an interrupt may have come before it did anything
        return len(ended) == len(started) or is_forked()

    try:
        # A single call, of C: an interrupt comes before or after it, and then `started` has exactly
        # the threads that there are. Starting a `threading.Thread` is many steps between which one
        # may come.
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
            wait_until(have_ended)  # an interrupt may have come before its first line
            failed.clear()  # whose traceback leads back here


@contextmanager
def starting_threads() -> Iterator[None]:
    """Raise OSError, which names the limits, where Python says that it cannot start a thread."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        why = f"{error}: 'ulimit -u', or pids.max of the cgroup, limits how many there are"
        raise OSError(errno.EAGAIN, why) from None


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for threads, and raise only afterwards what a signal's handler raises meanwhile.

    Asking again and again, since waiting for a thread does not survive an interrupt: Python may
    take the thread for one that has ended. An interrupt that comes as this is called is raised at
    once, so who must not miss the end calls it in a `try`, and in its `finally` again.

    Parameters
    ----------
    holds : callable
        Whether what is waited for is there.
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
