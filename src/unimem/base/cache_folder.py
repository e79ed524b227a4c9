"""Folders of this user that keep files: where they are, and which files make room for new ones."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from unimem.base.atomic_file import remove_unlocked
from unimem.base.descriptors import Descriptors

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SHARE_OF_DISK = 10


def cache_folder() -> str | None:
    """Return the cache folder, whether it exists or not; None if nothing is kept.

    The folder is ``UNIMEM_CACHE``, or else ``unimem`` in ``XDG_CACHE_HOME`` or ``~/.cache``. With
    ``UNIMEM_CACHE=off`` nothing is kept.
    """
    asked = os.environ.get("UNIMEM_CACHE", "")
    if asked:
        return None if asked == "off" else os.path.abspath(asked)
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # the specification says to ignore relative paths
        home = os.path.expanduser("~/.cache")
    return os.path.join(home, "unimem") if os.path.isabs(home) else None


def check_own_folder(
    folder: str, *, create: bool = False, instead: str = "another one in UNIMEM_CACHE"
) -> None:
    """Check that a folder belongs to this user alone, and make a missing one with `create`.

    It raises OSError if the folder cannot be made or examined, and PermissionError if other users
    own it or may write to it. `instead` is another remedy, for the message.
    """
    if create:
        _make_folders(folder)
    info = os.stat(folder)
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    if info.st_uid != os.geteuid() or info.st_mode & OTHERS_WRITE:
        raise PermissionError(
            errno.EPERM,
            "Other users own this folder or may write to it: expected a cache of this user "
            f"alone: 'chmod go-w', or {instead}",
            folder,
        )


def foreign_kind(info: os.stat_result) -> str | None:
    """Say what lies at a name in a shared place, where any user may take it; None for our folder.

    Our folder is one that this user alone may write to; `info` is its name's or its descriptor's.
    """
    mode = info.st_mode
    kinds = {
        stat.S_IFDIR: "folder",
        stat.S_IFREG: "file",
        stat.S_IFLNK: "link",
        stat.S_IFIFO: "FIFO",
    }
    kind = kinds.get(stat.S_IFMT(mode), "special file")
    if kind == "folder" and info.st_uid == os.geteuid() and not mode & OTHERS_WRITE:
        return None
    return f"a {kind} of user {info.st_uid}, mode {stat.S_IMODE(mode):04o}"


def empty_folder(fd: int) -> None:
    """Remove all that lies in an open folder, however deep, with two descriptors and no recursion.

    What lies in inner folders is moved up, so that no path gets long.
    """
    # Listed by its path: another process may share the descriptor, and its position.
    names = os.listdir(f"/proc/self/fd/{fd}")
    for name in names:  # grows in the loop
        with suppress(FileNotFoundError):
            try:
                os.unlink(name, dir_fd=fd)
            except IsADirectoryError:
                names += _move_up(fd, name)
                os.rmdir(name, dir_fd=fd)


def _move_up(fd: int, name: str) -> list[str]:
    """Move all from a folder in an open folder to that one, and return the new names."""
    moved = []
    with Descriptors() as fds:
        inner = fds.add(partial(os.open, dir_fd=fd), name, OPEN_FOLDER)
        for each in os.listdir(inner):
            with suppress(FileNotFoundError):  # another one removes it as well
                name = os.urandom(16).hex()
                os.rename(each, name, src_dir_fd=inner, dst_dir_fd=fd)
                moved.append(name)
    return moved


def default_bytes(folder: str) -> int:
    """Return the default budget of a folder: a tenth of its file system."""
    info = os.statvfs(folder)
    return info.f_blocks * info.f_frsize // _SHARE_OF_DISK


def _make_folders(folder: str) -> None:
    """Make a folder and its missing parents for this user alone: makedirs opens the parents."""
    if not os.path.isdir(folder):
        _make_folders(os.path.dirname(folder))
        with suppress(FileExistsError):  # another process was faster; a file is refused later
            os.mkdir(folder, 0o700)


class CachedFile(NamedTuple):
    """A file of a `BudgetFolder`; `used_ns` is its last use, in nanoseconds since 1970."""

    name: str
    nbytes: int
    used_ns: int


class BudgetFolder:
    """Files of one folder; the least recently used ones make room for new ones.

    No index can be wrong: a file is found by its name, and its modification time is the time of its
    last use. Files are only unlinked, and never cut: other processes may have them mapped without a
    lock, and would die of a file that is cut under the mapping (SIGBUS).

    `folder` is a path, or an open descriptor. Files whose names do not match are ignored.
    """

    def __init__(self, folder: str | int, names: re.Pattern[str]) -> None:
        self._folder, self._names = folder, names

    def _place(self, name: str) -> tuple[str, int | None]:
        """Return a path, and the descriptor of the folder that it starts from."""
        if isinstance(self._folder, int):
            return name, self._folder
        return os.path.join(self._folder, name), None

    def files(self) -> list[CachedFile]:
        """List the files, in no order."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if not self._names.fullmatch(entry.name):
                    continue
                with suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        found.append(CachedFile(entry.name, info.st_size, info.st_mtime_ns))
        return found

    def sweep(self, names: re.Pattern[str]) -> None:
        """Remove matching files that no process has locked: killed processes left them."""
        for name in os.listdir(self._folder):
            if names.fullmatch(name):
                with suppress(OSError):
                    path, dir_fd = self._place(name)
                    remove_unlocked(path, dir_fd=dir_fd)

    def remove(self, name: str) -> bool:
        """Unlink a file; return whether that succeeded."""
        path, dir_fd = self._place(name)
        with suppress(OSError):
            os.unlink(path, dir_fd=dir_fd)
            return True
        return False

    def remove_oldest(
        self,
        files: Iterable[CachedFile],
        nbytes: int,
        remove: Callable[[str], object] | None = None,
    ) -> int:
        """Remove the least recently used files until `nbytes` are free; return the bytes freed.

        `remove` replaces the method of this name; it returns a false value if it fails.
        """
        freed = 0
        for file in sorted(files, key=lambda file: (file.used_ns, file.name)):
            if freed >= nbytes:
                break
            if (remove or self.remove)(file.name):
                freed += file.nbytes
        return freed
