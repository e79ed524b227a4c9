"""The speed of a disk's direct reads, and of memory: measured, and remembered for plans.

It is remembered for this user and this machine, in a file of ``disks`` in the cache folder.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from unimem.base.atomic_file import write_text
from unimem.base.cache_folder import cache_folder, check_own_folder
from unimem.base.threads import run_in_threads
from unimem.system import limits

_T = TypeVar("_T")
_REQUEST_BYTES = 1 << 20  # about an expert
_AT_ONCE = 16
_MOST_BYTES = 2 << 30
_MOST_SECONDS = 2.0
_LEAST_BYTES = 128 << 20  # a smaller file may be in a cache of the disk
_ENOUGH_BYTES = 1 << 30  # of a file, to look no further
_MOST_NAMES = 20_000  # of files to choose from
_MADE_BYTES = 256 << 20
_NAME_CHARS = 200
# Each core reads many pieces of the memory.
_MEMORY_BYTES, _PIECE_BYTES, _PASSES = 128 << 20, 4 << 20, 6


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """The measured speed of a disk, and of memory beside it. Immutable.

    Attributes
    ----------
    bytes_per_second : int
        Of reads of 1 MiB past the page cache, 16 at the same time, at random places.
    memory_bytes_per_second : int
        With which the cores of this process read memory, as they do to compute a token.
    measured : str
        The day, as in "2026-11-28".
    """

    bytes_per_second: int
    memory_bytes_per_second: int
    measured: str


def measure_speed(path: str | os.PathLike[str]) -> DiskSpeed:
    """Measure a disk with direct reads: at most 2 GiB, and for about 2 seconds at most.

    Memory takes less than a second more.

    Parameters
    ----------
    path : path-like
        A large file to read; or a folder. Below a folder, a large file is read, or else a temporary
        one of 256 MiB, which is removed.

    Raises
    ------
    OSError
        Nothing can be read or written there, or the file system has no direct reads (EINVAL).
    """
    given = os.path.realpath(os.fspath(path))
    with ExitStack() as stack:
        found = _find_file(given)
        if found is None:
            folder = given if os.path.isdir(given) else os.path.dirname(given)
            made = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
            for _ in range(_MADE_BYTES // _REQUEST_BYTES):
                made.write(os.urandom(_REQUEST_BYTES))
            os.fsync(made.fileno())
            found = f"/proc/self/fd/{made.fileno()}"
        try:
            file = stack.enter_context(open(found, "rb", 0, opener=_open_direct))
            disk = _measure_reads(file.fileno())
        except OSError as error:
            text = (
                "Its file system has no reads past the page cache (O_DIRECT)"
                if error.errno == errno.EINVAL
                else os.strerror(error.errno or errno.EIO)
            )
            raise OSError(error.errno or errno.EIO, text, os.fspath(path)) from None
    return DiskSpeed(disk, _measure_memory(), date.today().isoformat())


def _open_direct(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_DIRECT | os.O_NONBLOCK)


def _find_file(path: str) -> str | None:
    """Find a large file without holes: the given one, or one below the folder on the same disk."""
    device, largest, found = os.stat(path).st_dev, _LEAST_BYTES - 1, None
    paths = iter((path,))
    if os.path.isdir(path):
        paths = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    for each in islice(paths, _MOST_NAMES):
        with suppress(OSError):
            info = os.lstat(each)
            is_whole = stat.S_ISREG(info.st_mode) and info.st_blocks * 512 >= info.st_size
            is_larger = info.st_dev == device and info.st_size > largest
            if is_whole and is_larger and os.access(each, os.R_OK):
                largest, found = info.st_size, each
        if largest >= _ENOUGH_BYTES:
            break
    return found


def _measure_reads(fd: int) -> int:
    n_places = os.fstat(fd).st_size // _REQUEST_BYTES
    places = random.sample(range(n_places), min(n_places, _MOST_BYTES // _REQUEST_BYTES))

    def read(take: Callable[[], int]) -> Iterable[int]:
        with mmap.mmap(-1, _REQUEST_BYTES) as buffer:
            while True:
                yield os.preadv(fd, [buffer], take() * _REQUEST_BYTES)

    return _rate(_AT_ONCE, places, read)


def _measure_memory() -> int:
    data = np.ones(_MEMORY_BYTES // 4, np.float32)
    pieces = np.split(data, _MEMORY_BYTES // _PIECE_BYTES) * _PASSES

    def read(take: Callable[[], np.ndarray[Any, Any]]) -> Iterable[int]:
        while True:
            piece = take()
            np.add.reduce(piece)
            yield piece.nbytes

    return _rate(limits.thread_count(), pieces, read)


def _rate(
    n_threads: int, items: Iterable[_T], read: Callable[[Callable[[], _T]], Iterable[int]]
) -> int:
    """Return the bytes a second with which threads read items.

    In each thread, `read` yields the bytes of the items that its argument gives, which raises
    IndexError at the end.
    """
    left, done = deque(items), deque[int]()
    started = time.monotonic()

    def work() -> None:
        with suppress(IndexError):
            done.extend(read(left.popleft))

    def watch() -> None:
        if time.monotonic() - started > _MOST_SECONDS:
            left.clear()

    run_in_threads(n_threads, work, stop=left.clear, tick=watch)
    return max(1, round(sum(done) / (time.monotonic() - started)))


def _file_of(disk: str) -> Path | None:
    folder = cache_folder()
    # A home may be that of several machines.
    name = quote(f"{os.uname().nodename} {disk}", safe="")[:_NAME_CHARS]
    return None if folder is None else Path(folder, "disks", f"{name}.json")


def remember(disk: str, speed: DiskSpeed) -> None:
    """Remember the speed of a disk, by its name; without a cache folder, nothing is kept."""
    path = _file_of(disk)
    if path is not None:
        check_own_folder(str(path.parent), create=True)
        write_text(path, json.dumps(asdict(speed)))


def recall(disk: str) -> DiskSpeed | None:
    """Return the remembered speed of a disk; None without one."""
    path = _file_of(disk)
    if path is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            check_own_folder(str(path.parent))
            found = json.loads(path.read_text("utf-8"))
            rates = found["bytes_per_second"], found["memory_bytes_per_second"]
            day = date.fromisoformat(found["measured"]).isoformat()
            if all(isinstance(rate, int) and rate > 0 for rate in rates):
                return DiskSpeed(*rates, day)
    return None
