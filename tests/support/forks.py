"""What a forked child finds."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import unimem as um

# Where another thread held a lock of the C library's, or of a sanitizer's, a child waits for ever.
CHILD_SECONDS = 100


def in_child(use: Callable[[], Any]) -> bool:
    """Whether it is so in a forked child; False also when that dies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads, of NumPy
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_SECONDS)
            os._exit(0 if use() else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def refuses(use: Callable[[], Any], *parts: str) -> bool:
    """Whether a call says that the memory is left out of a child."""
    try:
        use()
    except um.ClosedError as error:
        return all(part in str(error) for part in (parts or ("forked child", "Block.attach")))
    return False
