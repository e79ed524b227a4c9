"""Shared memory of four kinds for staged models, whose files other processes open by path.

A place is filled file by file, then sealed, and goes when its descriptor is closed.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import sys
from contextlib import suppress
from typing import Any, Literal

from unimem._core import tmpfs
from unimem._core.library import get_library
from unimem.base.cache_folder import OPEN_FOLDER, empty_folder, foreign_kind
from unimem.base.descriptors import Descriptors
from unimem.errors import PlacementError
from unimem.system.limits import SHM
from unimem.system.memfds import new_memfd

Backing = Literal["tmpfs", "hugetlb", "memfd", "shm"]
BACKINGS: tuple[Backing, ...] = ("tmpfs", "hugetlb", "memfd", "shm")

# The mode of staged files: the folders above the model may be closed to users whom its mode allows.
ACCESS_MODE = 0o400

_PREFIX = "unimem-stage-"
_HUGE_SHIFTS = {"2m": 21, "1g": 30}
_ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_CHILD = os.path.join(os.path.dirname(__file__), "mount_process.py")


class Place:
    """A folder of files that other processes open by path; it goes with its last user."""

    def __init__(self) -> None:
        self._fds = Descriptors()

    @property
    def fd(self) -> int:
        """The descriptor of the folder or of the one file, which keeps it; -1 without one."""
        return self._fds[0] if self._fds else -1

    def create(self, name: str) -> int:
        """Make an empty file, and return a descriptor for reading and writing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self.fd)

    def link(self, name: str, target: str) -> None:
        """Make a symbolic link."""
        os.symlink(target, name, dir_fd=self.fd)

    def seal(self) -> None:
        """End all writing; the caller has closed all descriptors and mappings that could write."""

    def open(self, name: str) -> int:
        """Open a file for reading."""
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)

    def path(self, name: str) -> str:
        """Return the path of a file below the ``/proc`` folder of a process that has `fd`."""
        return f"fd/{self.fd}/{name}"

    def close(self) -> None:
        """Let it go, with everything that belongs to this process alone."""
        self.leave()

    def leave(self) -> None:
        """Close the descriptor, and leave the place to another process that has it."""
        self._fds.close()

    def __del__(self) -> None:
        if hasattr(self, "_fds"):
            self.close()


class Mount(Place):
    """A tmpfs that is mounted nowhere: it goes with the last process that has it.

    Its files take at most `nbytes`. PlacementError says that this process may not mount, even in a
    user namespace of its own.
    """

    _child: _Namespace | None = None

    def __init__(self, nbytes: int, *, huge: bool) -> None:
        super().__init__()
        try:
            self._fds.add(tmpfs.open_mount, nbytes, huge)
        except PlacementError as error:
            if error.errno != errno.EPERM:
                raise
            self._child = _Namespace(nbytes, huge, self._fds)

    def seal(self) -> None:
        """Make the file system read-only."""
        if self._child is None:
            tmpfs.seal_mount(self.fd)
        else:
            self._child.seal()

    def close(self) -> None:
        """End the child, and let the mount go."""
        if self._child is not None:
            self._child.close()
        self.leave()


class _Namespace:
    """A child that mounts in a user namespace of its own; it ends at the seal.

    The mount belongs to this user; its descriptor arrives over a socket.
    """

    def __init__(self, nbytes: int, huge: bool, fds: Descriptors) -> None:
        # Imported here to keep `import unimem` light: few processes stage.
        import socket
        import subprocess

        ours, its = socket.socketpair()
        command = [sys.executable, "-I", "-S", _CHILD, get_library()]
        command += map(str, (nbytes, int(huge), its.fileno()))
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        try:
            self._process = subprocess.Popen(command, pass_fds=[its.fileno()], **pipes)
        except OSError as error:
            ours.close()
            raise PlacementError(error.errno, f"{sys.executable}: {error.strerror}") from None
        finally:
            its.close()
        self._socket = ours
        try:
            how = (256, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
            try:
                fds.extend(array.array("i", (answer := ours.recvmsg(*how))[1][0][2]))
            except IndexError:
                self._refused(answer[0])
        except BaseException:
            self.close()
            raise

    def seal(self) -> None:
        self._socket.sendall(b"\1")
        answer = self._socket.recv(256)
        if len(answer) < 4 or any(answer[:4]):
            self._refused(answer)
        self.close()

    def _refused(self, answer: bytes) -> None:
        code, call = int.from_bytes(answer[:4], "little") or errno.EPERM, answer[4:].decode()
        raise PlacementError(
            code, f"mounting a tmpfs in a user namespace: {call or 'child'}: {os.strerror(code)}"
        )

    def close(self) -> None:
        # The child waits for this end of the socket.
        self._socket.close()
        self._process.wait()


class Memfd(Place):
    """One memfd, on base pages or from a pool; with the latter its file ends with a whole page."""

    def __init__(self, pages: str | None = None) -> None:
        super().__init__()
        self._flags = 0 if pages is None else os.MFD_HUGETLB | _HUGE_SHIFTS[pages] << 26

    def create(self, name: str) -> int:
        """Make the one file."""
        # The kernel takes 249 bytes, and shows them in /proc/PID/maps.
        self._fds.add(new_memfd, os.fsdecode(os.fsencode(name)[:200]), self._flags)
        os.fchmod(self.fd, ACCESS_MODE)
        return os.dup(self.fd)

    def seal(self) -> None:
        """Seal the memfd against everything, more seals included."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _ALL_SEALS)

    def open(self, name: str) -> int:
        """Open the memfd anew: the descriptor that made it may write."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def path(self, name: str) -> str:
        """Return its path, which does not contain its name."""
        return f"fd/{self.fd}"


class Folder(Place):
    """A folder in ``/dev/shm`` that its keeper has locked; an unlocked one is stale.

    It has no seal: the owner of the files could make them writable again. PlacementError says that
    this process may not write to ``/dev/shm``.
    """

    _is_left = True  # until the folder exists

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()
        while True:
            self.folder = f"{SHM}/{_PREFIX}{os.urandom(8).hex()}"
            self._is_left = False
            try:
                os.mkdir(self.folder, 0o700)
            except OSError as error:
                raise PlacementError(error.errno, f"{SHM}: {error.strerror}") from None
            # Until it is locked, another process may remove it as stale.
            with suppress(FileNotFoundError):
                if _lock(self.folder, self._fds.add(os.open, self.folder, OPEN_FOLDER)):
                    return
            self._fds.close()

    def path(self, name: str) -> str:
        """Return its absolute path, the same for every process."""
        return f"{self.folder}/{name}"

    def let_in(self, mode: int, group: int = -1) -> None:
        """Give the files a mode and a group, -1 for ours, and let their readers into the folder."""
        with os.scandir(f"/proc/self/fd/{self.fd}") as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):  # no link to the model's own file
                    os.chown(entry.path, -1, group)
                    os.chmod(entry.path, mode)
        os.fchown(self.fd, -1, group)
        # Users who may read the files may also list the folder and enter it.
        os.fchmod(self.fd, 0o700 | mode & 0o044 | (mode & 0o044) >> 2)

    def close(self) -> None:
        """Remove the folder."""
        # A forked child has its own copy of the descriptor, and leaves the files to its parent.
        if not self._is_left and os.getpid() == self._pid:
            _remove(self.folder, self.fd)
        self.leave()

    def leave(self) -> None:
        """Close the descriptor, and leave the folder to another process that has it."""
        self._is_left = True
        super().leave()


def sweep() -> list[str]:
    """Remove this user's stale folders in ``/dev/shm``, left by a crash; leave all others.

    Return what lies there under such a name and is not this user's folder, in words.
    """
    left = []
    try:
        names = os.listdir(SHM)
    except OSError:  # there is no /dev/shm
        return []
    for name in names:
        folder = f"{SHM}/{name}"
        if not name.startswith(_PREFIX):
            continue
        with suppress(OSError), Descriptors() as fds:  # already gone
            if kind := foreign_kind(os.lstat(folder)):
                left.append(f"{folder} ({kind})")
                continue
            fd = fds.add(os.open, folder, OPEN_FOLDER)
            # Another user may have put a folder there since.
            if foreign_kind(os.fstat(fd)) is None and _lock(folder, fd):
                _remove(folder, fd)
    return left


def _lock(folder: str, fd: int) -> bool:
    """Lock a folder; False if another process has it, or it is gone."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.stat(folder), os.fstat(fd))
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove(folder: str, fd: int) -> None:
    """Remove a folder and its contents; one without a descriptor is empty."""
    if fd >= 0:
        empty_folder(fd)
    with suppress(FileNotFoundError):
        os.rmdir(folder)
