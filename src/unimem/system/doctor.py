"""What this machine gives to inference, and what to change so that it gives more.

Limits come from `unimem.system.limits`, which is the only place that asks for them; here is what
merely describes the machine, and the judgement of both (in `unimem.system.findings`).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from unimem.system import limits
from unimem.system.limits import CpuQuota, HugePool, Limit, Node, parse_list

__all__ = [
    "Capabilities",
    "Cpu",
    "Finding",
    "Kernel",
    "Machine",
    "Memory",
    "Numa",
    "Thp",
    "ThpSize",
    "doctor",
]

_SCHEMA = "unimem.doctor/1"

_CPUS = "/sys/devices/system/cpu"

# What kernels of matrix products and conversions use, in the kernel's own names, and 1 GiB pages.
_FEATURES = (
    *("ssse3", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl"),
    *("avx512vbmi", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "pdpe1gb"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "svei8mm", "svebf16", "sve2", "sme"),
)
_CAP_IPC_LOCK, _CAP_SYS_NICE = 14, 23  # <linux/capability.h>
_SECCOMP_FILTER = 2


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel.

    Attributes
    ----------
    release : str
        As ``uname -r`` has it.
    version : tuple of int
        Major and minor number.
    architecture : str
        As ``uname -m`` has it.
    """

    release: str
    version: tuple[int, int]
    architecture: str


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processors. Threads are what the kernel calls CPUs.

    Attributes
    ----------
    model : str
        Its name, or "unknown".
    sockets, cores, threads : int
        Those that are online.
    allowed_cores, allowed_threads : int
        Those that this process's affinity allows.
    usable_cores : int
        What `limits.thread_count` says: the allowed cores, and not more than the quota.
    quota : CpuQuota or None
        None where no cgroup sets one.
    features : tuple of str
        Features that matter for inference, by the kernel's names.
    governors : mapping
        cpufreq governors to the number of policies that they hold; empty where there is none.
    """

    model: str
    sockets: int
    cores: int
    threads: int
    allowed_cores: int
    allowed_threads: int
    usable_cores: int
    quota: CpuQuota | None
    features: tuple[str, ...]
    governors: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ThpSize:
    """One size of transparent huge pages (mTHP), and its own modes.

    Attributes
    ----------
    page_bytes : int
        The size.
    enabled, shmem_enabled : str or None
        Modes for anonymous and for shared memory; "inherit" takes the mode of all sizes. None
        where the kernel has no such mode.
    """

    page_bytes: int
    enabled: str | None
    shmem_enabled: str | None


@dataclass(frozen=True, slots=True)
class Thp:
    """Transparent huge pages. A mode is None where the kernel has none.

    Attributes
    ----------
    page_bytes : int or None
        The size that one entry of a page middle directory maps: 2 MiB on most machines.
    enabled, defrag, shmem_enabled : str or None
        The modes as set for all sizes.
    khugepaged_defrag : bool or None
        Whether khugepaged compacts memory.
    shm_mount : str or None
        The mode of the file system at /dev/shm; None where no tmpfs is mounted there.
    is_disabled_for_process : bool
        Whether ``prctl(PR_SET_THP_DISABLE)`` holds for this process.
    sizes : tuple of ThpSize
        The sizes that the kernel has, ascending; empty before Linux 6.8.
    """

    page_bytes: int | None
    enabled: str | None
    defrag: str | None
    shmem_enabled: str | None
    khugepaged_defrag: bool | None
    shm_mount: str | None
    is_disabled_for_process: bool
    sizes: tuple[ThpSize, ...]

    @property
    def size(self) -> ThpSize | None:
        """The entry of `sizes` for `page_bytes`, where the kernel has one."""
        return next((size for size in self.sizes if size.page_bytes == self.page_bytes), None)

    @property
    def mode(self) -> str | None:
        """What holds for anonymous memory and pages of `page_bytes`."""
        own = self.size.enabled if self.size else None
        return self.enabled if own in (None, "inherit") else own

    @property
    def shmem_mode(self) -> str | None:
        """What holds for memfds and pages of `page_bytes`."""
        own = self.size.shmem_enabled if self.size else None
        # These two override every size's own mode.
        if own in (None, "inherit") or self.shmem_enabled in ("deny", "force"):
            return self.shmem_enabled
        return own


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory and its limits.

    Attributes
    ----------
    total_bytes : int
        Of the machine.
    available_bytes : int
        What this process can take (`limits.available_bytes`).
    page_bytes : int
        The base page.
    limits : tuple of Limit
        The machine, each memory cgroup above the process, the commit limit (`limits`).
    memlock : Limit or None
        None where locking has no limit.
    overcommit_mode : int
        ``vm.overcommit_memory``.
    swap_total_bytes, swap_free_bytes : int
        All swap areas.
    swappiness, max_map_count : int or None
        The sysctls of these names; None where they cannot be read.
    """

    total_bytes: int
    available_bytes: int
    page_bytes: int
    limits: tuple[Limit, ...]
    memlock: Limit | None
    overcommit_mode: int
    swap_total_bytes: int
    swap_free_bytes: int
    swappiness: int | None
    max_map_count: int | None


@dataclass(frozen=True, slots=True)
class Numa:
    """NUMA nodes and what the kernel does about them.

    Attributes
    ----------
    nodes : mapping
        Node ids to `Node`.
    weights : mapping
        Node ids to the kernel's weights of weighted interleave; empty where it has none.
    balancing : int or None
        ``kernel.numa_balancing``: 0 off, 1 on, 2 between fast and slow memory.
    zone_reclaim_mode : int or None
        ``vm.zone_reclaim_mode``.
    cpuset_path : str or None
        The file that keeps the process from some nodes, where one does and can be seen.
    """

    nodes: Mapping[int, Node]
    weights: Mapping[int, int]
    balancing: int | None
    zone_reclaim_mode: int | None
    cpuset_path: str | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this process may do.

    Attributes
    ----------
    has_ipc_lock, has_sys_nice : bool
        CAP_IPC_LOCK (locking without a limit) and CAP_SYS_NICE (moving pages of others).
    has_seccomp_filter : bool
        Whether a filter may refuse system calls, as in most containers.
    """

    has_ipc_lock: bool
    has_sys_nice: bool
    has_seccomp_filter: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as inference would want it.

    Attributes
    ----------
    what : str
        What it is, in a line.
    why : str
        What that does to inference.
    run : str
        The command, or the setting, that changes it.
    changes : str
        What is different then.
    is_optional : bool
        Whether all works without, and this may gain something more.
    """

    what: str
    why: str
    run: str
    changes: str
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """What `doctor` found. ``str()`` is for people, `to_json` for programs.

    Attributes
    ----------
    kernel : Kernel
        The kernel.
    cpu : Cpu
        Processors, and the quota on them.
    memory : Memory
        Sizes and limits.
    thp : Thp
        Transparent huge pages.
    pools : mapping
        Sizes of hugetlb pages ("2m", "1g", ...) to `HugePool`.
    numa : Numa
        Nodes.
    capabilities : Capabilities
        What this process may do.
    findings : tuple of Finding
        What to change, the greatest effect first, and then what is optional.
    """

    kernel: Kernel
    cpu: Cpu
    memory: Memory
    thp: Thp
    pools: Mapping[str, HugePool]
    numa: Numa
    capabilities: Capabilities
    findings: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and texts; ``docs/doctor.md`` names every key."""
        return {"schema": _SCHEMA, **_plain(self)}

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        from unimem.system.machine_text import render

        return render(self)


def doctor() -> Machine:
    """Look at this machine, and at what this process may have of it. Nothing is changed.

    Returns
    -------
    Machine
        Its ``str()`` says what to change, with the command to run.

    Examples
    --------
    >>> import unimem as um
    >>> machine = um.doctor()
    >>> machine.memory.page_bytes in (4096, 16384, 65536)
    True
    """
    from unimem.system.findings import findings

    status = _fields("/proc/thread-self/status")
    nodes = limits.nodes()
    machine = Machine(
        kernel=_kernel(),
        cpu=_cpu(status),
        memory=_memory(),
        thp=_thp(status),
        pools=limits.huge_pools(),
        numa=Numa(
            nodes,
            _weights(),
            limits._number("/proc/sys/kernel/numa_balancing"),
            limits._number("/proc/sys/vm/zone_reclaim_mode"),
            _cpuset_path({node.id for node in nodes.values() if not node.allowed}),
        ),
        capabilities=_capabilities(status),
    )
    return replace(machine, findings=findings(machine))


def _plain(value: Any) -> Any:
    if isinstance(value, HugePool):
        return {
            "page_bytes": value.page_bytes,
            "total_pages": value.total,
            "free_pages": value.free,
            "reserved_pages": value.reserved,
            "surplus_most_pages": value.surplus_most,
            "available_bytes": value.available_bytes,
            "cgroups": _plain(value.cgroups),
            "nodes": {
                str(node): {"total_pages": total, "free_pages": free}
                for node, (total, free) in value.nodes.items()
            },
        }
    if is_dataclass(value):
        plain = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return plain | ({"room_bytes": value.room_bytes} if isinstance(value, Limit) else {})
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


# ---- what is read -------------------------------------------------------------------------------


def _kernel() -> Kernel:
    release = limits._read("/proc/sys/kernel/osrelease") or os.uname().release
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    return Kernel(release, version, os.uname().machine)


def _cpu(status: Mapping[str, str]) -> Cpu:
    online = set(parse_list(limits._read(f"{_CPUS}/online") or ""))
    allowed = online & set(parse_list(status.get("Cpus_allowed_list", "")))
    info = _fields("/proc/cpuinfo")
    has = set(f"{info.get('flags', '')} {info.get('Features', '')}".split())
    governors = Counter(
        governor
        for policy in limits._names(f"{_CPUS}/cpufreq")
        if (governor := limits._read(f"{_CPUS}/cpufreq/{policy}/scaling_governor"))
    )
    return Cpu(
        model=info.get("model name", "unknown"),
        sockets=len({limits.core_of(cpu)[0] for cpu in online}),
        cores=len({limits.core_of(cpu) for cpu in online}),
        threads=len(online),
        allowed_cores=len({limits.core_of(cpu) for cpu in allowed}),
        allowed_threads=len(allowed),
        usable_cores=limits.thread_count(),
        quota=limits.cpu_quota(),
        features=tuple(name for name in _FEATURES if name in has),
        governors=dict(sorted(governors.items())),
    )


def _memory() -> Memory:
    info = _fields("/proc/meminfo")
    return Memory(
        total_bytes=_kib(info.get("MemTotal")),
        available_bytes=limits.available_bytes(),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        limits=limits.memory_limits(),
        memlock=limits.memlock(),
        overcommit_mode=limits.overcommit(),
        swap_total_bytes=_kib(info.get("SwapTotal")),
        swap_free_bytes=_kib(info.get("SwapFree")),
        swappiness=limits._number("/proc/sys/vm/swappiness"),
        max_map_count=limits._number("/proc/sys/vm/max_map_count"),
    )


def _thp(status: Mapping[str, str]) -> Thp:
    folder = "/sys/kernel/mm/transparent_hugepage"
    sizes = [
        ThpSize(
            int(found[1]) * 1024,
            _chosen(limits._read(f"{folder}/{name}/enabled")),
            _chosen(limits._read(f"{folder}/{name}/shmem_enabled")),
        )
        for name in limits._names(folder)
        if (found := re.fullmatch(r"hugepages-(\d+)kB", name))
    ]
    khugepaged = limits._number(f"{folder}/khugepaged/defrag")
    return Thp(
        page_bytes=limits._number(f"{folder}/hpage_pmd_size"),
        enabled=_chosen(limits._read(f"{folder}/enabled")),
        defrag=_chosen(limits._read(f"{folder}/defrag")),
        shmem_enabled=_chosen(limits._read(f"{folder}/shmem_enabled")),
        khugepaged_defrag=None if khugepaged is None else bool(khugepaged),
        shm_mount=_shm_mount(),
        is_disabled_for_process=status.get("THP_enabled") == "0",
        sizes=tuple(sorted(sizes, key=lambda size: size.page_bytes)),
    )


def _shm_mount() -> str | None:
    mode = None
    for line in (limits._read("/proc/self/mounts") or "").splitlines():
        _, where, kind, options, *_ = line.split()
        if where == "/dev/shm":  # the last one mounted there is the one that is seen
            found = re.search(r"(?:^|,)huge=(\w+)", options)
            mode = (found[1] if found else "never") if kind == "tmpfs" else None
    return mode


def _weights() -> dict[int, int]:
    folder = "/sys/kernel/mm/mempolicy/weighted_interleave"
    return {
        int(name.removeprefix("node")): weight
        for name in sorted(limits._names(folder))
        if re.fullmatch(r"node\d+", name)
        and (weight := limits._number(f"{folder}/{name}")) is not None
    }


def _cpuset_path(forbidden: set[int]) -> str | None:
    """Find the topmost cgroup that leaves out nodes: those below it cannot have more."""
    found = None
    for folder, *_ in limits._cgroups("cpuset"):
        mems = limits._read(f"{folder}/cpuset.mems")
        if mems and forbidden.difference(parse_list(mems)):
            found = f"{folder}/cpuset.mems"
    return found


def _capabilities(status: Mapping[str, str]) -> Capabilities:
    effective = int(status.get("CapEff", "0"), 16)
    return Capabilities(
        has_ipc_lock=bool(effective >> _CAP_IPC_LOCK & 1),
        has_sys_nice=bool(effective >> _CAP_SYS_NICE & 1),
        has_seccomp_filter=status.get("Seccomp") == str(_SECCOMP_FILTER),
    )


# ---- how it is read -----------------------------------------------------------------------------


def _fields(path: str) -> dict[str, str]:
    """Read lines of ``name: value``; of a name that comes again, as for each CPU, the first."""
    found: dict[str, str] = {}
    for line in (limits._read(path) or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def _kib(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else 0


def _chosen(text: str | None) -> str | None:
    """Read a file of modes, where the one in brackets holds."""
    found = re.search(r"\[([^\]]+)\]", text or "")
    return found[1] if found else None
