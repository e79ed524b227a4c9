"""Plain C that does what unimem is compared with: copying, reading, filling, touching, loading.

It is a peer, and not part of libunimem: ``libunimem-bench.so`` lies beside it in the package, and
``bench/native`` has its source. Every function returns seconds measured inside C, and raises
OSError with its name if the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import unimem as um

__all__ = [
    "Pages", "Ranges", "Way", "cached_bytes", "churn", "copy", "copy_by_threads", "fill",
    "fill_by_threads", "load", "map_and_scan", "read", "scan", "touch",
]  # fmt: skip

Way = Literal["read", "pread", "memcpy", "stream", "touch", "io_uring"]
Pages = Literal["4k", "thp", "2m"]
Ranges = Sequence[tuple[int, int]]

WAYS: tuple[Way, ...] = ("read", "pread", "memcpy", "stream", "touch", "io_uring")
PAGES: tuple[Pages, ...] = ("4k", "thp", "2m")


class Loading(ctypes.Structure):
    """``bench_loading`` of bench/native/file.c."""

    _fields_ = (
        ("way", ctypes.c_int),
        ("direct", ctypes.c_int),
        ("populate", ctypes.c_int),
        ("n_threads", ctypes.c_int),
        ("request_nbytes", ctypes.c_size_t),
        ("depth", ctypes.c_uint),
    )


# ---- in CPU time of this thread ----


def copy(table: NDArray[np.uint64]) -> float:
    """Copy with memcpy; CPU seconds of this thread for all copies.

    Each row of `table`, uint64 of shape (n, 3), has the target, the source and the number of bytes.
    """
    if table.dtype != np.uint64 or table.ndim != 2 or table.shape[1] != 3:
        raise ValueError(
            f"copy needs an array of uint64 of shape (n, 3), found {table.dtype} {table.shape}"
        )
    table = np.ascontiguousarray(table)
    return _call("copy", ctypes.c_void_p(table.ctypes.data), ctypes.c_size_t(len(table)))


def read(address: int, nbytes: int) -> float:
    """Read every word of 8 bytes once; CPU seconds of this thread."""
    return _call("read", ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def fill(address: int, nbytes: int, value: int) -> float:
    """Write every byte with memset; CPU seconds of this thread."""
    return _call("fill", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(value))


def churn(n: int) -> float:
    """Free and allocate up to 1 KiB `n` times, by the process's malloc; CPU seconds."""
    return _call("churn", ctypes.c_size_t(n))


# ---- on the wall, by a pinned thread on each CPU ----


def copy_by_threads(to: int, source: int, nbytes: int, cpus: Sequence[int]) -> float:
    """Copy with memcpy, a part by each thread; seconds on the wall."""
    size = ctypes.c_size_t(nbytes)
    places = ctypes.c_void_p(to), ctypes.c_void_p(source)
    return _call("copy_by_threads", *places, size, *_cpus(cpus))


def fill_by_threads(address: int, nbytes: int, value: int, cpus: Sequence[int]) -> float:
    """Write with memset, a part by each thread; seconds on the wall."""
    what = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(value)
    return _call("fill_by_threads", *what, *_cpus(cpus))


def touch(nbytes: int, step: int, pages: Pages | bool, cpus: Sequence[int]) -> float:
    """Touch one byte every `step` of a new mapping that begins at a multiple of `step`.

    `pages` are requested from the kernel; True is "thp", False is "4k". A pinned thread runs on
    each of `cpus`. Seconds on the wall, without making and dropping the mapping.
    """
    kind = PAGES.index(pages) if isinstance(pages, str) else int(pages)
    sizes = ctypes.c_size_t(nbytes), ctypes.c_size_t(step)
    return _call("touch", *sizes, ctypes.c_int(kind), *_cpus(cpus))


def scan(ranges: Ranges, cpus: Sequence[int]) -> tuple[float, int]:
    """Read ranges of memory word by word, with a pinned thread on each of `cpus`.

    A range is an address and a number of bytes, a multiple of 8. Returns seconds on the wall, and
    the sum of all words modulo 2 to the power of 64.
    """
    table = np.array(ranges, np.uint64).reshape(-1, 2)
    total = ctypes.c_uint64()
    where = ctypes.c_void_p(table.ctypes.data), ctypes.c_size_t(len(table))
    seconds = _call("scan", *where, *_cpus(cpus), ctypes.byref(total))
    return seconds, total.value


# ---- files ----


def map_and_scan(
    path: str | Path, offset: int, *, populate: bool, cpus: Sequence[int]
) -> tuple[float, int]:
    """Map a file and read it word by word from `offset` to its end, as `scan` does.

    `populate` maps with MAP_POPULATE. The seconds are from opening to the last word.
    """
    total = ctypes.c_uint64()
    where = os.fsencode(path), ctypes.c_size_t(offset), ctypes.c_int(populate)
    seconds = _call("map_and_scan", *where, *_cpus(cpus), ctypes.byref(total))
    return seconds, total.value


def load(
    path: str | Path,
    offset: int,
    way: Way,
    request_bytes: int,
    *,
    cpus: Sequence[int],
    threads: int = 1,
    direct: bool = False,
    populate: bool = False,
    depth: int = 0,
) -> tuple[float, int]:
    """Load a file into new memory on transparent huge pages; add it up from `offset` on.

    It is read in one thread, by pread, from a mapping by memcpy or non-temporal stores (ENOSYS
    unless the CPU is x86), by touching one byte a page of a mapping, or by io_uring with `depth`
    requests under way; `request_bytes`, a multiple of the page size, at once. Thread i runs on CPU
    i modulo their number. `direct` bypasses the page cache (O_DIRECT); `populate` touches the
    memory first, with a thread on each CPU. Returns seconds on the wall from opening to the last
    byte, and the sum as `scan`.
    """
    how = Loading(WAYS.index(way), direct, populate, threads, request_bytes, depth)
    total = ctypes.c_uint64()
    where = os.fsencode(path), ctypes.c_size_t(offset), ctypes.byref(how)
    seconds = _call("load", *where, *_cpus(cpus), ctypes.byref(total))
    return seconds, total.value


def cached_bytes(path: str | Path) -> int:
    """Count the bytes of a file, in whole pages, that are in the page cache."""
    return int(_call("cached_bytes", os.fsencode(path)))


# ---- the library ----


@cache
def _library() -> ctypes.CDLL:
    """Load the library at first use: most of `unimem bench` does not need it."""
    path = Path(um.get_library()).with_name("libunimem-bench.so")
    return ctypes.CDLL(str(path), use_errno=True)


def _call(name: str, *arguments: Any) -> float:
    function = _library()[f"bench_{name}"]
    function.restype = ctypes.c_double
    seconds = float(function(*arguments))
    if seconds < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name} of libunimem-bench: {os.strerror(code)}")
    return seconds


def _cpus(cpus: Sequence[int]) -> tuple[Any, ctypes.c_int]:
    return (ctypes.c_int * len(cpus))(*cpus), ctypes.c_int(len(cpus))
