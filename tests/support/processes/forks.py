"""Forked children."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import unimem as um

# A thread that ends during a fork may hold a lock of the allocator, and the child would wait for
# ever. glibc takes its locks before a fork; the AddressSanitizer of GCC 12 does not.
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
NO_FORKS = "a fork beside other threads is not for the AddressSanitizer of GCC 12"
needs_fork = pytest.mark.skipif(SANITIZED, reason=NO_FORKS)
counts_faults = pytest.mark.skipif(SANITIZED, reason="AddressSanitizer's shadow memory faults")


def fork() -> int:
    """Fork, as ``os.fork`` does."""
    if SANITIZED:
        pytest.skip(NO_FORKS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy has threads
        return os.fork()


def in_child(use: Callable[[], Any]) -> bool:
    """Tell whether a call returns true in a forked child; False if the child dies."""
    child = fork()
    if child == 0:
        try:
            os._exit(0 if use() else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def refuses(use: Callable[[], Any], *parts: str) -> bool:
    """Tell whether a call raises `ClosedError` because a forked child lacks the memory."""
    try:
        use()
    except um.ClosedError as error:
        return all(part in str(error) for part in (parts or ("forked child", "Block.attach")))
    return False
