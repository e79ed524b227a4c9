"""The heaps of a process: the bytes of the C library's malloc, and warming Python's own."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

# CPython's allocator (Objects/obmalloc.c) has pools for each size up to _LARGEST, in arenas of a
# mebibyte.
_LARGEST, _STEP = 512, 16
_POOL_BYTES = 16 << 10
_TOUCHED_BYTES = 2 << 20

# An object that keeps its arena: an arena without objects would be returned to the system.
_kept: list[bytes] = []


class MallocBytes(NamedTuple):
    """The bytes that malloc has: `arenas` + `mmapped` equals `in_use` + `free`.

    The kernel calls the first of its heaps (arenas) ``[heap]``, and shows others, and the mappings
    of large pieces, as anonymous.
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


# Only glibc has it, from 2.33 on.
_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _MallInfo


def malloc_bytes() -> MallocBytes | None:
    """Return the bytes of glibc's malloc in this process; None with another C library.

    Any thread may call it.

    Examples
    --------
    >>> from unimem.system.heap import malloc_bytes
    >>> has = malloc_bytes()
    >>> has is None or has.arenas + has.mmapped == has.in_use + has.free
    True
    """
    if _mallinfo2 is None:
        return None
    info = _mallinfo2()
    # glibc's figure of bytes in use omits the mapped pieces.
    return MallocBytes(info.arena, info.hblkhd, info.uordblks + info.hblkhd, info.fordblks)


def _take(nbytes: int, size: int) -> list[bytes]:
    return [bytes(size - bytes.__basicsize__) for _ in range(nbytes // size + 1)]


def warm_python_heap() -> None:
    """Touch 2 MiB for the small objects of a loop; at least 1 MiB of them stays.

    A loop that makes a few objects per token would otherwise touch a new page now and then: a minor
    fault. Objects of more than 512 bytes are in the C library's heap, which this does not touch.
    """
    # New pools. The object in the middle keeps an arena that was touched as a whole.
    made = _take(_TOUCHED_BYTES, _LARGEST)
    _kept[:] = [made[len(made) // 2]]
    del made
    # The rest of the current pool of each size.
    smallest = -(-bytes.__basicsize__ // _STEP) * _STEP
    for size in range(smallest, _LARGEST + 1, _STEP):
        _take(_POOL_BYTES, size)
    [float(i) for i in range(_POOL_BYTES // (2 * _STEP) + 1)]
    [object() for _ in range(_POOL_BYTES // _STEP + 1)]
