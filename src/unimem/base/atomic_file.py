"""Replace files atomically: whatever happens, the old file or the new one is there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from unimem.base.arguments import file_path
from unimem.base.closing import Closing
from unimem.base.descriptors import Descriptors

TEMPORARY = ".unimem-tmp"
"""The end of the names of temporary files."""

_SUFFIX = TEMPORARY.encode()
_TOKEN_BYTES = 8
# File systems limit a name to 255 bytes; the temporary one has this many of the file's own.
_MAX_PREFIX = 200


@contextlib.contextmanager
def attribute_errors(path: str) -> Iterator[None]:
    """Make each OSError name the file to be written, not none or the temporary one."""
    try:
        yield
    except OSError as error:
        number = error.errno or errno.EIO
        raise OSError(number, error.strerror or os.strerror(number), path) from error


class NewFile(Closing):
    """A file that is written beside the old one and then replaces it.

    Leaving the ``with`` without `publish` removes it. Any number of threads may write; all other
    calls are for one thread.

    The file is locked (``flock``) while it is written. The kernel drops the lock of a process that
    dies, so the next writer of the same path can tell which files to remove.

    The target of a symbolic link is replaced, and an existing file keeps its permissions. A new one
    gets `mode`, less the umask. While it is written it is never open to more users than that.
    OSError is raised if nothing can be written there, IsADirectoryError for a folder and for a path
    that ends in a separator; nothing has changed then.
    """

    def __init__(self, path: str, mode: int = 0o600) -> None:
        # Such a path names a folder, even a missing one: realpath() would drop the end.
        if os.path.basename(path) in {"", ".", ".."}:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self.path = os.path.realpath(path)
        folder, name = os.path.split(os.fsencode(self.path))
        self._name = name
        self._temporary: bytes | None = None
        self._pid = os.getpid()
        # The folder's descriptor and, once it is made, the temporary file's.
        self._fds = Descriptors()
        with attribute_errors(self.path):
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                self._folder = self._fds.add(os.open, folder, flags)
                old_mode = self._read_old_mode()
                self._remove_stale()
                self._fd = self._create(mode if old_mode is None else 0o600)
                if old_mode is not None:
                    os.fchmod(self._fd, old_mode)
                self._direct = self._set_direct()
            except BaseException:
                self.close()
                raise

    def _read_old_mode(self) -> int | None:
        """Return the permissions of the file that will be replaced; None without such a file."""
        try:
            old = os.stat(self._name, dir_fd=self._folder)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(old.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(old.st_mode):
            raise OSError(errno.EEXIST, "Is not a regular file")
        return stat.S_IMODE(old.st_mode)

    @property
    def _prefix(self) -> bytes:
        return b"." + self._name[:_MAX_PREFIX] + b"."

    def _remove_stale(self) -> None:
        """Remove the temporary files of writers of this path that were killed."""
        length = len(self._prefix) + _TOKEN_BYTES + len(_SUFFIX)
        names: list[bytes] = []
        with contextlib.suppress(OSError):
            names = [os.fsencode(name) for name in os.listdir(self._folder)]
        for name in names:
            if len(name) == length and name.startswith(self._prefix) and name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):
                    remove_unlocked(name, dir_fd=self._folder)

    def _create(self, mode: int) -> int:
        """Make the temporary file, locked."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            token = os.urandom(_TOKEN_BYTES // 2).hex().encode()
            self._temporary = self._prefix + token + _SUFFIX
            with contextlib.suppress(FileExistsError):
                opens = partial(os.open, dir_fd=self._folder)
                fd = self._fds.add(opens, self._temporary, flags, mode)
                # Another writer may have removed it as stale before it was locked.
                if self._lock(fd) and os.fstat(fd).st_nlink:
                    return fd
                self._unlink()
                os.close(self._fds.pop())

    def _unlink(self) -> None:
        """Remove the temporary file, if it is there and was not made before a fork."""
        is_made = self._temporary is not None and len(self._fds) > 1
        if is_made and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary or b"", dir_fd=self._folder)

    @staticmethod
    def _lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            # Without locks, no writer takes the file for a stale one.
            if error.errno not in {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}:
                raise
        return True

    def _set_direct(self) -> bool:
        """Write past the page cache if the file system can."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_DIRECT)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
            return False
        return True

    def allocate(self, nbytes: int) -> None:
        """Allocate the room for a file of `nbytes`, if the file system can.

        Threads that write past the page cache then wait for each other less, and a full disk raises
        OSError before anything is written.
        """
        if not self._direct or nbytes == 0:
            return
        with attribute_errors(self.path):
            try:
                os.posix_fallocate(self._fd, 0, nbytes)
            except OSError as error:
                # If the file system cannot, the C library writes a byte a block instead, which
                # O_DIRECT refuses.
                if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}:
                    raise

    def write(self, data: NDArray[np.uint8], offset: int) -> None:
        """Write all of `data`.

        Its address, its size and the offset are multiples of 4096, as O_DIRECT needs.
        """
        rest = data.data
        with attribute_errors(self.path):
            while rest:
                direct = self._direct
                try:
                    n = os.pwrite(self._fd, rest, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    # The file system limits O_DIRECT, or the device has larger blocks. The flag
                    # is cleared first: a thread that finds `_direct` False writes as usual.
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)
                    self._direct = False
                    continue
                if n == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                rest, offset = rest[n:], offset + n

    def publish(self) -> None:
        """Bring the file to the disk, and replace the old one durably.

        After an OSError the old file is there as before, unless only the last step failed, which
        brings the change of the folder to the disk.
        """
        with attribute_errors(self.path):
            os.fsync(self._fd)
            assert self._temporary is not None
            os.replace(
                self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder
            )
            self._temporary = None
            try:
                os.fsync(self._folder)
            except OSError as error:
                if error.errno != errno.EINVAL:  # the file system cannot sync folders
                    raise

    def close(self) -> None:
        """Remove the file unless it was published. Twice is no error."""
        self._unlink()
        self._temporary = None
        self._fds.close()

    def __del__(self) -> None:
        if hasattr(self, "_fds"):
            self.close()


def remove_unlocked(path: str | bytes, *, dir_fd: int | None = None) -> None:
    """Unlink a file; raise OSError if somebody has it locked (``flock``), or it is missing."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    with Descriptors() as fds:
        fd = fds.add(partial(os.open, dir_fd=dir_fd), path, flags)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path, dir_fd=dir_fd)


def write_text(path: str | os.PathLike[str], text: str, mode: int = 0o600) -> None:
    """Write a text in UTF-8, whole or not at all, as `NewFile` does."""
    write_bytes(path, text.encode(), mode)


def write_bytes(path: str | os.PathLike[str], data: bytes, mode: int = 0o600) -> None:
    """Write bytes, whole or not at all, as `NewFile` does."""
    with NewFile(file_path(path), mode) as file:
        file.write(np.frombuffer(data, np.uint8), 0)
        file.publish()
