"""A RAM tier in hugetlb pages: files of a hugetlbfs, which other processes find by name."""

from __future__ import annotations

import os
import re
import stat
from contextlib import ExitStack, suppress

from unimem.base.kernel_files import read_text
from unimem.errors import PlacementError
from unimem.kv.store.ram_tier import RamTier
from unimem.system import limits, policy

__all__ = ["HugeTier"]

_PAGE_BYTES = 2 << 20


class HugeTier(RamTier):
    """Chunks in hugetlb pages of 2 MiB, for all processes of this user that have the same store.

    The table and the lock file lie in shared memory. A chunk takes whole huge pages. It raises
    PlacementError if the pool is too small or this user may not write to any hugetlbfs, with the
    command that helps.
    """

    _block_pages = "2m"
    _least_unit = _PAGE_BYTES

    def __init__(self, folder: str, budget_bytes: int, *, numa: str | None = None) -> None:
        nodes = policy.parse_numa(numa)
        self._pages, self._numa = "2m", numa
        info = os.stat(folder)
        path = os.path.join(_mount_point(), self._folder_name(info))
        # Chunks that other processes have put there count for this budget, too.
        more = max(0, budget_bytes - _held_bytes(path))
        if shortfall := policy.pool_shortfall("2m", more, limits, nodes):
            raise PlacementError(shortfall)
        notes = f"{limits.SHM}/{self._folder_name(info)}-2m"
        self._open_for_all([notes, path], budget_bytes)


def _held_bytes(folder: str) -> int:
    """Return the bytes of the files of a folder; 0 for a missing folder, or another user's."""
    held = 0
    with suppress(OSError), ExitStack() as undo:
        for entry in undo.enter_context(os.scandir(folder)):
            with suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                held += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return held


def _mount_point() -> str:
    """Return the mount point of a writable hugetlbfs with pages of 2 MiB."""
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
