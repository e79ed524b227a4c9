"""Calls in several threads at once, with frequent switches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def switching_often(seconds: float = 1e-6) -> Iterator[None]:
    """Let the interpreter switch threads after every microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def at_once(n_threads: int, work: Callable[[int], object]) -> None:
    """Call ``work(0)``, ``work(1)`` and so on, each in a thread, and raise their first error."""
    start = threading.Barrier(n_threads)

    def begin(number: int) -> None:
        start.wait()
        work(number)

    with switching_often(), ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(begin, range(n_threads)))
