"""Plain C that does what unimem is compared with: copying, reading, filling, touching, loading.

A peer, and no part of libunimem: ``libunimem-bench.so`` lies beside it in the package, and
``native/bench`` has its source. Every function gives seconds that are measured inside of C, and
raises OSError with its name where the kernel refuses.
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
    """Copy with memcpy.

    Parameters
    ----------
    table : ndarray of uint64, shape (n, 3)
        To where, from where, and how many bytes, of each copy.

    Returns
    -------
    float
        CPU seconds of this thread for all of them.
    """
    if table.dtype != np.uint64 or table.ndim != 2 or table.shape[1] != 3:
        raise ValueError(
            f"copy wants an array of uint64 of shape (n, 3), found {table.dtype} {table.shape}"
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
    """Free and allocate up to 1 KiB so often, by the process's malloc; CPU seconds."""
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
    """Touch one byte every `step` of a new mapping.

    Parameters
    ----------
    nbytes, step : int
        Of the mapping, which begins at a multiple of `step`.
    pages : {"4k", "thp", "2m"} or bool
        What is asked of the kernel; True is "thp", False is "4k".
    cpus : sequence of int
        A pinned thread runs on each.

    Returns
    -------
    float
        Seconds on the wall, without those of making and dropping the mapping.
    """
    kind = PAGES.index(pages) if isinstance(pages, str) else int(pages)
    sizes = ctypes.c_size_t(nbytes), ctypes.c_size_t(step)
    return _call("touch", *sizes, ctypes.c_int(kind), *_cpus(cpus))


def scan(ranges: Ranges, cpus: Sequence[int]) -> tuple[float, int]:
    """Read ranges of memory word by word.

    Parameters
    ----------
    ranges : sequence of tuple of int
        Address and bytes, a multiple of 8, of each.
    cpus : sequence of int
        A pinned thread runs on each.

    Returns
    -------
    seconds : float
        On the wall.
    total : int
        The sum of all words, modulo 2 to the power of 64.
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
    """Map a file and read it word by word from `offset` to its end.

    Parameters
    ----------
    path : str or Path
        Of the file.
    offset : int
        Where its data begins.
    populate : bool
        Whether to map with MAP_POPULATE.
    cpus : sequence of int
        A pinned thread runs on each.

    Returns
    -------
    seconds : float
        On the wall, from opening to the last word.
    total : int
        As of `scan`.
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
    """Bring a file into new memory on transparent huge pages.

    Parameters
    ----------
    path : str or Path
        Of the file.
    offset : int
        Where its data begins; all of it is loaded, and added up from there.
    way : {"read", "pread", "memcpy", "stream", "touch", "io_uring"}
        By read in one thread, by pread, from a mapping with memcpy or with non-temporal stores
        (ENOSYS where the CPU is no x86), by touching one byte a page of a mapping, or by io_uring.
    request_bytes : int
        At once; a multiple of the page size.
    cpus : sequence of int
        Thread i runs on CPU i modulo their number.
    threads : int
        That load.
    direct : bool
        Past the page cache (O_DIRECT).
    populate : bool
        Whether a thread on each CPU brings in the memory before.
    depth : int
        Requests of io_uring under way.

    Returns
    -------
    seconds : float
        On the wall, from opening until the last byte is there.
    total : int
        As of `scan`, made afterwards.
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
    """Load the library once it is used: most of `unimem bench` goes without."""
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
