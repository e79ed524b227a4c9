"""The memory of any process, from the kernel's smaps, numa_maps and pagemap."""

from __future__ import annotations

import errno
import mmap
import os
import pwd
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unimem.base import kernel_files
from unimem.base.arguments import integer
from unimem.base.kernel_files import parse_fields
from unimem.system import limits

_PAGE = mmap.PAGESIZE
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SMAPS_BYTES = 1 << 20  # of more than a thousand areas
_PF_KTHREAD = 0x00200000  # of the kernel's sched.h
_PAGEMAP_ENTRIES = 1 << 17  # read at a time
# Bits of an entry: in RAM, swapped out, and of a file or shared.
_PRESENT, _SWAPPED, _OF_FILE, _ONE = map(np.uint64, (63, 62, 61, 1))

_NODE = re.compile(rb" N(\d+)=(\d+)")
_KERNEL_PAGE = re.compile(rb" kernelpagesize_kB=(\d+)")
# Lines of smaps with a size; several of them are added up in one field of an area.
_SIZES = (
    b"Rss",
    b"Pss",
    b"Shared_Hugetlb",
    b"Private_Hugetlb",
    b"AnonHugePages",
    b"ShmemPmdMapped",
    b"FilePmdMapped",
    b"Swap",
    b"KernelPageSize",
    b"Anonymous",
)
# An entry of smaps or maps: its head, then lines in any order; lines of unknown names are skipped.
# One expression for all of it is the fastest way in Python, and most of the time of a reading.
# No alternative fails behind the beginning of its group: in a possessive repeat, `re` would keep
# the place of that group, and end with SystemError.
_ENTRY = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)\n?(?:"
    + b"".join(name + rb": +(?=\d)(\d+).*(?:\n|\Z)|" for name in _SIZES)
    + rb"VmFlags:(.*)(?:\n|\Z)|[A-Z].*\n)*+",
    re.MULTILINE,
)


class Area(NamedTuple):
    """One entry of smaps: a range of addresses with one access and one backing. It never changes.

    `access` is as in ``"rw-p"``, and `path` empty without a file. `rss_bytes` and `pss_bytes` do
    not count hugetlb pages, `locked_bytes` does; `huge_bytes` are of transparent huge pages.
    `nodes` are bytes in RAM by node, `flags` the words of VmFlags.
    `anonymous_bytes` are in RAM in pages of no file: in a private mapping of a file, copies that
    were written to.
    """

    start: int
    end: int
    access: str
    offset: int
    device: tuple[int, int]
    inode: int
    path: str
    rss_bytes: int
    pss_bytes: int
    hugetlb_bytes: int
    huge_bytes: int
    locked_bytes: int
    swapped_bytes: int
    page_bytes: int
    nodes: dict[int, int]
    flags: frozenset[str] = frozenset()
    anonymous_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.end - self.start

    @property
    def resident_bytes(self) -> int:
        """Its bytes in RAM, in pages of any kind."""
        return self.rss_bytes + self.hugetlb_bytes

    @property
    def written_bytes(self) -> int:
        """Its bytes in private copies of pages of its file, in RAM or swapped out."""
        is_private = bool(self.inode) and self.access[3:] == "p"
        return self.anonymous_bytes + self.swapped_bytes if is_private else 0

    @property
    def is_accessible(self) -> bool:
        """Whether it can hold anything: not ``---p``."""
        return self.access[:3] != "---"


@dataclass(frozen=True, slots=True)
class Process:
    """A process and its areas at the time of reading. Any number of threads may use it.

    `name` and `command` are of ``/proc/PID/comm`` and ``cmdline``. `started`, in clock ticks since
    the boot, tells processes of one number apart. Major faults waited for a disk.
    """

    pid: int
    name: str
    command: str
    started: int
    areas: tuple[Area, ...]
    minor_faults: int
    major_faults: int
    n_threads: int

    @property
    def rss_bytes(self) -> int:
        """The bytes of its areas in RAM, hugetlb pages included."""
        return sum(area.resident_bytes for area in self.areas)

    @property
    def pss_bytes(self) -> int:
        """The same by share: a page that n processes map counts 1/n; hugetlb pages count whole.

        The kernel rounds down to KiB for each area, so this may be slightly less than
        ``smaps_rollup``.
        """
        return sum(area.pss_bytes + area.hugetlb_bytes for area in self.areas)

    @property
    def swapped_bytes(self) -> int:
        """The bytes of its areas that are swapped out."""
        return sum(area.swapped_bytes for area in self.areas)

    def in_ram(self, start: int, end: int) -> int:
        """Count the bytes of a range of addresses that are in RAM and in the process's page tables.

        Unmapped parts are not in RAM. Of pages that are partly in the range, that part counts.

        Raises
        ------
        ProcessLookupError
            The process has ended.
        PermissionError
            This process may not read ``/proc/PID/pagemap``.
        ValueError
            The range ends before it begins, or begins below 0.
        """
        pages = self.pages_in_ram(start, end)
        total = int(np.count_nonzero(pages)) * _PAGE
        if total and pages[0]:
            total -= start % _PAGE
        if total and pages[-1]:
            total -= -end % _PAGE
        return total

    def pages_in_ram(self, start: int, end: int) -> NDArray[np.bool_]:
        """Return for each base page of a range whether it is in RAM; raise as `in_ram`."""
        return self._pagemap(start, end) >> _PRESENT > 0

    def pages_written(self, start: int, end: int) -> NDArray[np.bool_]:
        """Return for each base page of a private mapping of a file whether it is a copy.

        A page becomes a copy when it is written to, and may be swapped out. Raises as `in_ram`.
        """
        entries = self._pagemap(start, end)
        is_own: NDArray[np.bool_] = (entries >> _PRESENT > 0) & (entries >> _OF_FILE & _ONE == 0)
        is_swapped: NDArray[np.bool_] = entries >> _SWAPPED & _ONE > 0
        return is_own | is_swapped

    def _pagemap(self, start: int, end: int) -> NDArray[np.uint64]:
        if not 0 <= start <= end:
            raise ValueError(f"expected a range of addresses, got {start:#x} to {end:#x}")
        first, last = start // _PAGE, -(-end // _PAGE) if end > start else start // _PAGE
        found = np.zeros(last - first, np.uint64)
        with _opened(self.pid) as folder:
            if _stat(folder).started != self.started:
                raise _ended(self.pid)
            with _file(folder, "pagemap") as fd:
                at = first
                while at < last:
                    raw = os.pread(fd, 8 * min(last - at, _PAGEMAP_ENTRIES), 8 * at)
                    if not raw:  # addresses that no process has, or this one has no memory now
                        break
                    n = len(raw) // 8
                    found[at - first : at - first + n] = np.frombuffer(raw, np.uint64)
                    at += n
            if _has_ended(folder):
                raise _ended(self.pid)
        return found


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts of a process so far. The difference of two shows the time between them.

    `read_bytes` are from disks; None if the kernel does not count or show them. `cpu_seconds`
    include the kernel's for it.
    """

    pid: int
    started: int
    minor_faults: int
    major_faults: int
    read_bytes: int | None
    cpu_seconds: float
    n_threads: int


def read_process(pid: int | None = None, *, usage: bool = True) -> Process:
    """Read the memory of a process.

    Areas that change during the reading have the state of the moment when the kernel wrote them.

    Parameters
    ----------
    pid : int, optional
        Its number; by default this process.
    usage : bool, default True
        False reads only the areas, without a walk through page tables; usage is 0 then.

    Raises
    ------
    ProcessLookupError
        The process does not exist, or has ended or become another program meanwhile.
    PermissionError
        This process may not read it; the message names the user that may.
    ValueError, TypeError
        The number is impossible, or the process has no memory of its own: it is a thread of the
        kernel, or has ended and waits for its parent.
    OSError
        The kernel lacks ``CONFIG_PROC_PAGE_MONITOR``, or ``/proc`` is not mounted.

    Examples
    --------
    >>> from unimem.system.process import read_process
    >>> process = read_process()
    >>> process.rss_bytes == sum(area.resident_bytes for area in process.areas)
    True
    """
    pid = _number(pid)
    with _opened(pid) as folder:
        before = _stat(folder)
        if before.is_kernels or before.state in "ZX":
            ended = "has ended and waits for its parent"
            why = "is a thread of the kernel" if before.is_kernels else ended
            raise ValueError(f"process {pid} ({before.name}) {why}: it has no memory of its own")
        # An open smaps belongs to this program: if that ends, or executes another one, the file is
        # empty, so that no other process of the same number is read.
        with _file(folder, "smaps" if usage else "maps") as fd:
            command = kernel_files.read_bytes("cmdline", folder).replace(b"\0", b" ").strip()
            node = _only_node() if usage else None
            areas = _areas(_read_smaps(fd), node)
            if usage and node is None:
                areas = _with_nodes(areas, folder)
            after = _stat(folder)
            if not areas or not os.pread(fd, 1, 0):
                raise _ended(pid)
    return Process(
        pid=pid,
        name=after.name,
        command=os.fsdecode(command),
        started=after.started,
        areas=tuple(areas),
        minor_faults=after.minor_faults,
        major_faults=after.major_faults,
        n_threads=after.n_threads,
    )


def counters(pid: int | None = None) -> Counters:
    """Read the counts of a process, without its memory.

    Parameters
    ----------
    pid : int, optional
        Its number; by default this process. `read_bytes` is None for another user's.

    Raises
    ------
    ProcessLookupError
        The process does not exist, or has ended.
    ValueError, TypeError
        The number is impossible.

    Examples
    --------
    >>> import mmap
    >>> from unimem.system.process import counters
    >>> before = counters()
    >>> touched = mmap.mmap(-1, 1 << 20)[:]  # read, page by page
    >>> counters().minor_faults > before.minor_faults
    True
    """
    pid = _number(pid)
    with _opened(pid) as folder:
        stat = _stat(folder)
        if stat.state in "ZX":
            raise _ended(pid)
        read_bytes = None
        with suppress(PermissionError, FileNotFoundError):
            figures = parse_fields(kernel_files.read_bytes("io", folder).decode())
            read_bytes = int(figures["read_bytes"])
    return Counters(
        pid=pid,
        started=stat.started,
        minor_faults=stat.minor_faults,
        major_faults=stat.major_faults,
        read_bytes=read_bytes,
        cpu_seconds=stat.cpu_ticks / _TICKS_PER_SECOND,
        n_threads=stat.n_threads,
    )


def identity(folder: int) -> tuple[int, int]:
    """Return the number of a process within its container, and its start in ticks since the boot.

    `folder` is a descriptor of its folder in /proc. OSError is raised if it has ended.
    """
    fields = parse_fields(kernel_files.read_bytes("status", folder).decode(errors="replace"))
    number = fields.get("NSpid", fields["Pid"])  # a kernel may have no containers
    return int(number.split()[-1]), _stat(folder).started


# ---- smaps and numa_maps ------------------------------------------------------------------------


def _read_smaps(fd: int) -> bytes:
    # Into one buffer: memory taken between two reads would appear in our own areas.
    buffer = bytearray(_SMAPS_BYTES)
    nbytes = 0
    while n := os.preadv(fd, [memoryview(buffer)[nbytes:]], nbytes):
        nbytes += n
        if nbytes == len(buffer):
            buffer += bytes(len(buffer))
    return bytes(memoryview(buffer)[:nbytes])


def _areas(smaps: bytes, node: int | None = None) -> list[Area]:
    """Parse smaps or maps; `node` holds all pages, or is None if nodes are unknown."""
    areas: list[Area] = []
    for fields in _ENTRY.findall(smaps):
        begin, end, access, offset, major, minor, inode, path, *sizes, words = fields
        start, flags = int(begin, 16), _words(words)
        # Areas may be joined between two reads: the kernel then writes the whole after its part.
        while areas and areas[-1].end > start:
            areas.pop()
        rss, pss, shared, private, thp, shmem, file, swapped, page, anonymous = sizes
        hugetlb = int(shared or 0) + int(private or 0) << 10
        rss_bytes = int(rss or 0) << 10
        resident = rss_bytes + hugetlb
        areas.append(
            Area(
                start=start,
                end=int(end, 16),
                access=access.decode(),
                offset=int(offset, 16),
                device=(int(major, 16), int(minor, 16)),
                inode=int(inode),
                path=os.fsdecode(path),
                rss_bytes=rss_bytes,
                pss_bytes=int(pss or 0) << 10,
                hugetlb_bytes=hugetlb,
                huge_bytes=int(thp or 0) + int(shmem or 0) + int(file or 0) << 10,
                # Not the line "Locked", which counts a page that n processes map as 1/n.
                locked_bytes=resident if "lo" in flags else hugetlb,
                swapped_bytes=int(swapped or 0) << 10,
                page_bytes=int(page or 0) << 10 or _PAGE,
                nodes={node: resident} if resident and node is not None else {},
                flags=flags,
                anonymous_bytes=int(anonymous or 0) << 10,
            )
        )
    return areas


@cache
def _words(flags: bytes) -> frozenset[str]:
    # Hundreds of areas share a few sets.
    return frozenset(flags.decode().split())


def _only_node() -> int | None:
    """Return the node that has all memory; None where several have some."""
    found = [node.id for node in limits.nodes().values() if node.total_bytes]
    return found[0] if len(found) == 1 else None


def _with_nodes(areas: list[Area], folder: int) -> list[Area]:
    """Fill in the areas' nodes."""
    with _file(folder, "numa_maps") as fd, open(fd, "rb", closefd=False) as file:
        nodes_at = dict(map(_nodes, file))
    return [area._replace(nodes=nodes_at.get(area.start, {})) for area in areas]


def _nodes(line: bytes) -> tuple[int, dict[int, int]]:
    """Parse a line such as "7f0000000000 bind:1 anon=3 N0=1 N1=2 kernelpagesize_kB=4"."""
    # Blanks in paths are escaped: a blank is always the beginning of a word.
    size = _KERNEL_PAGE.search(line)
    page_bytes = int(size[1]) << 10 if size else _PAGE
    found = {int(node): int(n) * page_bytes for node, n in _NODE.findall(line)}
    return int(line.split(maxsplit=1)[0], 16), found


# ---- /proc/PID ----------------------------------------------------------------------------------


class _Stat(NamedTuple):
    name: str
    state: str
    is_kernels: bool
    minor_faults: int
    major_faults: int
    cpu_ticks: int
    n_threads: int
    started: int


def _number(pid: int | None) -> int:
    if pid is None:
        return os.getpid()
    pid = integer(pid, "pid")
    if pid <= 0:
        raise ValueError(f"pid: expected the number of a process, from 1 on, got {pid}")
    return pid


@contextmanager
def _opened(pid: int) -> Iterator[int]:
    """Open the folder of a process, which stays that process's even if its number is reused.

    Errors inside are raised as errors of the process.
    """
    name = "self" if pid == os.getpid() else str(pid)
    try:
        folder = os.open(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        if not os.path.exists("/proc/self"):
            text = "/proc is not mounted here, the only source of processes"
            raise FileNotFoundError(errno.ENOENT, text, "/proc") from None
        raise ProcessLookupError(
            errno.ESRCH, f"There is no process {pid} here: 'ps -e' lists those that are"
        ) from None
    try:
        yield folder
    except PermissionError:
        if _has_ended(folder):  # and waits for its parent: only root may look at it
            raise _ended(pid) from None
        raise PermissionError(errno.EACCES, _who_may(pid, folder)) from None
    except ProcessLookupError:
        raise _ended(pid) from None
    except FileNotFoundError as error:
        if not os.path.exists(f"/proc/self/fd/{folder}/stat"):
            raise _ended(pid) from None
        text = f"This kernel does not tell of a process's memory: it has no {error.filename}"
        raise FileNotFoundError(errno.ENOENT, text) from None
    finally:
        os.close(folder)


def _has_ended(folder: int) -> bool:
    try:
        return _stat(folder).state in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _ended(pid: int) -> ProcessLookupError:
    text = f"Process {pid} has ended, or has become another program, since it was found"
    return ProcessLookupError(errno.ESRCH, text)


def _who_may(pid: int, folder: int) -> str:
    # psutil goes by the number, which may be another process's by now.
    status = kernel_files.read_bytes("status", folder).decode(errors="replace")
    uid = int(parse_fields(status)["Uid"].split()[0])
    try:
        user = repr(pwd.getpwuid(uid).pw_name)
    except KeyError:
        user = str(uid)
    who = f"Process {pid} ({_stat(folder).name}) is of user {user}"
    if os.geteuid() == 0:
        return f"{who}: reading it takes the capability CAP_SYS_PTRACE, which root lacks here"
    if uid != os.geteuid():
        return f"{who}: run this as that user, or as root"
    return f"{who}, as we are, but is unreadable, as after a change of users: run this as root"


@contextmanager
def _file(folder: int, name: str) -> Iterator[int]:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _stat(folder: int) -> _Stat:
    # psutil has no faults, and the start only rounded, in seconds of another clock.
    _, _, rest = kernel_files.read_bytes("stat", folder).partition(b"(")
    # The name may have blanks and parentheses.
    name, _, rest = rest.rpartition(b")")
    fields = rest.split()  # from the third one on
    return _Stat(
        name=os.fsdecode(name),
        state=fields[0].decode(),
        is_kernels=bool(int(fields[6]) & _PF_KTHREAD),
        minor_faults=int(fields[7]),
        major_faults=int(fields[9]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        n_threads=int(fields[17]),
        started=int(fields[19]),
    )
