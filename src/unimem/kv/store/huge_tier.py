"""A RAM tier in hugetlb pages: files of a hugetlbfs, whose names other processes can find."""

from __future__ import annotations

import os
import re
import stat
from contextlib import ExitStack, suppress

import numpy as np
from numpy.typing import NDArray

from unimem.base.kernel_files import read_text
from unimem.errors import PlacementError
from unimem.kv.store.tiers import RamTier
from unimem.system import limits, policy

__all__ = ["HugeTier"]

_PAGE_BYTES = 2 << 20


class HugeTier(RamTier):
    """Chunks in hugetlb pages of 2 MiB, for all processes of this user that have the same store.

    A hugetlbfs takes no `write`: chunks are written through a mapping, and the folder's lock and
    what it notes lie in shared memory. A chunk takes whole huge pages, which count in the budget.

    Parameters
    ----------
    folder : str
        Of the store, which tells its memory from that of others.
    budget_bytes : int
        The most that it may take.
    numa : str, optional
        Its nodes, as for `RamTier`.

    Raises
    ------
    PlacementError
        The pool is smaller, or there is no hugetlbfs that this user may write to: the message says
        which command changes it.
    ValueError, OSError
        As `RamTier`.
    """

    _block_pages = "2m"

    def __init__(self, folder: str, budget_bytes: int, *, numa: str | None = None) -> None:
        nodes = policy.parse_numa(numa)
        self._pages, self._numa = "2m", numa
        info = os.stat(folder)
        path = os.path.join(_mount_point(), self._folder_name(info))
        # What others have put there already is theirs and ours.
        more = max(0, budget_bytes - _held_bytes(path))
        if shortfall := policy.pool_shortfall("2m", more, limits, nodes):
            raise PlacementError(shortfall)
        notes = f"{limits.SHM}/{self._folder_name(info)}-2m"
        self._open_for_all([notes, path], budget_bytes)

    def _file_bytes(self, nbytes: int) -> int:
        return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES

    def _fill(self, fd: int, data: NDArray[np.uint8]) -> None:
        with self._mapped(fd, self._file_bytes(data.nbytes), "r+") as block:
            block.as_array("uint8", data.nbytes)[:] = data


def _held_bytes(folder: str) -> int:
    """Return what the files of a folder take; 0 where there is none."""
    held = 0
    with suppress(FileNotFoundError), ExitStack() as undo:
        for entry in undo.enter_context(os.scandir(folder)):
            with suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                held += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return held


def _mount_point() -> str:
    """Return the folder of a hugetlbfs with pages of 2 MiB that this user may write to."""
    for line in (read_text("/proc/self/mounts") or "").splitlines():
        _, path, kind, options, *_ = [*line.split(), *4 * [""]]
        if kind == "hugetlbfs" and "pagesize=2M" in options.split(","):
            path = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), path)
            if os.access(path, os.W_OK | os.X_OK):
                return path
    raise PlacementError(
        "pages='2m': there is no hugetlbfs of 2 MiB pages that this user may write to, and only "
        "there other processes find them: 'mount -t hugetlbfs -o pagesize=2M,mode=700,"
        f"uid={os.geteuid()} none FOLDER' as root makes one"
    )
