"""Memory and the page cache in a known state: unknown ones change results by 2 to 50 times."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

import unimem as um
from unimem.system.limits import available_bytes
from unimem.system.process import read_process
from unimem_bench import plain
from unimem_bench.suite import NotMeasured

__all__ = [
    "HUGE_PAGE", "available_bytes", "drop", "file_system", "heat", "in_huge_pages", "read_through",
    "ready",
]  # fmt: skip

HUGE_PAGE = 2 << 20
READ_BYTES = 8 << 20  # at once
N_TRIES = 4  # to get memory back from the host
DROP_CACHES = Path("/proc/sys/vm/drop_caches")

_fastest: dict[int, float] = {}  # of a number of CPUs: bytes a second


def ready(nbytes: int, cpus: Sequence[int]) -> None:
    """Touch and free so much, until that is fast: what was free for seconds is the host's.

    A virtual machine gives back what is free, and touching it again takes up to 50 times as long.

    Parameters
    ----------
    nbytes : int
        What will be taken.
    cpus : sequence of int
        Where it is touched, by a pinned thread on each.

    Raises
    ------
    NotMeasured
        If there is less than that.
    """
    if nbytes > (room := available_bytes()):
        raise NotMeasured(f"wants {nbytes / 1e9:.1f} GB of memory, {room / 1e9:.1f} GB are free")
    # Threads have to be started, and of a little memory that would be the most of its time.
    nbytes = max(nbytes, 16 * HUGE_PAGE)
    for _ in range(N_TRIES):
        speed = nbytes / plain.touch(nbytes, HUGE_PAGE, "thp", cpus)
        known = _fastest.get(len(cpus), 0.0)
        _fastest[len(cpus)] = max(known, speed)
        if 0 < known < 2 * speed:
            return


def drop(path: Path) -> None:
    """Take a file out of the page cache, and see that it is gone.

    Raises
    ------
    NotMeasured
        If some of it stays, as where a process maps it, or where it lies in memory only. Only root
        can drop what ``posix_fadvise`` leaves.
    OSError
        If it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if plain.cached_bytes(path):
        with suppress(OSError):  # not root
            DROP_CACHES.write_text("3")
    if left := plain.cached_bytes(path):
        raise NotMeasured(
            f"wants {path.name} on the disk only, {left} bytes stay in the page cache"
        )


def heat(path: Path) -> float:
    """Bring a file into the page cache anew, in large folios, which huge pages map.

    One that was just written in small pieces lies in small folios, and is mapped page by page. Of a
    file that `drop` cannot drop, what is there stays as it is.

    Returns
    -------
    float
        The share of it that huge pages map.
    """
    with suppress(NotMeasured):
        drop(path)
    read_through(path)
    return in_huge_pages(path)


def read_through(path: Path) -> None:
    """Bring a file into the page cache as reading from begin to end does."""
    room = bytearray(READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(room):
            pass


def in_huge_pages(path: Path) -> float:
    """Tell the share of a file that huge pages map, when all of it is touched."""
    with um.Block.map(path) as block:
        block.as_array()[:: os.sysconf("SC_PAGE_SIZE")].max(initial=np.uint8(0))
        areas = read_process().areas
        huge_bytes = sum(area.huge_bytes for area in areas if area.start == block.address)
    return huge_bytes / path.stat().st_size


def file_system(path: Path) -> str:
    """Name the type of the file system that a file or folder lies on."""
    run = ["stat", "-f", "-c", "%T", str(path)]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()
