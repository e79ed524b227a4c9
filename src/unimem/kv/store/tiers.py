"""Tiers of a store of KV chunks: what they have in common, and the folder on a disk.

A chunk is a file whose name is the chunk's identity.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from unimem.base.atomic_file import TEMPORARY, attribute_errors
from unimem.base.cache_folder import BudgetFolder, CachedFile, check_own_folder
from unimem.base.descriptors import Descriptors
from unimem.base.kernel_files import read_text
from unimem.kv.store import notes
from unimem.system import policy

RamPages = Literal["4k", "thp", "2m"]

_PREFIX = "unimem-kv-"
_SUFFIX = ".kv"
_CHUNK = re.compile(rf"[0-9a-f]{{64}}{re.escape(_SUFFIX)}")
_TEMPORARY = re.compile(rf"\..*{re.escape(TEMPORARY)}", re.S)
_ANY_FILE = re.compile(f"{_CHUNK.pattern}|{_TEMPORARY.pattern}", re.S)
_LOCK = ".lock"
_STATE = re.compile(rb"unimem KV chunks 1 (\d{1,20}) (\S{1,64})\s*")
_STATE_BYTES = 128
# Block size of a file system that reports none.
_LEAST_BLOCK_BYTES = 4096
# What a file system needs for a file beside its data: the name, and the map of its pieces.
_ENTRY_BYTES = 8192
# The same for the folder and the lock.
FOLDER_BYTES = 16384
# A full tier makes room for many chunks at once, so that files are listed and sorted seldom.
_SHARE_OF_ROOM = 16
# A read marks a file that was not marked for this long: `touch` keeps the order of a prefix. The
# mark of a clock that jumped may as well lie this long in the future.
MARK_AFTER_NS = 60 * 10**9
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM}
_NO_ALLOCATION = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class TierStat(NamedTuple):
    """What a tier holds.

    `nbytes` counts what its files take, with what the file system needs for them, and
    `budget_bytes` is the most that they may take.
    """

    name: str
    path: str
    nbytes: int
    budget_bytes: int
    n_chunks: int


class Tier(Protocol):
    """A place for chunks. Any number of threads and processes may use it at a time."""

    def has(self, key: bytes) -> bool:
        """Whether there is a chunk of this identity; its bytes are not examined."""

    def read(self, key: bytes, out: NDArray[np.uint8]) -> int:
        """Read a chunk of the size of `out`; return its size in any case, 0 without a chunk."""

    def write(
        self, key: bytes, data: NDArray[np.uint8], used_ns: int, note: dict[str, Any] | None = None
    ) -> bool:
        """Keep a chunk, whole or not at all; return False if there is no room.

        It counts as used at `used_ns` (nanoseconds since 1970). Only chunks that were used before
        that make room for it. A disk keeps the note on what it is of.
        """

    def sync(self) -> None:
        """Make sure that the chunks written so far outlive a machine that stops, as far as any."""

    def remove(self, key: bytes) -> None:
        """Drop a chunk, unless it is being read."""

    def touch(self, keys: Sequence[bytes], used_ns: int) -> None:
        """Note when the chunks of a prefix were used: each one a nanosecond before the previous."""

    def give_back(self) -> int:
        """Drop all chunks that are not being read, and return their bytes."""

    def stat(self) -> TierStat:
        """Count the chunks and their bytes."""

    def close(self) -> None:
        """Close the tier. Closing twice is no error."""


class FolderTier:
    """Chunks as files of one folder, an existing one that belongs to this user alone.

    The lock file, which may lie in another folder (`notes`), notes the bytes of all files. They are
    added before a file is made and subtracted after one was removed, so a killed process leaves a
    figure that is too large, and never one that is too small. When the budget seems to be used up,
    the files are counted anew. A note from before the last boot does not count.

    A file has a shared lock (``flock``) while it is read or written. To remove a file, a process
    takes an exclusive lock and cuts the file first, so that its memory is free at once. The lock
    makes that safe: chunks are never mapped without it.
    """

    def __init__(
        self, name: str, folder: str, budget_bytes: int, *, notes: str | None = None
    ) -> None:
        self.name, self.folder, self.budget_bytes = name, folder, budget_bytes
        self._most = budget_bytes - FOLDER_BYTES
        boot = read_text("/proc/sys/kernel/random/boot_id")
        self._boot = (boot or os.urandom(8).hex()).encode()  # unknown: files are counted anew
        self._has_warned = False  # of a chunk that is larger than the budget
        self._syncing = threading.Lock()
        self._has_new_names = False
        self._mutex = threading.Lock()
        self._fd = self._lock = -1
        self._fds = Descriptors()
        with ExitStack() as undo:
            undo.callback(self._close_files)
            self._fd = self._fds.add(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._files = BudgetFolder(self._fd, _ANY_FILE)
            # In shared memory, a block is a page of the kernel.
            self._block_bytes = max(_LEAST_BLOCK_BYTES, os.fstatvfs(self._fd).f_frsize)
            flags = os.O_RDWR | os.O_CREAT | _OPEN
            path = os.path.join(notes or folder, _LOCK)
            self._lock = self._fds.add(os.open, path, flags, 0o600)
            if not stat.S_ISREG(os.fstat(self._lock).st_mode):
                raise OSError(errno.EINVAL, "Expected a regular file", path)
            with self._locked():
                pass
            undo.pop_all()

    # ---- chunks ----

    def has(self, key: bytes) -> bool:
        """Whether there is a file of this name with bytes in it."""
        try:
            return os.stat(_name(key), dir_fd=self._fd, follow_symlinks=False).st_size > 0
        except FileNotFoundError:
            return False

    def read(self, key: bytes, out: NDArray[np.uint8], *, marks: bool = True) -> int:
        """Read a file of the size of `out`; return its size in any case, 0 without a file.

        With `marks`, it counts as used, unless it did a short time ago.
        """
        with suppress(FileNotFoundError, BlockingIOError), Descriptors() as fds:
            opens = partial(os.open, dir_fd=self._fd)
            fd = fds.add(opens, _name(key), os.O_RDONLY | _OPEN)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # another process may be removing it
            info = os.fstat(fd)
            n = info.st_size
            if n != self._file_bytes(out.nbytes):
                return n
            if marks and abs(time.time_ns() - info.st_mtime_ns) > MARK_AFTER_NS:
                os.utime(fd)
            rest, offset = out.data, 0
            while rest:
                done = os.preadv(fd, [rest], offset)
                if done == 0:
                    return offset
                rest, offset = rest[done:], offset + done
            return out.nbytes
        return 0

    def read_head(self, key: bytes, nbytes: int) -> bytes:
        """Return the first bytes of a file, whatever its size. OSError without one."""
        with Descriptors() as fds:
            opens = partial(os.open, dir_fd=self._fd)
            return os.pread(fds.add(opens, _name(key), os.O_RDONLY | _OPEN), nbytes, 0)

    def write(
        self, key: bytes, data: NDArray[np.uint8], used_ns: int, note: dict[str, Any] | None = None
    ) -> bool:
        """Write a file under another name, bring it to the disk, and rename it.

        After `sync`, the disk has the name, too: once for many files, since it takes as long as a
        file of megabytes.
        """
        name, cost = _name(key), self._cost(data.nbytes)
        temporary = f".{os.urandom(8).hex()}{TEMPORARY}"
        with attribute_errors(os.path.join(self.folder, name)), ExitStack() as undo:
            with self._locked():
                if self.has(key):  # another writer was faster
                    return True
                if not self._make_room(cost, used_ns):
                    return False
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
                fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
                undo.callback(os.close, fd)
                undo.callback(self._forget, temporary, cost)
                fcntl.flock(fd, fcntl.LOCK_SH)  # unlocked temporary files are stale
                if not self._allocate(fd, self._file_bytes(data.nbytes)):
                    self._unlink(temporary, cost)
                    return False
            self._fill(fd, data)
            if note is not None:
                notes.write_note(fd, note)
            os.utime(fd, ns=(used_ns, used_ns))
            os.fsync(fd)
            with self._locked():
                if not self.has(key):
                    os.replace(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                    self._has_new_names = True
        return True

    def sync(self) -> None:
        """Bring the names of new files to the disk; returns when all written before are there."""
        with self._syncing:
            if self._has_new_names:
                self._has_new_names = False
                with suppress(OSError):  # the file system cannot sync folders
                    os.fsync(self._fd)

    def _allocate(self, fd: int, nbytes: int) -> bool:
        """Allocate the room of an empty file; return False if there is not enough."""
        return allocate(fd, nbytes)

    def _file_bytes(self, nbytes: int) -> int:
        """Return the size of the file of a chunk of `nbytes` bytes."""
        return nbytes

    def _fill(self, fd: int, data: NDArray[np.uint8]) -> None:
        """Write a file whose room is allocated."""
        rest, offset = data.data, 0
        while rest:
            done = os.pwrite(fd, rest, offset)
            rest, offset = rest[done:], offset + done

    def remove(self, key: bytes) -> None:
        """Remove a file, unless it is being read."""
        self.drop(key, even_pinned=True)

    def drop(self, key: bytes, *, even_pinned: bool = False) -> int:
        """Remove a file, unless it is being read or pinned; return the bytes it took."""
        with self._locked():
            if freed := self._drop(_name(key), even_pinned=even_pinned):
                self._note(max(0, self._used() - freed))
        return freed

    def path_of(self, key: bytes) -> str:
        """Return a path of a chunk's file that holds while the tier is open."""
        return f"/proc/self/fd/{self._fd}/{_name(key)}"

    def chunks(self) -> list[CachedFile]:
        """List the files of chunks."""
        return [file for file in self._files.files() if _CHUNK.fullmatch(file.name)]

    def touch(self, keys: Sequence[bytes], used_ns: int) -> None:
        """Set the times of files."""
        for i, key in enumerate(keys):
            with suppress(OSError):  # this tier does not have it
                os.utime(_name(key), ns=(used_ns - i, used_ns - i), dir_fd=self._fd)

    def give_back(self) -> int:
        """Remove all files that are not pinned, read or written, and return the bytes they took."""
        with self._locked():
            files = self._scan()
            freed = sum(self._drop(file.name) for file in files)
            self._note(self._used() - freed)
        return freed

    def stat(self) -> TierStat:
        """Count all files."""
        with self._locked():
            files = self._scan()
            used = self._used()
        n_chunks = sum(bool(_CHUNK.fullmatch(file.name)) for file in files)
        return TierStat(self.name, self.folder, used, self.budget_bytes, n_chunks)

    def close(self) -> None:
        """Close the folder. Closing twice is no error."""
        with self._mutex:
            self._close_files()

    def _close_files(self) -> None:
        self._lock = self._fd = -1
        self._fds.close()

    # ---- the bytes that files take: all with the lock ----

    def _cost(self, nbytes: int) -> int:
        return -(-nbytes // self._block_bytes) * self._block_bytes + _ENTRY_BYTES

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex:  # a lock of the process does not exclude its own threads
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            except OSError as error:
                what = f"a store locks its folder (flock): {error.strerror}; choose a local disk"
                raise OSError(error.errno, what, self.folder) from None
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _used(self) -> int:
        found = _STATE.fullmatch(os.pread(self._lock, _STATE_BYTES, 0))
        if found is None or found[2] != self._boot:
            self._scan()
            found = _STATE.fullmatch(os.pread(self._lock, _STATE_BYTES, 0))
            assert found is not None  # it was just written
        return int(found[1])

    def _note(self, used: int) -> None:
        text = b"unimem KV chunks 1 %d %s" % (used, self._boot)
        os.pwrite(self._lock, text.ljust(_STATE_BYTES), 0)

    def _scan(self) -> list[CachedFile]:
        """List chunks and temporary files in use, with the bytes they take; note the sum."""
        self._files.sweep(_TEMPORARY)
        found = [file._replace(nbytes=self._cost(file.nbytes)) for file in self._files.files()]
        self._note(sum(file.nbytes for file in found))
        return found

    def _make_room(self, cost: int, used_ns: int) -> bool:
        """Take room for one file; drop the least recently used chunks if the budget is used up."""
        if cost > self._most:
            if not self._has_warned:
                self._has_warned = True
                policy.warn(
                    f"{self.folder} keeps no chunk of {cost} bytes: {self.name}_bytes is "
                    f"{self.budget_bytes}; expected {cost + FOLDER_BYTES} or more, or 0"
                )
            return False
        used = self._used()
        if used + cost > self._most:
            files, now = self._scan(), time.time_ns()
            # A time in the future is from a wrong clock.
            older = [
                file
                for file in files
                if (file.used_ns < used_ns or file.used_ns > now) and _CHUNK.fullmatch(file.name)
            ]
            used = sum(file.nbytes for file in files)
            enough = max(0, self._most - cost - self._most // _SHARE_OF_ROOM)
            used -= self._files.remove_oldest(older, used - enough, self._drop)
        fits = used + cost <= self._most
        self._note(used + cost * fits)
        return fits

    def _drop(self, name: str, *, even_pinned: bool = False) -> int:
        """Cut and remove a file without readers or pin; return the bytes it took, 0 if it stays."""
        try:
            fd = os.open(name, os.O_RDWR | _OPEN, dir_fd=self._fd)
        except OSError:  # it is gone, or not ours
            return 0
        try:
            if not even_pinned and notes.pinned_until(fd) is not None:
                return 0
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or not info.st_nlink:
                return 0
            os.ftruncate(fd, 0)
            os.unlink(name, dir_fd=self._fd)
        except OSError:
            return 0
        finally:
            os.close(fd)
        return self._cost(info.st_size)

    def _forget(self, temporary: str, cost: int) -> None:
        """Remove a temporary file that did not become a chunk."""
        with suppress(FileNotFoundError):
            os.stat(temporary, dir_fd=self._fd, follow_symlinks=False)
            with self._locked():
                self._unlink(temporary, cost)

    def _unlink(self, temporary: str, cost: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._fd)
            self._note(max(0, self._used() - cost))


class DiskTier(FolderTier):
    """Chunks in a folder on a disk, which is made if it is missing. They outlive the store."""

    def __init__(self, folder: str, budget_bytes: int) -> None:
        check_own_folder(folder, create=True, instead="another folder")
        super().__init__("disk", folder, budget_bytes)


def _name(key: bytes) -> str:
    return key.hex() + _SUFFIX


def allocate(fd: int, nbytes: int) -> bool:
    """Set the size of a file and allocate its room, if possible; False if there is too little."""
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        if error.errno in _NO_ROOM:
            return False
        if error.errno not in _NO_ALLOCATION:
            raise
    return allocate_range(fd, 0, nbytes)


def allocate_range(fd: int, begin: int, nbytes: int) -> bool:
    """Allocate a part of a file, if possible; False if there is too little room."""
    try:
        os.posix_fallocate(fd, begin, nbytes)
    except OSError as error:
        if error.errno in _NO_ROOM:
            return False
        if error.errno not in _NO_ALLOCATION:
            raise
    return True
