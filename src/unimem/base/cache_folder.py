"""The folder that this user keeps files in which would cost something to make again."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["OTHERS_WRITE", "cache_folder", "check_own_folder", "default_bytes"]

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SHARE_OF_DISK = 10


def cache_folder() -> str | None:
    """Return the folder, there or not; None where nothing is kept.

    That is ``UNIMEM_CACHE``, or else ``unimem`` in ``XDG_CACHE_HOME`` or ``~/.cache``. With
    ``UNIMEM_CACHE=off`` nothing is kept.
    """
    asked = os.environ.get("UNIMEM_CACHE", "")
    if asked:
        return None if asked == "off" else os.path.abspath(asked)
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # the specification has others ignored
        home = os.path.expanduser("~/.cache")
    return os.path.join(home, "unimem") if os.path.isabs(home) else None


def check_own_folder(
    folder: str, *, create: bool = False, instead: str = "another one in UNIMEM_CACHE"
) -> None:
    """Check that a folder is of this user alone.

    Parameters
    ----------
    folder : str
        Its absolute path.
    create : bool
        Whether to make it where there is none.
    instead : str
        What else helps, for the message.

    Raises
    ------
    OSError
        It cannot be made or looked at; PermissionError where other users own it or may write it.
    """
    if create:
        os.makedirs(folder, 0o700, exist_ok=True)
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


def default_bytes(folder: str) -> int:
    """Return what is kept in a folder at most, where nobody has said: a tenth of its file system.

    Raises
    ------
    OSError
        It cannot be looked at.
    """
    info = os.statvfs(folder)
    return info.f_blocks * info.f_frsize // _SHARE_OF_DISK
