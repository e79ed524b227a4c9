"""The tier of a store in RAM: one pool of shared memory, with a table of its chunks.

The pool is divided into units, and a chunk takes a run of them. The table has for each place of a
chunk a tag (of its identity; 0 for a free place), the time of its last use, and a record. A chunk's
place is one of a few that its tag chooses, so that a lookup reads only these.

Writers take turns: a lock of the kernel, which ends with its process, is held while a chunk is
copied. A chunk's tag is written last, so a killed writer leaves a free place, and nothing to sweep;
the next one derives the map of free units from the records anew. Readers take no lock. A chunk that
was replaced meanwhile has another generation, and its bytes fail their hash in any case.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem._core.block import Block
from unimem.base.cache_folder import OPEN_FOLDER, empty_folder, foreign_kind
from unimem.base.descriptors import Descriptors
from unimem.errors import CapacityError, PlacementError
from unimem.kv.store.tiers import (
    FOLDER_BYTES,
    MARK_AFTER_NS,
    RamPages,
    TierStat,
    allocate,
    allocate_range,
)
from unimem.system import limits, policy
from unimem.system.placement import Pages, Placement

_PREFIX = "unimem-kv-"
_LOCK, _TABLE, _POOL = ".lock", "table", "pool"
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_PAGE_BYTES = 4096
_MOST_UNITS = 1 << 16
#: The places that a tag chooses from. At most half of all places are taken: a chunk has two units.
_WINDOW = 64
_MOST_NAMES = 100  # tried for a folder in shared memory, where any user may take a name
_FREE = np.iinfo(np.int64).max  # the time of use of a free place: it is never the oldest
_MAGIC = int.from_bytes(b"UNIMEMP1", "little")
_HEAD = np.dtype(
    [
        (name, "<u8")
        for name in ("magic", "unit_bytes", "n_units", "used_units", "changing", "given_back")
    ]
)
#: A chunk of the pool. The fields behind `nbytes` are zeros as long as nothing sets them.
_RECORD = np.dtype(
    [
        ("key", "V32"),
        ("generation", "<u8"),
        ("first", "<u4"),
        ("count", "<u4"),
        ("nbytes", "<u8"),
        ("layout", "V16"),
        ("engine", "V16"),
        ("salt", "V16"),
        ("expires_ns", "<i8"),
        ("codec", "<u4"),
        ("pins", "<u4"),
    ]
)


class RamTier:
    """Chunks in one pool of shared memory, for all processes of this user with the same store.

    The first of them takes the pool's memory, and the last one that closes the store frees it. If
    processes were killed, it is freed when the next store is opened.

    Parameters
    ----------
    folder : str
        The store's folder, which identifies its memory.
    budget_bytes : int
        The size of the pool with its table. A process that finds a pool keeps to the smaller one of
        both sizes. CapacityError if ``/dev/shm`` is smaller.
    pages : {"4k", "thp"}
        Pages of the pool. With ``"thp"``, its memory is collapsed into huge pages; if that fails,
        there is a `PlacementWarning`.
    numa : str, optional
        Nodes of the pool, as for `PlacementOptions`, set before its memory is taken.
    """

    name = "ram"
    #: The pages of memory that gets a NUMA policy.
    _block_pages: Pages = "4k"
    _least_unit = _PAGE_BYTES

    def __init__(
        self, folder: str, budget_bytes: int, *, pages: RamPages = "4k", numa: str | None = None
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
        self._open_for_all(f"{limits.SHM}/{self._folder_name(os.stat(folder))}", budget_bytes)

    def _folder_name(self, store: os.stat_result) -> str:
        return f"{_PREFIX}{os.geteuid()}-{store.st_dev:x}-{store.st_ino:x}"

    def _open_for_all(self, folder: str, budget_bytes: int) -> None:
        """Open the folder of the table and that of the pool; the last process removes both."""
        self._pid = os.getpid()
        self.folder, self.budget_bytes = folder, budget_bytes
        self._mutex = threading.Lock()
        self._has_warned = False  # of a chunk that is larger than the pool
        self._fds = Descriptors()
        self._own = threading.local()
        self._kept: list[tuple[str, int]] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            self._block: Block | None = None
            self._map_of_table: Block | None = None
            self._data = np.empty(0, np.uint8)
            sweep(os.path.dirname(folder))
            self._kept.append(_keep(folder))
            opens = partial(os.open, dir_fd=self._kept[0][1])
            self._lock = self._fds.add(opens, _LOCK, _OPEN, 0o600)
            self._table = self._fds.add(opens, _TABLE, _OPEN, 0o600)
            with self._mutex, _flock(self._lock):
                self._keep_pool()
                self.folder, self._place = self._kept[-1]
                self._pool = self._fds.add(self._open_in_place, _POOL, _OPEN)
                self._map()
            undo.pop_all()

    def _keep_pool(self) -> None:
        """Keep the folder of the pool, too, if it is another one than the table's."""

    def _open_in_place(self, name: str, flags: int) -> int:
        return os.open(name, flags, 0o600, dir_fd=self._place)

    def _map(self) -> None:
        """Map the table; make it, and the pool, if this is the first process."""
        head = np.frombuffer(os.pread(self._table, _HEAD.itemsize, 0).ljust(_HEAD.itemsize), _HEAD)
        is_new = head["magic"][0] != _MAGIC
        if is_new:
            unit = max(self._least_unit, 1 << (self.budget_bytes // _MOST_UNITS).bit_length())
            n = _units_of(self.budget_bytes, unit)
            allocated = allocate(self._table, _table_bytes(n)) and self._take(n * unit)
            if not allocated:
                raise CapacityError(
                    f"ram_bytes: there is no room for {self.budget_bytes} bytes in {limits.SHM}: "
                    "expected a smaller ram_bytes, or a larger file system",
                    self.budget_bytes,
                    0,
                    self.budget_bytes,
                )
        else:
            unit, n = int(head["unit_bytes"][0]), int(head["n_units"][0])
            sizes = [os.fstat(fd).st_size for fd in (self._table, self._pool)]
            if sizes != [_table_bytes(n), n * unit]:  # a mapping beyond a file's end is a SIGBUS
                text = "The table of chunks is damaged: end all processes with this store"
                raise OSError(errno.EIO, text, self.folder)
        how = self.folder, "staging", "table of chunks"
        self._map_of_table = Block._map_fd(self._table, 0, _table_bytes(n), "r+", *how)
        memory = self._map_of_table.as_array("uint8", _table_bytes(n))
        self._head: NDArray[Any] = np.frombuffer(memory, _HEAD, 1)
        at = iter(np.cumsum([_PAGE_BYTES, 8 * n, 8 * n, _RECORD.itemsize * n]).tolist())
        self._tags: NDArray[Any] = np.frombuffer(memory, np.uint64, n, next(at))
        self._used: NDArray[Any] = np.frombuffer(memory, np.int64, n, next(at))
        self._records: NDArray[Any] = np.frombuffer(memory, _RECORD, n, next(at))
        self._busy: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, n, next(at))
        del memory  # an error's traceback would keep it, and then the table cannot be closed
        self._unit, self._n_units = unit, n
        self._map_pool(n * unit, is_new=is_new)
        self._most = min(n, _units_of(self.budget_bytes, unit))
        if is_new:
            self._used[:] = _FREE
            self._head["unit_bytes"], self._head["n_units"] = unit, n
            self._head["magic"] = _MAGIC

    def _take(self, nbytes: int) -> bool:
        """Take the memory of the pool, which is empty; return False if there is not enough."""
        if nbytes == 0:
            return True
        if self._numa is not None:

            def fill(block: Block) -> None:
                if not allocate(self._pool, nbytes):
                    raise CapacityError("there is no room for the pool", nbytes, 0, nbytes)
                block.warm()

            # The policy stays with the file, whichever process writes to it.
            how: dict[str, Any] = {"pages": self._block_pages, "numa": self._numa}
            how["category"] = "staging"
            try:
                with Block._filled(nbytes, fill, fd=self._pool, name="pool of chunks", **how):
                    pass
            except CapacityError:
                return False
        elif not allocate(self._pool, nbytes):
            return False
        return True

    def _map_pool(self, nbytes: int, *, is_new: bool) -> None:
        how = self.folder, "staging", "pool of chunks"
        self._block = Block._map_fd(self._pool, 0, nbytes, "r+", *how) if nbytes else None
        if self._block is None:
            return
        self._data = self._block.as_array("uint8", nbytes)
        if is_new:
            self._block.warm()
        if is_new and self._pages == "thp":
            try:
                self._block.collapse()
            except PlacementError as error:
                policy.warn(f"the pool of {self.folder} has no huge pages: {error}")

    # ---- chunks ----

    def has(self, key: bytes) -> bool:
        """Whether the table has a chunk of this identity."""
        return self._find(key) is not None

    def use(self, key: bytes, take: Callable[[NDArray[np.uint8]], object]) -> int:
        """Call `take` with the bytes of a chunk, in place.

        Return their number; 0 if there is no chunk, or if it was replaced meanwhile: then what was
        taken must not be used.
        """
        at = self._find(key)
        if at is None:
            return 0
        with self._reading() as may:
            if not may:
                return 0
            record = self._records[at].copy()
            n, begin = int(record["nbytes"]), int(record["first"]) * self._unit
            take(self._data[begin : begin + n])
        if abs(time.time_ns() - self._used[at]) > MARK_AFTER_NS:
            self.touch([key], time.time_ns())
        is_same = self._records["generation"][at] == record["generation"]
        return n if is_same and bytes(record["key"]) == key and self._tags[at] else 0

    def read(self, key: bytes, out: NDArray[np.uint8]) -> int:
        """Read a chunk of the size of `out`; return its size in any case, 0 without a chunk."""

        def copy(data: NDArray[np.uint8]) -> None:
            if data.nbytes == out.nbytes:
                out[:] = data

        return self.use(key, copy)

    def write(
        self, key: bytes, data: NDArray[np.uint8], used_ns: int, note: dict[str, Any] | None = None
    ) -> bool:
        """Copy a chunk into the pool."""

        def fill(place: NDArray[np.uint8]) -> None:
            place[:] = data

        return self.fill(key, data.nbytes, fill, used_ns)

    def fill(
        self,
        key: bytes,
        nbytes: int,
        fill: Callable[[NDArray[np.uint8]], object],
        used_ns: int,
    ) -> bool:
        """Let `fill` write a chunk into the pool; its tag is written last."""
        count = -(-nbytes // self._unit)
        if count > self._most:
            if not self._has_warned:
                self._has_warned = True
                policy.warn(
                    f"{self.folder} keeps no chunk of {nbytes} bytes: ram_bytes is "
                    f"{self.budget_bytes}, and chunks have {self._most * self._unit} of it"
                )
            return False
        with self._changing():
            if self.has(key):  # another writer was faster
                return True
            found = self._make_room(key, count, used_ns)
            if found is None:
                return False
            at, first = found
            begin = first * self._unit
            if self._head["given_back"][0] and not allocate_range(self._pool, begin, nbytes):
                return False
            fill(self._data[begin : begin + nbytes])
            record = np.zeros((), _RECORD)
            record["key"] = key
            record["generation"] = self._records["generation"][at] + 1
            record["first"], record["count"], record["nbytes"] = first, count, nbytes
            self._records[at] = record
            self._used[at] = used_ns
            self._busy[first : first + count] = 1
            self._head["used_units"] += count
            self._tags[at] = _tag(key)
        return True

    @contextmanager
    def _reading(self) -> Iterator[bool]:
        """Keep `give_back` from taking memory, by a lock of this thread; False if it does so."""
        if not hasattr(self._own, "fds"):
            fds = Descriptors()
            fds.add(self._open_in_place, _POOL, os.O_RDONLY | os.O_CLOEXEC)
            self._own.fds = fds
        fd = self._own.fds[0]
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def sync(self) -> None:
        """Do nothing: RAM does not outlive its machine."""

    def remove(self, key: bytes) -> None:
        """Drop a chunk."""
        with self._changing():
            at = self._find(key)
            if at is not None:
                self._free(at)

    def touch(self, keys: Sequence[bytes], used_ns: int) -> None:
        """Set the times of chunks."""
        with self._changing():
            for i, key in enumerate(keys):
                if (at := self._find(key)) is not None:
                    self._used[at] = used_ns - i

    def give_back(self) -> int:
        """Drop all chunks, free the memory of the pool, and return the bytes of the chunks."""
        with self._changing():
            freed = int(self._head["used_units"][0]) * self._unit
            for at in np.flatnonzero(self._tags):
                self._free(int(at))
            if self._block is not None:
                with Descriptors() as fds:
                    fd = fds.add(self._open_in_place, _POOL, os.O_RDWR | os.O_CLOEXEC)
                    fcntl.flock(fd, fcntl.LOCK_EX)  # readers end first
                    self._head["given_back"] = 1
                    with mmap.mmap(fd, self._n_units * self._unit) as memory:
                        memory.madvise(mmap.MADV_REMOVE)
        return freed

    def stat(self) -> TierStat:
        """Count the chunks."""
        nbytes = int(self._head["used_units"][0]) * self._unit
        n_chunks = int(np.count_nonzero(self._tags))
        return TierStat(self.name, self.folder, nbytes, self.budget_bytes, n_chunks)

    def extents(self) -> list[tuple[int, int]]:
        """List where chunks lie in the pool: the first byte, and the bytes."""
        taken = self._records[self._tags != 0]
        return [(int(each["first"]) * self._unit, int(each["nbytes"])) for each in taken]

    def granted(self) -> Placement | None:
        """Ask the kernel where the pool lies; None without chunks."""
        if self._block is None or not self._tags.any():
            return None
        self._block.warm()
        return self._block.verify()

    # ---- the table: all that changes it holds the lock ----

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; mend the map of free units if another process died or failed in it."""
        with self._mutex, _flock(self._lock):
            if self._head["changing"][0]:
                self._mend()
            self._head["changing"] = 1
            yield
            self._head["changing"] = 0

    def _mend(self) -> None:
        self._busy[:] = 0
        self._used[self._tags == 0] = _FREE
        for record in self._records[self._tags != 0]:
            self._busy[record["first"] : record["first"] + record["count"]] = 1
        self._head["used_units"] = np.count_nonzero(self._busy)

    def _window(self, tag: np.uint64) -> slice:
        begin = int(tag) // 2 % max(1, self._n_units - _WINDOW)
        return slice(begin, begin + _WINDOW)

    def _find(self, key: bytes) -> int | None:
        """Return the place of a chunk."""
        tag = _tag(key)
        window = self._window(tag)
        for i in np.flatnonzero(self._tags[window] == tag):
            at: int = window.start + int(i)
            if bytes(self._records["key"][at]) == key:
                return at
        return None

    def _make_room(self, key: bytes, count: int, used_ns: int) -> tuple[int, int] | None:
        """Find a place and the first of `count` free units; drop the least recently used chunks."""
        window, now = self._window(_tag(key)), time.time_ns()
        while True:
            places = np.flatnonzero(self._tags[window] == 0)
            first = self._busy.tobytes().find(bytes(count))
            if len(places) and first >= 0 and self._head["used_units"][0] + count <= self._most:
                return window.start + int(places[0]), first
            among = window if not len(places) else slice(0, None)
            used = self._used[among]
            oldest = int(np.argmin(used))
            if used[oldest] >= used_ns:
                # A time in the future is from a wrong clock.
                future = np.flatnonzero((used > now) & (used < _FREE))
                if not len(future):
                    return None
                oldest = int(future[0])
            self._free((among.start or 0) + oldest)

    def _free(self, at: int) -> None:
        self._tags[at] = 0
        self._used[at] = _FREE
        record = self._records[at]
        first, count = int(record["first"]), int(record["count"])
        self._records["generation"][at] += 1
        self._busy[first : first + count] = 0
        self._head["used_units"] -= count

    # ---- closing ----

    def close(self) -> None:
        """Close the pool, and remove it if no other process has it open."""
        with self._mutex:
            self._fds.close()
            self._own = threading.local()  # the descriptors of all threads are closed
            self._data = self._busy = np.empty(0, np.uint8)
            self._head = self._tags = self._used = self._records = self._data
            for block in (self._block, self._map_of_table):
                if block is not None:
                    block.close()
            self._block = self._map_of_table = None
            # A forked child has the same lock, and leaves the removal to its parent.
            if self._kept and os.getpid() == self._pid:
                _remove_unkept(*self._kept)
            while self._kept:
                with suppress(OSError):  # it is closed in any case
                    os.close(self._kept.pop()[1])


def _tag(key: bytes) -> np.uint64:
    """Return the beginning of an identity, which is never 0."""
    return np.uint64(int.from_bytes(key[:8], "little") | 1)


def _units_of(budget_bytes: int, unit_bytes: int) -> int:
    """Return the units, each with its part of the table, that a budget has room for."""
    most = budget_bytes - FOLDER_BYTES - 2 * _PAGE_BYTES
    return max(0, most // (unit_bytes + _RECORD.itemsize + 17))


def _table_bytes(n_units: int) -> int:
    return _PAGE_BYTES + -(-n_units * (_RECORD.itemsize + 17) // _PAGE_BYTES) * _PAGE_BYTES


@contextmanager
def _flock(fd: int) -> Iterator[None]:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _keep(path: str) -> tuple[str, int]:
    """Make or open a folder of shared memory, and keep other processes from removing it.

    If its name is taken by another user, or by anything but a folder, it gets another name.
    """
    taken = ""
    for i in range(_MOST_NAMES):
        name = f"{path}-{i}" if i else path
        found = keep_own(name)
        if isinstance(found, int):
            if taken:
                policy.warn(f"{taken}; chunks in RAM lie in {name} instead")
            return name, found
        taken = taken or f"{path} is {found}"
    raise PermissionError(
        errno.EPERM,
        f"Others have taken this name and the next {_MOST_NAMES - 1}: expected a folder of this "
        "user: remove them as root, or ram_bytes=0",
        path,
    )


def keep_own(path: str) -> int | str:
    """Make or open a folder, and lock it; say what else lies there."""
    while True:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with suppress(FileNotFoundError), ExitStack() as undo:  # it was just removed
            if kind := foreign_kind(os.lstat(path)):
                return kind
            fd = os.open(path, OPEN_FOLDER)
            undo.callback(os.close, fd)
            if kind := foreign_kind(os.fstat(fd)):
                return kind
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.path.samestat(os.lstat(path), os.fstat(fd)):
                undo.pop_all()
                return fd


def _remove_unkept(*kept: tuple[str, int]) -> None:
    """Remove folders unless another process has the first of them; the others belong to it."""
    with suppress(OSError):  # another process has it, or it is another folder by now
        fcntl.flock(kept[0][1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path, fd in reversed(kept):
            if os.path.samestat(os.lstat(path), os.fstat(fd)):
                empty_folder(fd)
                os.rmdir(path)


def sweep(root: str) -> None:
    """Remove the folders that killed processes of this user have left in shared memory."""
    for name in os.listdir(root):
        if name.startswith(f"{_PREFIX}{os.geteuid()}-"):
            path = f"{root}/{name}"
            with suppress(OSError):
                fd = os.open(path, OPEN_FOLDER)
                try:
                    if foreign_kind(os.fstat(fd)) is None:  # any user may take the name
                        _remove_unkept((path, fd))
                finally:
                    os.close(fd)
