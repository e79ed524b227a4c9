"""Tiers of a store of KV chunks: where chunks lie, and which are dropped when there is no room.

A tier is an object with the methods of `Tier`. Those that are here are folders: of a disk, or of
shared memory. There is no index that could be wrong: a chunk is found by its name, which is its
identity, and the time of its last use is that of its file.
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

from unimem._core.block import Block
from unimem._core.tmpfs import huge_page_bytes
from unimem.base.cache_folder import check_own_folder
from unimem.base.descriptors import Descriptors
from unimem.base.kernel_files import read_text
from unimem.errors import CapacityError, PlacementError
from unimem.system import limits, policy
from unimem.system.placement import Pages, Placement, sum_placements

__all__ = ["DiskTier", "FolderTier", "RamPages", "RamTier", "Tier", "TierStat"]

RamPages = Literal["4k", "thp", "2m"]

_PREFIX = "unimem-kv-"
_SUFFIX, _TEMPORARY = ".kv", ".unimem-tmp"
_CHUNK = re.compile(rf"[0-9a-f]{{64}}{re.escape(_SUFFIX)}")
_LOCK = ".lock"
_STATE = re.compile(rb"unimem KV chunks 1 (\d{1,20}) (\S{1,64})\s*")
_STATE_BYTES = 128
# Of a file system that does not say what its blocks are.
_LEAST_BLOCK_BYTES = 4096
# What a file system needs for a file beside its data: its name, and where its pieces lie.
_ENTRY_BYTES = 8192
# The same of the folder and the lock.
_FOLDER_BYTES = 16384
# Where there is no room, so much more is made: files are listed and sorted once for many chunks.
_SHARE_OF_ROOM = 16
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM}
_NO_ALLOCATION = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class TierStat(NamedTuple):
    """What a tier holds.

    Attributes
    ----------
    name : str
        ``"ram"`` or ``"disk"``.
    path : str
        Where it lies.
    nbytes : int
        What its files take, with what the file system needs for them.
    budget_bytes : int
        The most that they may.
    n_chunks : int
        Chunks.
    """

    name: str
    path: str
    nbytes: int
    budget_bytes: int
    n_chunks: int


class Tier(Protocol):
    """Where chunks lie. Any number of threads and processes use one at a time."""

    def has(self, key: bytes) -> bool:
        """Whether there is a chunk of this identity; its bytes are not looked at."""

    def read(self, key: bytes, out: NDArray[np.uint8]) -> int:
        """Read a chunk; return its bytes, 0 where there is none, and fill `out` if it has these."""

    def write(self, key: bytes, data: NDArray[np.uint8], used_ns: int) -> bool:
        """Keep a chunk, whole or not at all; False where there is no room.

        It counts as used at `used_ns` (nanoseconds since 1970), and only chunks that were used
        before that make room for it.
        """

    def remove(self, key: bytes) -> None:
        """Drop a chunk, unless somebody reads it."""

    def touch(self, keys: Sequence[bytes], used_ns: int) -> None:
        """Note when the chunks of a prefix were used: each one a nanosecond before the last."""

    def give_back(self) -> int:
        """Drop what nobody reads, and return its bytes."""

    def stat(self) -> TierStat:
        """Count."""

    def close(self) -> None:
        """Use it no more. Twice is no error."""


class FolderTier:
    """Chunks as files of one folder.

    What all files take is noted in the lock file, before a file is made and after one was removed,
    so that a process that is killed in between leaves a figure that is too large, and never one
    that is too small. When the budget seems to be used up, files are counted anew. A note from
    before the machine was started is not believed.

    A file that is read has a shared lock (``flock``), as has one that is written. Who removes a
    file takes an exclusive one and cuts it off first, so that its memory is free at once.

    Parameters
    ----------
    name : str
        Of the tier.
    folder : str
        Its absolute path. It is there, and of this user alone.
    budget_bytes : int
        The most that it may take.
    notes : str, optional
        The folder of the lock and of what it notes, where that is another one.

    Raises
    ------
    OSError
        It cannot be written, or has no locks.
    """

    def __init__(
        self, name: str, folder: str, budget_bytes: int, *, notes: str | None = None
    ) -> None:
        self.name, self.folder, self.budget_bytes = name, folder, budget_bytes
        self._most = budget_bytes - _FOLDER_BYTES
        boot = read_text("/proc/sys/kernel/random/boot_id")
        self._boot = (boot or os.urandom(8).hex()).encode()  # without one, files are counted
        self._mutex = threading.Lock()
        self._fd = self._lock = -1
        self._fds = Descriptors()
        with ExitStack() as undo:
            undo.callback(self._close_files)
            self._fd = self._fds.add(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            # Of shared memory, a page of the kernel.
            self._block_bytes = max(_LEAST_BLOCK_BYTES, os.fstatvfs(self._fd).f_frsize)
            flags = os.O_RDWR | os.O_CREAT | _OPEN
            path = os.path.join(notes or folder, _LOCK)
            self._lock = self._fds.add(os.open, path, flags, 0o600)
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

    def read(self, key: bytes, out: NDArray[np.uint8]) -> int:
        """Read a file that has as many bytes as `out`; return its bytes, 0 without a file."""
        with suppress(FileNotFoundError, BlockingIOError), Descriptors() as fds:
            opens = partial(os.open, dir_fd=self._fd)
            fd = fds.add(opens, _name(key), os.O_RDONLY | _OPEN)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # it may be being removed
            n = os.fstat(fd).st_size
            if n != self._file_bytes(out.nbytes):
                return n
            rest, offset = out.data, 0
            while rest:
                done = os.preadv(fd, [rest], offset)
                if done == 0:
                    return offset
                rest, offset = rest[done:], offset + done
            return out.nbytes
        return 0

    def write(self, key: bytes, data: NDArray[np.uint8], used_ns: int) -> bool:
        """Write a file under another name, bring it to the disk, and rename it."""
        name, cost = _name(key), self._cost(data.nbytes)
        temporary = f".{os.urandom(8).hex()}{_TEMPORARY}"
        with ExitStack() as undo:
            with self._locked():
                if self.has(key):  # another was faster
                    return True
                if not self._make_room(cost, used_ns):
                    return False
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
                fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
                undo.callback(os.close, fd)
                undo.callback(self._forget, temporary, cost)
                fcntl.flock(fd, fcntl.LOCK_SH)  # an unlocked one is stale
                if not self._allocate(fd, self._file_bytes(data.nbytes)):
                    self._unlink(temporary, cost)
                    return False
            self._fill(fd, data)
            os.utime(fd, ns=(used_ns, used_ns))
            os.fsync(fd)
            with self._locked():
                if not self.has(key):
                    os.replace(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        with suppress(OSError):  # a file system without such a thing
            os.fsync(self._fd)
        return True

    def _allocate(self, fd: int, nbytes: int) -> bool:
        """Give an empty file its room; False where there is none."""
        return _allocate(fd, nbytes)

    def _file_bytes(self, nbytes: int) -> int:
        """Return the size of the file of a chunk."""
        return nbytes

    def _fill(self, fd: int, data: NDArray[np.uint8]) -> None:
        """Write a file that has its room."""
        rest, offset = data.data, 0
        while rest:
            done = os.pwrite(fd, rest, offset)
            rest, offset = rest[done:], offset + done

    def remove(self, key: bytes) -> None:
        """Remove a file, unless somebody reads it."""
        with self._locked():
            if freed := self._drop(_name(key)):
                self._note(max(0, self._used() - freed))

    def touch(self, keys: Sequence[bytes], used_ns: int) -> None:
        """Set the times of files."""
        for i, key in enumerate(keys):
            with suppress(OSError):  # it is not here
                os.utime(_name(key), ns=(used_ns - i, used_ns - i), dir_fd=self._fd)

    def give_back(self) -> int:
        """Remove all files that nobody reads or writes, and return what they took."""
        with self._locked():
            files = self._scan()
            freed = sum(self._drop(name) for _, name, _ in files)
            self._note(self._used() - freed)
        return freed

    def stat(self) -> TierStat:
        """Count all files."""
        with self._locked():
            files = self._scan()
            used = self._used()
        n_chunks = sum(bool(_CHUNK.fullmatch(name)) for _, name, _ in files)
        return TierStat(self.name, self.folder, used, self.budget_bytes, n_chunks)

    def close(self) -> None:
        """Close the folder. Twice is no error."""
        with self._mutex:
            self._close_files()

    def _close_files(self) -> None:
        self._lock = self._fd = -1
        self._fds.close()

    # ---- what files take: all of it with the lock ----

    def _cost(self, nbytes: int) -> int:
        return -(-nbytes // self._block_bytes) * self._block_bytes + _ENTRY_BYTES

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex:  # which a lock of this process does not keep its threads from
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
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

    def _scan(self) -> list[tuple[int, str, int]]:
        """List chunks, and files that become chunks: times, names and costs; note their sum."""
        found = []
        for name in os.listdir(self._fd):
            is_temporary = name.startswith(".") and name.endswith(_TEMPORARY)
            if (is_temporary and not self._drop(name)) or _CHUNK.fullmatch(name):
                with suppress(FileNotFoundError):
                    info = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                    found.append((info.st_mtime_ns, name, self._cost(info.st_size)))
        self._note(sum(nbytes for _, _, nbytes in found))
        return found

    def _make_room(self, cost: int, used_ns: int) -> bool:
        """Take room for one file, and drop what was used longest ago if there is none."""
        if cost > self._most:
            return False
        used = self._used()
        if used + cost > self._most:
            files = self._scan()
            used = sum(nbytes for _, _, nbytes in files)
            enough = max(0, self._most - cost - self._most // _SHARE_OF_ROOM)
            now = time.time_ns()
            for at, name, nbytes in sorted(files):
                if used <= enough:
                    break
                # A time to come is of a clock that was wrong.
                is_older = at < used_ns or at > now
                if is_older and _CHUNK.fullmatch(name) and self._drop(name):
                    used -= nbytes
        fits = used + cost <= self._most
        self._note(used + cost * fits)
        return fits

    def _drop(self, name: str) -> int:
        """Remove a file that nobody holds, and return what it took; 0 where somebody does."""
        try:
            fd = os.open(name, os.O_RDWR | _OPEN, dir_fd=self._fd)
        except OSError:  # it is gone, or not ours
            return 0
        try:
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
        """Remove what did not become a chunk."""
        with suppress(FileNotFoundError):
            os.stat(temporary, dir_fd=self._fd, follow_symlinks=False)
            with self._locked():
                self._unlink(temporary, cost)

    def _unlink(self, temporary: str, cost: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._fd)
            self._note(max(0, self._used() - cost))


class DiskTier(FolderTier):
    """Chunks in a folder of a disk, which stay.

    Parameters
    ----------
    folder : str
        Its absolute path; it is made where there is none.
    budget_bytes : int
        The most that it may take.
    """

    def __init__(self, folder: str, budget_bytes: int) -> None:
        check_own_folder(folder, create=True, instead="another folder")
        super().__init__("disk", folder, budget_bytes)


class RamTier(FolderTier):
    """Chunks in shared memory, for all processes of this user that have the same store open.

    It goes with the last of them. What processes leave that were killed goes when the next store is
    opened.

    Parameters
    ----------
    folder : str
        Of the store, which tells its memory from that of others.
    budget_bytes : int
        The most that it may take.
    pages : {"4k", "thp"}
        Of the chunks that are written here. Huge pages are made of what was written, where a chunk
        has whole ones; a `PlacementWarning` says where they cannot be had.
    numa : str, optional
        Their nodes, as `PlacementOptions` has them; memory is on them before it is written to.

    Raises
    ------
    CapacityError
        ``/dev/shm`` is smaller.
    ValueError
        `numa` is no such policy.
    OSError
        There is none, or it cannot be written.
    """

    #: Of the memory that a policy is set for.
    _block_pages: Pages = "4k"

    def __init__(
        self,
        folder: str,
        budget_bytes: int,
        *,
        pages: Literal["4k", "thp"] = "4k",
        numa: str | None = None,
    ) -> None:
        policy.parse_numa(numa)
        self._pages: RamPages = pages
        self._numa = numa
        fs = os.statvfs(limits.SHM)
        room = fs.f_blocks * fs.f_frsize
        if room and room < budget_bytes:  # a size of 0 is no limit
            raise CapacityError(
                f"ram_bytes: {limits.SHM} has room for {room} bytes, got {budget_bytes}: a smaller "
                f"ram_bytes, mount -o remount,size={budget_bytes} {limits.SHM}, or docker "
                "--shm-size",
                room,
                0,
                budget_bytes,
            )
        path = f"{limits.SHM}/{self._folder_name(os.stat(folder))}"
        self._open_for_all([path], budget_bytes)

    def _folder_name(self, store: os.stat_result) -> str:
        return f"{_PREFIX}{os.geteuid()}-{store.st_dev:x}-{store.st_ino:x}"

    def _open_for_all(self, folders: list[str], budget_bytes: int) -> None:
        """Open folders that go with the last process that has them: that of the notes first."""
        self._pid = os.getpid()
        self._kept: list[tuple[str, int]] = []
        with ExitStack() as undo:
            undo.callback(self._leave)
            for folder in folders:
                _sweep(os.path.dirname(folder))
                self._kept.append((folder, _keep(folder)))
            super().__init__("ram", folders[-1], budget_bytes, notes=folders[0])
            undo.pop_all()

    def _allocate(self, fd: int, nbytes: int) -> bool:
        if self._numa is None:
            return _allocate(fd, nbytes)

        def allocate(block: Block) -> None:
            if not _allocate(fd, nbytes):
                raise CapacityError("there is no room for a chunk", nbytes, 0, nbytes)
            block.warm()

        # The policy stays with the file, whoever writes to it, and however.
        how: dict[str, Any] = {"pages": self._block_pages, "numa": self._numa}
        how["category"] = "staging"
        try:
            with Block._filled(nbytes, allocate, fd=fd, name="chunk", **how):
                return True
        except CapacityError:
            return False

    def _fill(self, fd: int, data: NDArray[np.uint8]) -> None:
        super()._fill(fd, data)
        if self._pages == "thp" and 0 < huge_page_bytes() <= data.nbytes:
            with self._mapped(fd, data.nbytes, "r+") as block:
                try:
                    block.collapse()
                except PlacementError as error:
                    policy.warn(f"a chunk in {self.folder} has no huge pages: {error}")

    def _mapped(self, fd: int, nbytes: int, mode: Literal["r", "r+"]) -> Block:
        return Block._map_fd(fd, 0, nbytes, mode, self.folder, "staging", "chunk")

    def granted(self) -> Placement | None:
        """Ask the kernel how the chunks lie, whoever wrote them; None without chunks."""
        found = []
        for name in os.listdir(self._fd):
            if not _CHUNK.fullmatch(name):
                continue
            with suppress(FileNotFoundError, BlockingIOError), ExitStack() as undo:
                fd = os.open(name, os.O_RDONLY | _OPEN, dir_fd=self._fd)
                undo.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # it is not cut off meanwhile
                if nbytes := os.fstat(fd).st_size:
                    block = undo.enter_context(self._mapped(fd, nbytes, "r"))
                    block.warm()
                    found.append(block.verify())
        return sum_placements(found) if found else None

    def close(self) -> None:
        """Close the folder, and remove it where no other process has it open."""
        super().close()
        self._leave()

    def _leave(self) -> None:
        while self._kept:
            folder, fd = self._kept.pop()
            # A forked child has the same lock, and leaves all to its parent.
            if os.getpid() == self._pid:
                _remove_unkept(folder, fd)
            with suppress(OSError):  # it is closed in any case
                os.close(fd)


def _name(key: bytes) -> str:
    return key.hex() + _SUFFIX


def _allocate(fd: int, nbytes: int) -> bool:
    """Give a file its size, and its room where the file system can; False where there is none."""
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in _NO_ROOM:
            return False
        if error.errno not in _NO_ALLOCATION:
            raise
    return True


def _keep(path: str) -> int:
    """Make a folder of shared memory where there is none, and keep others from removing it."""
    while True:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with suppress(FileNotFoundError), ExitStack() as undo:
            check_own_folder(path, instead="ram_bytes=0")
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            undo.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                undo.pop_all()
                return fd


def _remove_unkept(path: str, fd: int) -> None:
    import shutil

    with suppress(OSError):  # another process has it, or it is another folder by now
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            shutil.rmtree(path)


def _sweep(root: str) -> None:
    """Remove what processes of this user that were killed have left in shared memory."""
    for name in os.listdir(root):
        if name.startswith(f"{_PREFIX}{os.geteuid()}-"):
            path = f"{root}/{name}"
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    _remove_unkept(path, fd)
                finally:
                    os.close(fd)
