"""Limits of a process's address space, which the kernel enforces while memory is free."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from unimem.base import kernel_files
from unimem.base.text import format_bytes

__all__ = ["limit_reached"]

_CHUNK_BYTES = 1 << 16
# A ring takes several mappings at once, and parts with a policy of their own are mappings, too.
_MARGIN = 16
_MANY_MAPS = 262144


def limit_reached(nbytes: int) -> str:
    """Say which limit of its address space keeps this process from so many bytes more.

    The kernel answers ENOMEM to both, as it does where there is no memory.

    Parameters
    ----------
    nbytes : int
        What was refused.

    Returns
    -------
    str
        The limit, what of it is used, and what raises it; empty where neither is reached, or where
        that cannot be read.
    """
    with suppress(OSError, ValueError, MemoryError):
        return _mappings() or _addresses(nbytes)
    return ""


def _mappings() -> str:
    most = kernel_files.read_number("/proc/sys/vm/max_map_count")
    if most is None:
        return ""
    n = 0
    fd = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        while chunk := os.read(fd, _CHUNK_BYTES):
            n += chunk.count(b"\n")
    finally:
        os.close(fd)
    if n + _MARGIN < most:
        return ""
    return (
        f"this process has {n} mappings and may have {most} (vm.max_map_count): "
        f"sysctl vm.max_map_count={max(_MANY_MAPS, 2 * most)}"
    )


def _addresses(nbytes: int) -> str:
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = int(kernel_files.read_bytes("/proc/self/statm").split()[0])
    used = pages * resource.getpagesize()
    if most == resource.RLIM_INFINITY or used + nbytes <= most:
        return ""
    return (
        f"this process has {format_bytes(used)} of addresses and may have {format_bytes(most)} "
        "(RLIMIT_AS): ulimit -v unlimited"
    )
