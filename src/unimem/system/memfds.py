"""Memory with a name (memfd), by which one process shows data and another finds it.

No file remains and no signal is sent; the data ends with its process.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator
from functools import partial

from unimem.base.descriptors import Descriptors
from unimem.base.kernel_files import parse_fields, read_bytes

#: Errors of the looking process. Other errors mean that a file was closed, or is not ours.
CANNOT_LOOK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)

# The kernel's number (uapi/linux/memfd.h), which Python has only from 3.14 on.
_MFD_NOEXEC_SEAL = 8
_MOST_DESCRIPTORS = 1 << 16  # of a process are looked at


def new_memfd(name: str, flags: int = 0) -> int:
    """Make an empty memfd that can be sealed and, from Linux 6.3 on, never be executed."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this Python was built for systems without memfd_create")
    flags |= os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 6.3
            raise
        return os.memfd_create(name, flags)


def find_memfds(folder: int, name: str) -> Iterator[int]:
    """Open a process's own memfds of a name, for reading; the caller closes each.

    A memfd that a process only reads, as here, is not its own: the creator's descriptor may write.
    `folder` is a descriptor of the process's folder in /proc. OSError is raised if the process has
    ended, if it is not ours to look at, and for one of `CANNOT_LOOK`.
    """
    link = f"/memfd:{name} (deleted)"
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with Descriptors() as fds:
        descriptors = fds.add(partial(os.open, dir_fd=folder), "fd", flags)
        with os.scandir(descriptors) as listed:
            for entry in itertools.islice(listed, _MOST_DESCRIPTORS):
                try:
                    if os.readlink(entry.name, dir_fd=descriptors) != link:
                        continue
                    # The link's mode is that of the descriptor.
                    if not entry.stat(follow_symlinks=False).st_mode & stat.S_IWUSR:
                        continue
                    found = _open_memfd(entry.name, descriptors)
                except OSError as error:
                    if error.errno in CANNOT_LOOK:
                        raise
                    continue  # it was closed, or may not be opened
                yield found


def _open_memfd(name: str, descriptors: int) -> int:
    """Open a memfd for reading, and nothing else: a user's file system may never answer."""
    # O_PATH opens nothing yet, and keeps referring to the same file.
    with Descriptors() as fds:
        found = fds.add(partial(os.open, dir_fd=descriptors), name, os.O_PATH | os.O_CLOEXEC)
        # All memfds are in one mount, which no user can mount.
        mount = _mount_of(found)
        if mount is None or mount != _mount_of(fds.add(new_memfd, "unimem")):
            raise PermissionError(errno.EACCES, "no memfd")
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)


def _mount_of(fd: int) -> str | None:
    text = read_bytes(f"/proc/self/fdinfo/{fd}").decode(errors="replace")
    return parse_fields(text).get("mnt_id")
