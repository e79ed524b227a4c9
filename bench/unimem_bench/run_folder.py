"""The temporary folder of a run.

A run locks its folder. The kernel drops the lock with the process, even after SIGKILL, so an
unlocked folder belongs to a run that is gone, and the next run removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "unimem-bench-"


@contextmanager
def run_folder() -> Iterator[Path]:
    """Make a folder on a disk, and remove it at the end; first remove those of killed runs."""
    # On many systems /tmp is memory, but files on disks are measured.
    has_disk = "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK)
    parent = Path("/var/tmp" if has_disk else tempfile.gettempdir())
    _remove_abandoned(parent)
    folder, lock = _make_locked(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def _make_locked(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Another run may have found the folder before it was locked, and taken it for abandoned.
        with suppress(FileNotFoundError):
            lock = _lock(folder)
            if lock is not None:
                if folder.exists():
                    return folder, lock
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder, and return the descriptor of the lock; None if it is locked already."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        # Folders of other users are left alone; some may disappear meanwhile.
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = _lock(folder)
            if lock is not None:
                try:
                    shutil.rmtree(folder)
                finally:
                    os.close(lock)
