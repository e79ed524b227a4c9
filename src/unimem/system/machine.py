"""The facts of a machine, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from unimem.system.disks import Disk
from unimem.system.limits import CpuQuota, HugePool, Limit, Node

_SCHEMA = "unimem.doctor/1"


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel.

    Attributes
    ----------
    release, architecture : str
        As in ``uname -r`` and ``uname -m``.
    version : tuple of int
        Major and minor number.
    """

    release: str
    version: tuple[int, int]
    architecture: str


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processors. Threads are CPUs in the kernel's words.

    Attributes
    ----------
    model : str
        Its name, or "unknown".
    sockets, cores, threads : int
        Those that are online.
    allowed_cores, allowed_threads : int
        Those in this process's affinity.
    usable_cores : int
        `limits.thread_count`: the allowed cores within the quota.
    quota : CpuQuota or None
        None if no cgroup sets one.
    features : tuple of str
        Features that matter for inference, by the kernel's names.
    governors : mapping
        cpufreq governors to the number of their policies.
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
        Modes for anonymous and for shared memory; "inherit" takes the mode of all sizes. None if
        the kernel lacks it.
    """

    page_bytes: int
    enabled: str | None
    shmem_enabled: str | None


@dataclass(frozen=True, slots=True)
class Thp:
    """Transparent huge pages. A mode is None if the kernel lacks it.

    Attributes
    ----------
    page_bytes : int or None
        The size of a page middle directory's entry: 2 MiB on most machines.
    enabled, defrag, shmem_enabled : str or None
        The modes for all sizes.
    khugepaged_defrag : bool or None
        Whether khugepaged compacts memory.
    shm_mount : str or None
        The mode of /dev/shm; None without a tmpfs there.
    is_disabled_for_process : bool
        Whether ``prctl(PR_SET_THP_DISABLE)`` is in effect.
    sizes : tuple of ThpSize
        The kernel's sizes, ascending; empty before Linux 6.8.
    host_takes_pages : bool
        Whether the host takes free huge pages of this virtual machine (free page reporting).
    """

    page_bytes: int | None
    enabled: str | None
    defrag: str | None
    shmem_enabled: str | None
    khugepaged_defrag: bool | None
    shm_mount: str | None
    is_disabled_for_process: bool
    sizes: tuple[ThpSize, ...]
    host_takes_pages: bool = False

    @property
    def size(self) -> ThpSize | None:
        """The entry of `sizes` for `page_bytes`, if the kernel has one."""
        return next((size for size in self.sizes if size.page_bytes == self.page_bytes), None)

    @property
    def mode(self) -> str | None:
        """The mode in effect for anonymous memory and pages of `page_bytes`."""
        own = self.size.enabled if self.size else None
        return self.enabled if own in (None, "inherit") else own

    @property
    def shmem_mode(self) -> str | None:
        """The mode in effect for memfds and pages of `page_bytes`."""
        own = self.size.shmem_enabled if self.size else None
        # "deny" and "force" override every size's own mode.
        if own in (None, "inherit") or self.shmem_enabled in ("deny", "force"):
            return self.shmem_enabled
        return own


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory and its limits.

    Attributes
    ----------
    total_bytes, available_bytes : int
        Memory of the machine, and what this process can take (`limits.available_bytes`).
    page_bytes : int
        The base page.
    limits : tuple of Limit
        The machine, each memory cgroup above the process, the commit limit.
    memlock : Limit or None
        None if locking has no limit.
    overcommit_mode : int
        ``vm.overcommit_memory``.
    swap_total_bytes, swap_free_bytes : int
        All swap areas.
    swappiness, max_map_count : int or None
        The sysctls of these names; None if unreadable.
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
    """NUMA nodes and the kernel's handling of them.

    Attributes
    ----------
    nodes : mapping
        Node ids to `Node`.
    weights : mapping
        Node ids to weights of weighted interleave; empty if the kernel has none.
    balancing : int or None
        ``kernel.numa_balancing``: 0 off, 1 on, 2 between fast and slow memory.
    zone_reclaim_mode : int or None
        ``vm.zone_reclaim_mode``.
    cpuset_path : str or None
        The file that excludes the process from some nodes, if one does and is visible.
    """

    nodes: Mapping[int, Node]
    weights: Mapping[int, int]
    balancing: int | None
    zone_reclaim_mode: int | None
    cpuset_path: str | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The rights of this process.

    Attributes
    ----------
    has_ipc_lock, has_sys_nice : bool
        CAP_IPC_LOCK (locking without a limit) and CAP_SYS_NICE (moving other processes' pages).
    has_seccomp_filter : bool
        Whether a filter may refuse system calls, as in most containers.
    """

    has_ipc_lock: bool
    has_sys_nice: bool
    has_seccomp_filter: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause of slow or failing inference.

    Attributes
    ----------
    what, why : str
        The cause, in a line, and its effect on inference.
    run, changes : str
        The command or setting that changes it, and the result.
    is_optional : bool
        Whether inference works well without it.
    """

    what: str
    why: str
    run: str
    changes: str
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts of a machine; `unimem.system.doctor.Machine` documents each part."""

    kernel: Kernel
    cpu: Cpu
    memory: MemoryFacts
    thp: Thp
    pools: Mapping[str, HugePool]
    numa: Numa
    capabilities: Capabilities
    disks: tuple[Disk, ...] = ()
    findings: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and texts, by ``docs/schemas/doctor-1.json``."""
        return {"schema": _SCHEMA, **_plain(self)}

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict())


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
