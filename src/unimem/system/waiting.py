"""Waiting for threads in a way that an interrupt does not cut short."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait, and raise only afterwards what a signal's handler raises meanwhile.

    Asking again and again, since waiting for a thread does not survive an interrupt: Python may
    take the thread for one that has ended.

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
