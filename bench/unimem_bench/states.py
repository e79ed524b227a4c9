"""Memory and the page cache in a known state: an unknown one changes results 2 to 50 times."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

import unimem as um
from unimem.base.text import format_bytes
from unimem.system.limits import available_bytes
from unimem.system.process import read_process
from unimem_bench import plain
from unimem_bench.suite import NotMeasured

__all__ = [
    "available_bytes", "drop", "file_system", "heat", "in_huge_pages", "read_through", "ready",
    "require_room",
]  # fmt: skip

HUGE_PAGE = 2 << 20
READ_BYTES = 8 << 20  # at once
N_TRIES = 4  # to get memory back from the host
DROP_CACHES = Path("/proc/sys/vm/drop_caches")

_fastest: dict[int, float] = {}  # bytes a second, by number of CPUs


def require_room(*, memory: int = 0, disk: int = 0, folder: Path = Path()) -> None:
    """Raise NotMeasured unless `memory` bytes are free, and `disk` bytes in a folder."""
    for what, wanted, free in (
        ("memory", memory, available_bytes()),
        (f"disk in {folder}", disk, shutil.disk_usage(folder).free if disk else 0),
    ):
        if wanted > free:
            raise NotMeasured(
                f"wants {format_bytes(wanted)} of {what}, {format_bytes(free)} are free"
            )


def ready(nbytes: int, cpus: Sequence[int]) -> None:
    """Touch and free `nbytes` until that is fast, with a pinned thread on each of `cpus`.

    A virtual machine gives memory that was free for seconds back to its host; touching it again
    takes up to 50 times as long. NotMeasured if less is free.
    """
    require_room(memory=nbytes)
    # With little memory, starting threads would be most of the time.
    nbytes = max(nbytes, 16 * HUGE_PAGE)
    for _ in range(N_TRIES):
        speed = nbytes / plain.touch(nbytes, HUGE_PAGE, "thp", cpus)
        known = _fastest.get(len(cpus), 0.0)
        _fastest[len(cpus)] = max(known, speed)
        if 0 < known < 2 * speed:
            return


def drop(path: Path) -> None:
    """Remove a file from the page cache.

    NotMeasured if some of it stays, for example because a process maps it, or it lies in memory
    only. Only root can drop what ``posix_fadvise`` leaves.
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
        raise NotMeasured(f"wants {path.name} on disk only, {left} bytes stay in the page cache")


def heat(path: Path) -> float:
    """Read a file into the page cache in large folios, which huge pages map.

    Returns the mapped share. A file that was just written in small pieces lies in small folios, and
    is mapped page by page. If `drop` cannot drop it, cached parts stay as they are.
    """
    with suppress(NotMeasured):
        drop(path)
    read_through(path)
    return in_huge_pages(path)


def read_through(path: Path) -> None:
    """Read a file into the page cache, from begin to end."""
    room = bytearray(READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(room):
            pass


def in_huge_pages(path: Path) -> float:
    """Return the share of a file that huge pages map once all of it is touched."""
    with um.Block.map(path) as block:
        block.as_array()[:: os.sysconf("SC_PAGE_SIZE")].max(initial=np.uint8(0))
        areas = read_process().areas
        huge_bytes = sum(area.huge_bytes for area in areas if area.start == block.address)
    return huge_bytes / path.stat().st_size


def file_system(path: Path) -> str:
    """Name the type of the file system of a file or folder."""
    run = ["stat", "-f", "-c", "%T", str(path)]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()
