"""What the C library's malloc has taken from the kernel."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

__all__ = ["MallocBytes", "malloc_bytes"]


class MallocBytes(NamedTuple):
    """Bytes that malloc has; `arenas` and `mmapped` together are `in_use` and `free` together.

    Attributes
    ----------
    arenas : int
        In its heaps, of which the first is ``[heap]`` to the kernel, and others are anonymous.
    mmapped : int
        In mappings of their own, which large pieces get; anonymous to the kernel, too.
    in_use : int
        Given out.
    free : int
        Kept for later requests.
    """

    arenas: int
    mmapped: int
    in_use: int
    free: int


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in """
            arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost
        """.split()
    ]


# glibc has it from 2.33 on, other C libraries have none.
_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _MallInfo


def malloc_bytes() -> MallocBytes | None:
    """Return what glibc's malloc has in this process; None with another C library.

    Any thread may call it.

    Examples
    --------
    >>> from unimem.system.malloc import malloc_bytes
    >>> has = malloc_bytes()
    >>> has is None or has.arenas + has.mmapped == has.in_use + has.free
    True
    """
    if _mallinfo2 is None:
        return None
    info = _mallinfo2()
    # Its own figure of what is in use leaves the mapped pieces out.
    return MallocBytes(info.arena, info.hblkhd, info.uordblks + info.hblkhd, info.fordblks)
