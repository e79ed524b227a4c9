"""A RAM tier in hugetlb pages: files of a hugetlbfs, which other processes find by name."""

from __future__ import annotations

import errno
import os
import re

from unimem.base.kernel_files import read_text
from unimem.errors import PlacementError
from unimem.kv.store.ram_tier import RamTier, keep_own, sweep
from unimem.system import limits, policy

_PAGE_BYTES = 2 << 20
_LINK = "pool"  # of the table's folder


class HugeTier(RamTier):
    """Chunks in hugetlb pages of 2 MiB, for all processes of this user that have the same store.

    The table and the lock file lie in shared memory, with a link to the folder of the pool. So all
    processes with one table have one pool, which is there as long as the table. A chunk takes whole
    huge pages. It raises PlacementError if the pool is too small or this user may not write to any
    hugetlbfs, with the command that helps.
    """

    _block_pages = "2m"
    _least_unit = _PAGE_BYTES

    def __init__(self, folder: str, budget_bytes: int, *, numa: str | None = None) -> None:
        policy.parse_numa(numa)
        self._pages, self._numa = "2m", numa
        self._name = self._folder_name(os.stat(folder))
        self._open_for_all(f"{limits.SHM}/{self._name}-2m", budget_bytes)

    def _keep_pool(self) -> None:
        (_, notes), is_new = self._kept[0], False
        try:
            path = os.readlink(_LINK, dir_fd=notes)
        except FileNotFoundError:
            is_new, nodes = True, policy.parse_numa(self._numa)
            mount = _mount_point()
            sweep(mount)
            if shortfall := policy.pool_shortfall("2m", self.budget_bytes, limits, nodes):
                raise PlacementError(shortfall) from None
            # A name of its own: what a killed process left behind is another table's.
            path = os.path.join(mount, f"{self._name}-{os.urandom(8).hex()}")
        found = keep_own(path)
        if isinstance(found, str):
            text = f"The folder of the pool is {found}: end all processes with this store"
            raise OSError(errno.EIO, text, path)
        self._kept.append((path, found))
        if is_new:
            os.symlink(path, _LINK, dir_fd=notes)


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
