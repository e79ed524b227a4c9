"""The limits of this process: memory, huge pages, locked memory and CPUs.

No other module reads them. Everything that takes memory asks here first, and names the limit in its
refusal. The kernel itself kills a process whose cgroup is full.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import compress

from unimem.base import kernel_files
from unimem.base.kernel_files import parse_kib, parse_list
from unimem.base.text import format_bytes
from unimem.errors import CapacityError
from unimem.system.cgroups import Cgroup, cgroups_above, sees_all_above

__all__ = [
    "CpuQuota",
    "HugePool",
    "Limit",
    "Node",
    "available_bytes",
    "core_of",
    "cpu_quota",
    "cpus",
    "huge_pools",
    "memlock",
    "memory_limits",
    "node_weights",
    "nodes",
    "note_binding",
    "overcommit",
    "parse_list",
    "require",
    "require_cached",
    "require_shm",
    "room_for_files",
    "thread_count",
    "tightest",
]

SHM = "/dev/shm"  # where shared memory has a name
_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"
_POOLS = "/sys/kernel/mm/hugepages"
_WEIGHTS = "/sys/kernel/mm/mempolicy/weighted_interleave"
_CAP_IPC_LOCK = 1 << 14
_MOST_NODES = 1024
# The part of a full cgroup that running programs and open files need while memory is filled. The
# kernel has its low watermark for this; a cgroup has none.
_FILE_RESERVE_BYTES = 8 << 20

# A ring takes several mappings at once, and parts with a policy of their own are mappings, too.
_MAPPINGS_MARGIN, _MANY_MAPPINGS = 16, 262144
_CHUNK_BYTES = 1 << 16

# The CPUs of the thread that loaded OpenMP, after and before.
_binding: tuple[set[int], set[int]] | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit on memory, in bytes, and how to raise it.

    Attributes
    ----------
    name : str
        "memory of the machine", "cgroup /a/b", "commit limit (overcommit_memory=2)", "locked memory
        (memlock)", or "hugetlb pool of 2m pages".
    limit_bytes, used_bytes : int
        The limit, and its use. Droppable file pages do not count as used.
    remedy : str
        A command or a setting that raises or removes it.
    file_bytes : int
        For a cgroup: all file pages that are charged to it.
    busy_file_bytes : int
        For a cgroup: file pages in `used_bytes`, which are not on the disk yet, or a small reserve,
        and make room for files only.
    path : str
        For a cgroup: the file that sets it; else empty.
    """

    name: str
    limit_bytes: int
    used_bytes: int
    remedy: str
    file_bytes: int = 0
    busy_file_bytes: int = 0
    path: str = ""

    @property
    def room_bytes(self) -> int:
        """Bytes that can still be taken; never negative."""
        return max(0, self.limit_bytes - self.used_bytes)

    def remedy_for(self, nbytes: int) -> str:
        """Return the remedy for `nbytes` bytes: if possible, a command with the figure.

        Examples
        --------
        >>> limit = Limit("cgroup /a", 8192, 4096, "echo max > memory.max", path="memory.max")
        >>> limit.remedy_for(8192)
        'echo 12288 > memory.max'
        """
        missing = nbytes - self.room_bytes
        if missing <= 0 or not self.path:
            return self.remedy
        # The kernel rounds down to whole pages.
        page = mmap.PAGESIZE
        return f"echo {-(-(self.limit_bytes + missing) // page) * page} > {self.path}"


@dataclass(frozen=True, slots=True)
class HugePool:
    """The pool of one size of hugetlb pages.

    Attributes
    ----------
    page_bytes : int
        Size of a page.
    total, free, reserved : int
        Pages in the pool, unused pages, and free pages that are promised to a mapping.
    surplus_most : int
        Pages that the kernel may add on demand (`nr_overcommit_hugepages`).
    nodes : mapping of int to (int, int)
        Total and free pages of each node.
    cgroups : tuple of Limit
        Limits of hugetlb cgroups above the process.
    may_break_promises : bool
        Whether the first touch of a promised page may fail: cgroups count pages in use only then,
        and the promise may be a page of a node that a cpuset leaves out.
    """

    page_bytes: int
    total: int
    free: int
    reserved: int
    surplus_most: int
    nodes: Mapping[int, tuple[int, int]]
    cgroups: tuple[Limit, ...] = field(default=())
    may_break_promises: bool = False

    @property
    def available_bytes(self) -> int:
        """Bytes of a new mapping: whole, unpromised pages within every cgroup."""
        room = max(0, self.free - self.reserved) * self.page_bytes
        room = min([room, *(limit.room_bytes for limit in self.cgroups)])
        return room // self.page_bytes * self.page_bytes

    def limit(self, nbytes: int = 0) -> Limit:
        """Return the limit that a mapping of `nbytes` bytes reaches first: the pool or a cgroup."""
        page = self.page_bytes
        unpromised = max(0, self.free - self.reserved)
        wanted = self.total + max(0, -(-nbytes // page) - unpromised)
        where = f"{_POOLS}/hugepages-{page >> 10}kB/nr_hugepages"
        # The short path is of the default size, which an option of the kernel chooses.
        if parse_kib(kernel_files.read_fields("/proc/meminfo").get("Hugepagesize")) == page:
            where = "/proc/sys/vm/nr_hugepages"
        pool = Limit(
            f"hugetlb pool of {_size_name(page)} pages",
            self.total * page,
            (self.total - unpromised) * page,
            f"echo {wanted} > {where}",
        )
        least = min((pool, *self.cgroups), key=lambda limit: limit.room_bytes)
        return replace(least, remedy=least.remedy_for(-(-nbytes // page) * page))


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node.

    Attributes
    ----------
    id : int
        Its number.
    total_bytes, free_bytes, available_bytes : int
        Its memory, unused memory, and that with droppable file pages; 0 for a node without memory.
    cpus : tuple of int
        All of its CPUs; empty for a node of memory alone.
    distances : tuple of int
        To the nodes of `nodes()`, in their order; 10 is the node itself.
    allowed : bool
        Whether this process may have memory there.
    read_mb_per_second : int
        The bandwidth from the nearest CPU, as its firmware has it (HMAT); 0 if it has none.
    """

    id: int
    total_bytes: int
    free_bytes: int
    available_bytes: int
    cpus: tuple[int, ...]
    distances: tuple[int, ...]
    allowed: bool
    read_mb_per_second: int = 0


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """The tightest CPU quota of the cgroups above: the CPUs that it leaves, and its file."""

    cpus: float
    path: str


def memory_limits(pid: int | None = None, cgroup: str | None = None) -> tuple[Limit, ...]:
    """Return every limit on the memory of a process.

    Parameters
    ----------
    pid : int, optional
        Its number; by default this process.
    cgroup : str, optional
        The folder of a cgroup, for a process in it.

    Returns
    -------
    tuple of Limit
        The machine, then each memory cgroup from the process's own up (version 1 and 2), then the
        commit limit if the kernel keeps one (`overcommit_memory=2`).

    Notes
    -----
    `memory.high` counts like `memory.max`: exceeding it does not kill, but the kernel then delays
    the process at each new page, and memory of a block cannot be reclaimed.
    """
    return tuple(limit() for _, limit in _memory(pid, cgroup))


def tightest() -> Limit:
    """Return the limit of `memory_limits()` with the least room."""
    return min(memory_limits(), key=lambda limit: limit.room_bytes)


def available_bytes() -> int:
    """Return the bytes that this process can take without swapping or being killed.

    It is the least room in `memory_limits()`; droppable file pages count as room.
    """
    return tightest().room_bytes


def require(nbytes: int, what: str) -> None:
    """Refuse memory that does not fit, before it is taken.

    Parameters
    ----------
    nbytes : int
        Bytes to take.
    what : str
        Their purpose, for the message, as in "block 'kv'".

    Raises
    ------
    CapacityError
        It names the limit with the least room, its figures, and how to raise it.
    """
    # Counting droppable file pages costs more than all the rest, and is needed only if the room
    # without them is too small.
    if all(room >= nbytes for room, _ in _memory()):
        return
    least = tightest()
    if least.room_bytes < nbytes:
        raise _refusal(nbytes, what, least)


def require_cached(nbytes: int, cached_bytes: int, what: str) -> None:
    """Refuse to read more of a file into the page cache than can stay there.

    Parameters
    ----------
    nbytes, cached_bytes : int
        Bytes to have there, and those that are there already.
    what : str
        As for `require`.

    Raises
    ------
    CapacityError
        As for `require`.
    """
    for limit, needed, room in room_for_files(memory_limits(), nbytes, lambda: cached_bytes):
        if room < needed:
            raise _refusal(needed, what, limit)


def room_for_files(
    found: Iterable[Limit], nbytes: int, cached_bytes: Callable[[], int]
) -> Iterator[tuple[Limit, int, int]]:
    """Compare each limit's room with the files that have to stay in RAM.

    Parameters
    ----------
    found : iterable of Limit
        `memory_limits()`.
    nbytes : int
        Bytes of the files.
    cached_bytes : callable
        Returns how much of them is in the page cache; called only if it matters.

    Yields
    ------
    limit : Limit
        The machine, or a cgroup. The commit limit does not count file pages.
    needed_bytes, room_bytes : int
        Bytes to hold, and the room for them.
    """
    for limit in found:
        room = limit.room_bytes
        if not limit.name.startswith("cgroup "):
            if not limit.name.startswith("commit "):
                # Its room includes droppable pages of these files.
                yield limit, nbytes, room
            continue
        room += limit.busy_file_bytes
        # Cached bytes beyond the cgroup's file pages are charged to another cgroup.
        elsewhere = max(0, cached_bytes() - limit.file_bytes) if room < nbytes else 0
        yield limit, nbytes - elsewhere, room


def require_shm(nbytes: int, what: str) -> None:
    """Refuse what the file system of named shared memory has no room for.

    Raises
    ------
    CapacityError
        Touching a page without room would kill the process (SIGBUS).
    """
    fs = os.statvfs(SHM)
    most, room = fs.f_blocks * fs.f_frsize, fs.f_bavail * fs.f_frsize
    if most and room < nbytes:  # a size of 0 is no limit
        remedy = f"mount -o remount,size={most - room + nbytes} {SHM}, or docker --shm-size"
        raise _refusal(nbytes, what, Limit(SHM, most, most - room, remedy))


def _refusal(nbytes: int, what: str, limit: Limit) -> CapacityError:
    return CapacityError(
        f"{what} of {format_bytes(nbytes)} does not fit: {limit.name} has room for "
        f"{format_bytes(limit.room_bytes)} (limit {format_bytes(limit.limit_bytes)}, "
        f"{format_bytes(limit.used_bytes)} used); raise it with: {limit.remedy_for(nbytes)}",
        limit.limit_bytes,
        limit.used_bytes,
        nbytes,
    )


def memlock() -> Limit | None:
    """Return the limit on locked memory.

    None if nothing limits it: RLIMIT_MEMLOCK is unlimited, or the process has CAP_IPC_LOCK.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    status = kernel_files.read_fields("/proc/self/status")
    # The capability counts only in the first user namespace, where all ids are mapped.
    ids = (kernel_files.read_text("/proc/self/uid_map") or "0 0 4294967295").split()
    if ids == ["0", "0", "4294967295"] and int(status.get("CapEff", "0"), 16) & _CAP_IPC_LOCK:
        return None
    return Limit(
        "locked memory (memlock)",
        soft,
        parse_kib(status.get("VmLck")),
        "ulimit -l unlimited, systemd LimitMEMLOCK=infinity, or docker --ulimit memlock=-1",
    )


def huge_pools(cgroup: str | None = None) -> dict[str, HugePool]:
    """Return the pools of hugetlb pages, from the smallest page up.

    Parameters
    ----------
    cgroup : str, optional
        The folder of a cgroup, for a process in it.

    Returns
    -------
    dict
        "2m", "1g" and the kernel's other sizes ("64k", "32m", ...) to `HugePool`.
    """
    sizes = sorted(
        int(match[1])
        for name in kernel_files.list_names(_POOLS)
        if (match := re.fullmatch(r"hugepages-(\d+)kB", name))
    )
    online = _online() if sizes else ()
    pools = {}
    for kib in sizes:
        folder = f"{_POOLS}/hugepages-{kib}kB"
        pages = kernel_files.read_number(f"{folder}/nr_hugepages") or 0
        # Most pools are empty: then nodes and limits need not be read.
        per_node = dict.fromkeys(() if pages else online, (0, 0))
        for node in online if pages else ():
            own = f"{_NODES}/node{node}/hugepages/hugepages-{kib}kB"
            total = kernel_files.read_number(f"{own}/nr_hugepages")
            if total is not None:
                per_node[node] = (total, kernel_files.read_number(f"{own}/free_hugepages") or 0)
        above = tuple(_hugetlb(kib << 10, cgroup)) if pages else ()
        pools[_size_name(kib << 10)] = HugePool(
            page_bytes=kib << 10,
            total=pages,
            free=(kernel_files.read_number(f"{folder}/free_hugepages") or 0) if pages else 0,
            reserved=(kernel_files.read_number(f"{folder}/resv_hugepages") or 0) if pages else 0,
            surplus_most=kernel_files.read_number(f"{folder}/nr_overcommit_hugepages") or 0,
            nodes=per_node,
            cgroups=above,
            may_break_promises=pages > 0
            and not (
                sees_all_above("hugetlb")
                and all(".rsvd." in limit.path for limit in above)
                and _allowed_nodes().issuperset(node for node, (n, _) in per_node.items() if n)
            ),
        )
    return pools


def _allowed_nodes() -> set[int]:
    """Return the nodes whose memory this process may use; all, if the kernel has no NUMA."""
    allowed = kernel_files.read_fields("/proc/self/status").get("Mems_allowed_list")
    return set(range(_MOST_NODES) if allowed is None else parse_list(allowed))


def nodes() -> dict[int, Node]:
    """Return the online NUMA nodes that have memory or CPUs, by id.

    A kernel without NUMA has one node 0, with all memory and CPUs.
    """
    permitted, online = _allowed_nodes(), _online()
    if not online:
        online_cpus = parse_list(kernel_files.read_text(f"{_CPUS}/online") or "")
        of_node = online_cpus or tuple(sorted(cpus()))
        return {0: _with_all_memory(Node(0, 0, 0, 0, of_node, (10,), True))}
    found = {}
    for node in online:
        folder = f"{_NODES}/node{node}"
        memory = kernel_files.read_fields(f"{folder}/meminfo", prefix=f"Node {node} ")
        free = parse_kib(memory.get("MemFree"))
        distances = (kernel_files.read_text(f"{folder}/distance") or "").split()
        found[node] = Node(
            id=node,
            total_bytes=parse_kib(memory.get("MemTotal")),
            free_bytes=free,
            available_bytes=free + parse_kib(memory.get("Inactive(file)", "0")),
            cpus=parse_list(kernel_files.read_text(f"{folder}/cpulist") or ""),
            distances=tuple(map(int, distances)),
            allowed=node in permitted,
            read_mb_per_second=_bandwidth(folder),
        )
    with_memory = [node for node in found.values() if node.total_bytes]
    if len(with_memory) == 1:
        found[with_memory[0].id] = _with_all_memory(with_memory[0])
    used = [bool(node.total_bytes or node.cpus) for node in found.values()]
    return {
        node.id: replace(node, distances=tuple(compress(node.distances, used)))
        for node in compress(found.values(), used)
    }


def _bandwidth(folder: str) -> int:
    """Return the bandwidth in MB/s that the firmware has for a node's memory; 0 without it."""
    text = kernel_files.read_text(f"{folder}/access1/initiators/read_bandwidth") or ""
    return int(text) if text.strip().isdigit() else 0


def _with_all_memory(node: Node) -> Node:
    """Give the only node with memory the machine's figures, which are more exact.

    They count all reclaimable memory, and memory that a host would still add to a virtual machine.
    """
    memory = kernel_files.read_fields("/proc/meminfo")
    total, free, available = (
        parse_kib(memory.get(name)) for name in ("MemTotal", "MemFree", "MemAvailable")
    )
    return replace(node, total_bytes=total, free_bytes=free, available_bytes=available)


def node_weights(nodes: Iterable[int]) -> dict[int, int]:
    """Return the weights of nodes for weighted interleaving; 1 if the kernel has no weight."""
    return {node: kernel_files.read_number(f"{_WEIGHTS}/node{node}") or 1 for node in nodes}


def overcommit() -> int:
    """Return `vm.overcommit_memory`: 0 (refuse the absurd), 1 (promise all), 2 (a commit limit)."""
    return kernel_files.read_number("/proc/sys/vm/overcommit_memory") or 0


def cpus() -> set[int]:
    """Return the CPUs that the process may use.

    With OMP_PROC_BIND, OpenMP binds the thread that loads it to one CPU. The others remain for the
    threads beside it, so they count.
    """
    now = os.sched_getaffinity(0)
    return _binding[1] if _binding is not None and now == _binding[0] else now


def current_cpu() -> int | None:
    """Return the CPU that the calling thread runs on; None if unknown."""
    text = kernel_files.read_text("/proc/thread-self/stat") or ""
    fields = text.rpartition(")")[2].split()  # from the third on: a name may have spaces
    return int(fields[36]) if len(fields) > 36 else None


def note_binding(before: set[int]) -> None:
    """Note the loading of a library; `before` are the CPUs that this thread had before."""
    global _binding  # noqa: PLW0603 - the thread is bound once in a process
    now = os.sched_getaffinity(0)
    if now != before:
        _binding = now, before


def thread_count(usable: Iterable[int] | None = None, cgroup: str | None = None) -> int:
    """Return how many threads can compute at once: physical cores within the quota, at least 1.

    Parameters
    ----------
    usable : iterable of int, optional
        CPUs to count; by default those of the process.
    cgroup : str, optional
        The folder of a cgroup, whose quota counts instead of this process's.
    """
    count = float(len({core_of(cpu) for cpu in (cpus() if usable is None else usable)}))
    quota = cpu_quota(cgroup)
    return max(1, int(count if quota is None else min(count, quota.cpus)))


def cpu_quota(cgroup: str | None = None) -> CpuQuota | None:
    """Return the tightest CPU quota above this process, or above the folder `cgroup`, or None."""
    quotas = []
    for each in cgroups_above("cpu", folder=cgroup):
        path = each.path("cpu.cfs_quota_us", "cpu.max")
        quota, _, period = (kernel_files.read_text(path) or "").partition(" ")
        if each.version == 1:
            period = kernel_files.read_text(f"{each.folder}/cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(CpuQuota(int(quota) / int(period), path))
    return min(quotas, key=lambda quota: quota.cpus, default=None)


@cache
def core_of(cpu: int) -> tuple[str, str]:
    """Return the physical core of a CPU: its socket, and its number there.

    Without a known topology each CPU counts as a core. Read once: hundreds of CPUs take
    milliseconds.
    """
    topology = f"{_CPUS}/cpu{cpu}/topology"
    package, core = (
        kernel_files.read_text(f"{topology}/physical_package_id"),
        kernel_files.read_text(f"{topology}/core_id"),
    )
    return (package or "", core) if core else ("cpu", str(cpu))


def _memory(
    pid: int | None = None, folder: str | None = None
) -> Iterator[tuple[int, Callable[[], Limit]]]:
    """Yield each limit's room without droppable file pages, and a function for the limit."""
    # Not by psutil, which has no commit limit, and is slower: this runs before each block is made.
    memory = kernel_files.read_fields("/proc/meminfo")
    total = parse_kib(memory.get("MemTotal"))
    available = parse_kib(memory.get("MemAvailable", memory.get("MemFree", "0")))
    if not memory:  # /proc is hidden from this process, the system call is not
        page = os.sysconf("SC_PAGE_SIZE")
        total, available = (os.sysconf(n) * page for n in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    remedy = "end other processes, or take less"
    machine = Limit("memory of the machine", total, total - available, remedy)
    yield machine.room_bytes, lambda: machine
    for cgroup in cgroups_above("memory", pid, folder):
        yield from _memory_cgroup(cgroup)
    if overcommit() == 2:
        commit = Limit(
            "commit limit (overcommit_memory=2)",
            parse_kib(memory.get("CommitLimit")),
            parse_kib(memory.get("Committed_AS")),
            "echo 0 > /proc/sys/vm/overcommit_memory",
        )
        yield commit.room_bytes, lambda: commit


def _memory_cgroup(cgroup: Cgroup) -> Iterator[tuple[int, Callable[[], Limit]]]:
    found = cgroup.read_limit("memory.limit_in_bytes", "memory.max", "memory.high")
    if found is None:
        return
    limit, path = found
    used = kernel_files.read_number(cgroup.path("memory.usage_in_bytes", "memory.current"))
    if used is None:
        return

    def whole() -> Limit:
        files, clean = _file_pages(cgroup)
        taken = max(0, used - clean)
        busy = min(files - clean, taken)
        return Limit(f"cgroup {cgroup.name}", limit, taken, cgroup.unlimit(path), files, busy, path)

    yield limit - used, whole


def _file_pages(cgroup: Cgroup) -> tuple[int, int]:
    """Return the bytes of a cgroup's file pages, and of those that are dropped before it kills.

    Active pages are dropped like inactive ones. Dirty pages are not: a disk has to take them first.
    Shared memory and locked pages are in neither sum, since the kernel lists them elsewhere.
    """
    stat = kernel_files.read_fields(f"{cgroup.folder}/memory.stat", " ")
    before, unwritten = ("total_", "total_") if cgroup.version == 1 else ("", "file_")
    files = sum(int(stat.get(f"{before}{kind}_file", 0)) for kind in ("active", "inactive"))
    kept = sum(int(stat.get(f"{unwritten}{kind}", 0)) for kind in ("dirty", "writeback"))
    clean = max(0, files - kept)
    # As MemAvailable omits the low watermark, or half of the file pages if that is less.
    return files, clean - min(clean // 2, _FILE_RESERVE_BYTES)


def _hugetlb(page_bytes: int, folder: str | None = None) -> Iterator[Limit]:
    """Yield the limits of hugetlb cgroups on one size of page, on used and on promised pages."""
    size = _size_name(page_bytes).upper() + "B"
    for cgroup in cgroups_above("hugetlb", folder=folder):
        for kind in ("", "rsvd."):
            start = f"hugetlb.{size}.{kind}"
            found = cgroup.read_limit(f"{start}limit_in_bytes", f"{start}max")
            if found is None:
                continue
            limit, path = found
            used = cgroup.path(f"{start}usage_in_bytes", f"{start}current")
            yield Limit(
                f"hugetlb cgroup {cgroup.name}",
                limit,
                kernel_files.read_number(used) or 0,
                cgroup.unlimit(path),
                path=path,
            )


def _online() -> tuple[int, ...]:
    return parse_list(kernel_files.read_text(f"{_NODES}/online") or "")


def _size_name(nbytes: int) -> str:
    for shift, unit in ((30, "g"), (20, "m")):
        if nbytes >> shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return f"{nbytes >> 10}k"


def limit_reached(nbytes: int) -> str:
    """Name the limit of its address space that kept this process from taking `nbytes` more.

    The kernel's error is ENOMEM, as without free memory. Return "" if no limit is reached or can be
    read.
    """
    with suppress(OSError, ValueError, MemoryError):
        return _mappings_reached() or _addresses_reached(nbytes)
    return ""


def _mappings_reached() -> str:
    most = kernel_files.read_number("/proc/sys/vm/max_map_count")
    if most is None:
        return ""
    n = 0
    fd = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        while chunk := os.read(fd, _CHUNK_BYTES):
            n += chunk.count(b"\n")
    finally:
        os.close(fd)
    if n + _MAPPINGS_MARGIN < most:
        return ""
    return (
        f"this process has {n} mappings and may have {most} (vm.max_map_count): "
        f"sysctl vm.max_map_count={max(_MANY_MAPPINGS, 2 * most)}"
    )


def _addresses_reached(nbytes: int) -> str:
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = int(kernel_files.read_bytes("/proc/self/statm").split()[0])
    used = pages * resource.getpagesize()
    if most == resource.RLIM_INFINITY or used + nbytes <= most:
        return ""
    return (
        f"this process has {format_bytes(used)} of addresses and may have {format_bytes(most)} "
        "(RLIMIT_AS): ulimit -v unlimited"
    )
