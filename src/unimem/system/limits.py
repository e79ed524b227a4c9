"""What this process may have: memory, huge pages, locked memory and CPUs. The only place that asks.

Everything that takes memory asks here first and refuses by name, since the kernel's own answer to
a cgroup that is full is to kill the process.
"""

from __future__ import annotations

import io
import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import compress

from unimem.errors import CapacityError
from unimem.system.text import format_bytes

__all__ = [
    "CpuQuota",
    "HugePool",
    "Limit",
    "Node",
    "available_bytes",
    "core_of",
    "cpu_quota",
    "huge_pools",
    "memlock",
    "memory_limits",
    "node_weights",
    "nodes",
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
_NO_LIMIT = 1 << 60  # version 1 writes "none" as a number near 2**63
_CAP_IPC_LOCK = 1 << 14
_MOST_LISTED = 1 << 16  # more than any kernel has of nodes or CPUs


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit on memory, in bytes, and how to raise it.

    Attributes
    ----------
    name : str
        What limits: "memory of the machine", "cgroup /a/b", "commit limit (overcommit_memory=2)",
        "locked memory (memlock)", "hugetlb pool of 2m pages".
    limit_bytes, used_bytes : int
        What there is, and what is taken of it. File pages that can be dropped are not taken.
    remedy : str
        A command or a setting that raises it.
    file_bytes : int
        Of a cgroup, file pages that are charged to it, whether they can be dropped at once or not.
    busy_file_bytes : int
        Of a cgroup, those among `used_bytes`: they were used lately, and make room for files only.
    """

    name: str
    limit_bytes: int
    used_bytes: int
    remedy: str
    file_bytes: int = 0
    busy_file_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        """Bytes that can still be taken; never negative."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class HugePool:
    """The pool of one size of hugetlb pages.

    Attributes
    ----------
    page_bytes : int
        Size of a page.
    total, free, reserved : int
        Pages in the pool, pages that nothing uses, and free pages promised to a mapping.
    surplus_most : int
        Pages that the kernel may add on demand (`nr_overcommit_hugepages`).
    nodes : mapping of int to (int, int)
        Total and free pages of each node.
    cgroups : tuple of Limit
        Limits of hugetlb cgroups above the process.
    """

    page_bytes: int
    total: int
    free: int
    reserved: int
    surplus_most: int
    nodes: Mapping[int, tuple[int, int]]
    cgroups: tuple[Limit, ...] = field(default=())

    @property
    def available_bytes(self) -> int:
        """Bytes that a new mapping can have: whole pages, promised to nobody, in every cgroup."""
        room = max(0, self.free - self.reserved) * self.page_bytes
        room = min([room, *(limit.room_bytes for limit in self.cgroups)])
        return room // self.page_bytes * self.page_bytes

    def limit(self, nbytes: int = 0) -> Limit:
        """Tell what is in the way of a mapping of `nbytes` bytes.

        Parameters
        ----------
        nbytes : int, default 0
            What is wanted; the remedy makes the pool large enough for it.

        Returns
        -------
        Limit
            The pool, or a hugetlb cgroup where that has less room.
        """
        page = self.page_bytes
        unpromised = max(0, self.free - self.reserved)
        wanted = self.total + max(0, -(-nbytes // page) - unpromised)
        where = f"{_POOLS}/hugepages-{page >> 10}kB/nr_hugepages"
        # The short path is of the default size, which an option of the kernel chooses.
        if _kib(_fields("/proc/meminfo").get("Hugepagesize", "0")) == page:
            where = "/proc/sys/vm/nr_hugepages"
        pool = Limit(
            f"hugetlb pool of {_size_name(page)} pages",
            self.total * page,
            (self.total - unpromised) * page,
            f"echo {wanted} > {where}",
        )
        return min((pool, *self.cgroups), key=lambda limit: limit.room_bytes)


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node.

    Attributes
    ----------
    id : int
        Its number.
    total_bytes, free_bytes : int
        Its memory, and what nothing uses; 0 where the node has no memory.
    available_bytes : int
        Free memory and file pages that can be dropped.
    cpus : tuple of int
        All of its CPUs; empty for a node that is memory alone.
    distances : tuple of int
        To the nodes of `nodes()`, in their order; 10 is the node itself.
    allowed : bool
        Whether this process may have memory there.
    """

    id: int
    total_bytes: int
    free_bytes: int
    available_bytes: int
    cpus: tuple[int, ...]
    distances: tuple[int, ...]
    allowed: bool


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """The tightest CPU quota of the cgroups above the process.

    Attributes
    ----------
    cpus : float
        CPUs' worth of time that it leaves.
    path : str
        The file that sets it.
    """

    cpus: float
    path: str


def memory_limits(pid: int | None = None) -> tuple[Limit, ...]:
    """Tell every limit on the memory of a process.

    Parameters
    ----------
    pid : int, optional
        Its number; by default this process.

    Returns
    -------
    tuple of Limit
        The machine, then each memory cgroup from the process's own up (version 1 and 2), then the
        commit limit where the kernel keeps one (`overcommit_memory=2`).

    Notes
    -----
    `memory.high` counts as a limit like `memory.max`: passing it does not kill, but the kernel
    then puts the process to sleep at each new page, and memory of a block cannot be reclaimed.
    """
    return tuple(limit() for _, limit in _memory(pid))


def tightest() -> Limit:
    """Tell the limit with the least room.

    Returns
    -------
    Limit
        Of `memory_limits()`.
    """
    return min(memory_limits(), key=lambda limit: limit.room_bytes)


def available_bytes() -> int:
    """Bytes that this process can take without anything being swapped out or killed.

    Returns
    -------
    int
        The least room in any of `memory_limits()`. File pages that can be dropped count as room.
    """
    return tightest().room_bytes


def require(nbytes: int, what: str) -> None:
    """Refuse what does not fit, before anything is taken.

    Parameters
    ----------
    nbytes : int
        Bytes that will be taken.
    what : str
        What wants them, for the message, as in "block 'kv'".

    Raises
    ------
    CapacityError
        Names the limit with the least room, its figures, and how to raise it.
    """
    # Counting the file pages that can be dropped costs more than all else here, and is needed only
    # where the room without them is too small.
    if all(room >= nbytes for room, _ in _memory()):
        return
    least = tightest()
    if least.room_bytes < nbytes:
        raise _refusal(nbytes, what, least)


def require_cached(nbytes: int, cached_bytes: int, what: str) -> None:
    """Refuse to bring more of a file into the page cache than can stay there.

    Parameters
    ----------
    nbytes : int
        Bytes that shall be there.
    cached_bytes : int
        What of it is there already.
    what : str
        As for `require`.

    Raises
    ------
    CapacityError
        As for `require`. What the page cache lacks room for would push out what was read before.
    """
    for limit, needed, room in room_for_files(memory_limits(), nbytes, lambda: cached_bytes):
        if room < needed:
            raise _refusal(needed, what, limit)


def room_for_files(
    found: Iterable[Limit], nbytes: int, cached_bytes: Callable[[], int]
) -> Iterator[tuple[Limit, int, int]]:
    """Tell what each limit has to hold of files whose pages shall stay in RAM, and its room.

    Parameters
    ----------
    found : iterable of Limit
        `memory_limits()`.
    nbytes : int
        Bytes of the files.
    cached_bytes : callable
        Tells what of them is in the page cache; called only where it decides.

    Yields
    ------
    limit : Limit
        The machine, or a cgroup: file pages are not promised, and the commit limit has no say.
    needed_bytes, room_bytes : int
        What it has to hold, and what it has for that.
    """
    for limit in found:
        room = limit.room_bytes
        if not limit.name.startswith("cgroup "):
            if not limit.name.startswith("commit "):
                # Its room counts what is cached and could be dropped, of these files as well.
                yield limit, nbytes, room
            continue
        room += limit.busy_file_bytes
        # What is cached beyond what the cgroup has of files is charged to another one.
        elsewhere = max(0, cached_bytes() - limit.file_bytes) if room < nbytes else 0
        yield limit, nbytes - elsewhere, room


def require_shm(nbytes: int, what: str) -> None:
    """Refuse what the file system of named shared memory has no room for.

    Parameters
    ----------
    nbytes, what
        As for `require`.

    Raises
    ------
    CapacityError
        Touching a page that it has no room for would kill the process (SIGBUS).
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
        f"{format_bytes(limit.used_bytes)} used); raise it with: {limit.remedy}",
        limit.limit_bytes,
        limit.used_bytes,
        nbytes,
    )


def memlock() -> Limit | None:
    """Tell the limit on locked memory.

    Returns
    -------
    Limit or None
        None where nothing limits it: RLIMIT_MEMLOCK is unlimited, or the process has CAP_IPC_LOCK.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    status = _fields("/proc/self/status")
    # The kernel honours the capability only in the first user namespace, where all ids are mapped.
    ids = (_read("/proc/self/uid_map") or "0 0 4294967295").split()
    if ids == ["0", "0", "4294967295"] and int(status.get("CapEff", "0"), 16) & _CAP_IPC_LOCK:
        return None
    return Limit(
        "locked memory (memlock)",
        soft,
        _kib(status.get("VmLck", "0")),
        "ulimit -l unlimited, systemd LimitMEMLOCK=infinity, or docker --ulimit memlock=-1",
    )


def huge_pools() -> dict[str, HugePool]:
    """Tell the pools of hugetlb pages.

    Returns
    -------
    dict
        "2m", "1g" and other sizes that the kernel has ("64k", "32m", ...) to `HugePool`, from the
        smallest page.
    """
    sizes = sorted(
        int(match[1])
        for name in _names(_POOLS)
        if (match := re.fullmatch(r"hugepages-(\d+)kB", name))
    )
    online = _online() if sizes else ()
    pools = {}
    for kib in sizes:
        folder = f"{_POOLS}/hugepages-{kib}kB"
        pages = _number(f"{folder}/nr_hugepages") or 0
        # Most pools are empty: then there is nothing to read of each node, and of limits on it.
        per_node = dict.fromkeys(() if pages else online, (0, 0))
        for node in online if pages else ():
            own = f"{_NODES}/node{node}/hugepages/hugepages-{kib}kB"
            total = _number(f"{own}/nr_hugepages")
            if total is not None:
                per_node[node] = (total, _number(f"{own}/free_hugepages") or 0)
        pools[_size_name(kib << 10)] = HugePool(
            page_bytes=kib << 10,
            total=pages,
            free=(_number(f"{folder}/free_hugepages") or 0) if pages else 0,
            reserved=(_number(f"{folder}/resv_hugepages") or 0) if pages else 0,
            surplus_most=_number(f"{folder}/nr_overcommit_hugepages") or 0,
            nodes=per_node,
            cgroups=tuple(_hugetlb(kib << 10)) if pages else (),
        )
    return pools


def nodes() -> dict[int, Node]:
    """Tell the NUMA nodes.

    Returns
    -------
    dict
        Ids to `Node`, of each that is online and has memory or CPUs. A kernel without NUMA has one
        node 0, with all memory and CPUs.
    """
    allowed = _fields("/proc/self/status").get("Mems_allowed_list")
    permitted = None if allowed is None else set(parse_list(allowed))
    online = _online()
    if not online:
        cpus = parse_list(_read(f"{_CPUS}/online") or "") or tuple(sorted(os.sched_getaffinity(0)))
        return {0: _with_all_memory(Node(0, 0, 0, 0, cpus, (10,), True))}
    found = {}
    for node in online:
        folder = f"{_NODES}/node{node}"
        memory = _fields(f"{folder}/meminfo", f"Node {node} ")
        free = _kib(memory.get("MemFree", "0"))
        distances = tuple(int(d) for d in (_read(f"{folder}/distance") or "").split())
        found[node] = Node(
            id=node,
            total_bytes=_kib(memory.get("MemTotal", "0")),
            free_bytes=free,
            available_bytes=free + _kib(memory.get("Inactive(file)", "0")),
            cpus=parse_list(_read(f"{folder}/cpulist") or ""),
            distances=distances,
            allowed=permitted is None or node in permitted,
        )
    with_memory = [node for node in found.values() if node.total_bytes]
    if len(with_memory) == 1:
        found[with_memory[0].id] = _with_all_memory(with_memory[0])
    used = [bool(node.total_bytes or node.cpus) for node in found.values()]
    return {
        node.id: replace(node, distances=tuple(compress(node.distances, used)))
        for node in compress(found.values(), used)
    }


def _with_all_memory(node: Node) -> Node:
    """Give the only node with memory the machine's figures, which are nearer to what can be had.

    They count all that can be reclaimed, and what a host would still add to a virtual machine.
    """
    memory = _fields("/proc/meminfo")
    total, free, available = (
        _kib(memory.get(name, "0")) for name in ("MemTotal", "MemFree", "MemAvailable")
    )
    return replace(node, total_bytes=total, free_bytes=free, available_bytes=available)


def node_weights(nodes: Iterable[int]) -> dict[int, int]:
    """Tell the weights of nodes among which pages are interleaved by weight.

    Parameters
    ----------
    nodes : iterable of int
        Their ids.

    Returns
    -------
    dict
        Ids to weights; 1 where the kernel tells none.
    """
    return {node: _number(f"{_WEIGHTS}/node{node}") or 1 for node in nodes}


def overcommit() -> int:
    """Tell how the kernel promises memory.

    Returns
    -------
    int
        `vm.overcommit_memory`: 0 (refuse the absurd), 1 (promise all), 2 (keep a commit limit).
    """
    return _number("/proc/sys/vm/overcommit_memory") or 0


def parse_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's format of lists of nodes and CPUs.

    Parameters
    ----------
    text : str
        Numbers and ranges, as in "0,2-3"; may be empty.

    Returns
    -------
    tuple of int
        In ascending order, each once.

    Raises
    ------
    ValueError
        The text is no such list.

    Examples
    --------
    >>> parse_list("0,2-3")
    (0, 2, 3)
    """
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if not first <= last < _MOST_LISTED:
            raise ValueError(
                f"expected a list of numbers and ascending ranges below {_MOST_LISTED}, "
                f'like "0,2-3", got {text!r}'
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def thread_count() -> int:
    """Threads that can compute at the same time.

    Returns
    -------
    int
        Physical cores that the process's CPU affinity allows, and not more than the CPU quota of
        any cgroup above it; at least 1.
    """
    count = float(len({core_of(cpu) for cpu in os.sched_getaffinity(0)}))
    quota = cpu_quota()
    return max(1, int(count if quota is None else min(count, quota.cpus)))


def cpu_quota() -> CpuQuota | None:
    """Tell the tightest CPU quota of the cgroups above this process.

    Returns
    -------
    CpuQuota or None
        None where there is none.
    """
    quotas = []
    for folder, _, version in _cgroups("cpu"):
        if version == 2:
            path = f"{folder}/cpu.max"
            quota, _, period = (_read(path) or "").partition(" ")
        else:
            path = f"{folder}/cpu.cfs_quota_us"
            quota = _read(path) or ""
            period = _read(f"{folder}/cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(CpuQuota(int(quota) / int(period), path))
    return min(quotas, key=lambda quota: quota.cpus, default=None)


@cache
def core_of(cpu: int) -> tuple[str, str]:
    """Tell the physical core of a CPU. Read once: with hundreds of them it takes milliseconds.

    Returns
    -------
    tuple of str
        Its socket and its number there; without a known topology each CPU counts as a core.
    """
    topology = f"{_CPUS}/cpu{cpu}/topology"
    package, core = _read(f"{topology}/physical_package_id"), _read(f"{topology}/core_id")
    return (package or "", core) if core else ("cpu", str(cpu))


def _memory(pid: int | None = None) -> Iterator[tuple[int, Callable[[], Limit]]]:
    """Room in each limit, droppable file pages of cgroups not counted, and the whole limit."""
    memory = _fields("/proc/meminfo")
    total = _kib(memory.get("MemTotal", "0"))
    available = _kib(memory.get("MemAvailable", memory.get("MemFree", "0")))
    if not memory:  # /proc is hidden from this process, the system call is not
        page = os.sysconf("SC_PAGE_SIZE")
        total, available = (os.sysconf(n) * page for n in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    remedy = "end other processes, or take less"
    machine = Limit("memory of the machine", total, total - available, remedy)
    yield machine.room_bytes, lambda: machine
    for folder, name, version in _cgroups("memory", pid):
        yield from _memory_cgroup(folder, name, version)
    if overcommit() == 2:
        commit = Limit(
            "commit limit (overcommit_memory=2)",
            _kib(memory.get("CommitLimit", "0")),
            _kib(memory.get("Committed_AS", "0")),
            "echo 0 > /proc/sys/vm/overcommit_memory",
        )
        yield commit.room_bytes, lambda: commit


def _memory_cgroup(
    folder: str, name: str, version: int
) -> Iterator[tuple[int, Callable[[], Limit]]]:
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    known = [(n, file) for file in names if (n := _number(f"{folder}/{file}")) is not None]
    if not known or min(known)[0] >= _NO_LIMIT:
        return
    limit, file = min(known)
    used = _number(f"{folder}/memory.{'current' if version == 2 else 'usage_in_bytes'}")
    if used is None:
        return

    def whole() -> Limit:
        stat = _read(f"{folder}/memory.stat") or ""
        total = "" if version == 2 else "total_"
        pages = dict(re.findall(rf"^{total}((?:in)?active_file) (\d+)$", stat, re.MULTILINE))
        idle, busy = (int(pages.get(name, 0)) for name in ("inactive_file", "active_file"))
        # Version 1 writes "no limit" as -1.
        none = "max" if version == 2 else "-1"
        remedy = f"echo {none} > {folder}/{file}"
        taken = max(0, used - idle)
        return Limit(f"cgroup {name}", limit, taken, remedy, idle + busy, min(busy, taken))

    yield limit - used, whole


def _hugetlb(page_bytes: int) -> Iterator[Limit]:
    """Limits of hugetlb cgroups on one size of page, on pages used and on pages promised."""
    size = _size_name(page_bytes).upper() + "B"
    for folder, name, version in _cgroups("hugetlb"):
        for kind in ("", "rsvd."):
            start = f"{folder}/hugetlb.{size}.{kind}"
            file = f"{start}max" if version == 2 else f"{start}limit_in_bytes"
            limit = _number(file)
            if limit is None or limit >= _NO_LIMIT:
                continue
            used = _number(f"{start}current" if version == 2 else f"{start}usage_in_bytes") or 0
            none = "max" if version == 2 else "-1"
            yield Limit(f"hugetlb cgroup {name}", limit, used, f"echo {none} > {file}")


def _cgroups(controller: str, pid: int | None = None) -> Iterator[tuple[str, str, int]]:
    """Folder, name and version of the cgroups above a process, by default this, from its own up."""
    for line in (_read(f"/proc/{pid or 'self'}/cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mount = _mounts().get(controller if names else "")
        if mount is None:
            continue
        folder, root = mount
        # A container may see only a part of the tree: what it mounts begins at `root`. Its path
        # may also be the host's, or lead out of its namespace: what exists is ours.
        inside = root in ("/", path) or path.startswith(f"{root}/")
        above = "" if root == "/" or not inside else root
        parts = [part for part in path[len(above) :].split("/") if part]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):
            below = "".join(f"/{part}" for part in parts[:depth])
            yield folder + below, above + below or "/", 2 if not names else 1


@cache
def _mounts() -> dict[str, tuple[str, str]]:
    """Mount point of each controller's tree and what of it is mounted; "" is version 2.

    Read once: the trees are mounted when the system or the container starts.
    """
    found: dict[str, tuple[str, str]] = {}
    for line in (_read("/proc/self/mountinfo") or "").splitlines():
        mount, _, kind = line.partition(" - ")
        kinds = kind.split()
        if not kinds or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        root, folder = (
            re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), part)
            for part in mount.split()[3:5]
        )
        for controller in kinds[2].split(",") if kinds[0] == "cgroup" else ("",):
            # Where a tree is mounted more than once, the mount that shows most of it is taken.
            if controller not in found or len(root) < len(found[controller][1]):
                found[controller] = folder, root
    return found


def _online() -> tuple[int, ...]:
    return parse_list(_read(f"{_NODES}/online") or "")


def _size_name(nbytes: int) -> str:
    for shift, unit in ((30, "g"), (20, "m")):
        if nbytes >> shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return f"{nbytes >> 10}k"


def _fields(path: str, prefix: str = "") -> dict[str, str]:
    """Lines "name: value" of a file."""
    pairs = (line.partition(":") for line in (_read(path) or "").splitlines())
    return {name.removeprefix(prefix): value.strip() for name, _, value in pairs}


def _kib(value: str) -> int:
    """Bytes of a figure like "123 kB"."""
    return int(value.split(maxsplit=1)[0]) << 10


def _read(path: str) -> str | None:
    # Without buffers and decoders of open(): this runs before each block is made.
    try:
        with io.FileIO(path) as file:
            return file.readall().decode(errors="surrogateescape").strip()
    except OSError:
        return None


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _number(path: str) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None
