"""Describe this machine, and what to change so that inference gets more of it.

Limits come from `unimem.system.limits`; this module reads everything else, and
`unimem.system.findings` judges both.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from unimem.base import kernel_files
from unimem.base.arguments import file_path
from unimem.base.html import preformatted
from unimem.base.kernel_files import parse_kib, parse_list
from unimem.base.text import format_bytes
from unimem.system import limits
from unimem.system.cgroups import cgroups_above
from unimem.system.cpu_features import cpu_features
from unimem.system.disk_speed import measure_speed, remember
from unimem.system.disks import Disk, disk_of, find_disks
from unimem.system.machine import (
    Capabilities,
    Cpu,
    Kernel,
    MachineFacts,
    MemoryFacts,
    Numa,
    Thp,
    ThpSize,
)

_CPUS = "/sys/devices/system/cpu"

# Features of kernels for matrix products and conversions, by the kernel's names, and 1 GiB pages.
_FEATURES = tuple(
    """
    ssse3 avx f16c fma avx2 avx_vnni avx512f avx512bw avx512vl avx512vbmi avx512_vnni
    avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_bf16 pdpe1gb asimd asimdhp asimddp i8mm bf16
    sve svei8mm svebf16 sve2 sme
""".split()
)
_CAP_IPC_LOCK, _CAP_SYS_NICE = 14, 23  # <linux/capability.h>
_SECCOMP_FILTER = 2
_REPORTING = 5  # the bit of free page reporting (uapi/linux/virtio_balloon.h)


class Machine(MachineFacts):
    """The result of `doctor`. ``str()`` is for people, `to_json` for programs.

    Attributes
    ----------
    kernel : Kernel
        The kernel.
    cpu : Cpu
        Processors, and the quota on them.
    memory : MemoryFacts
        Sizes and limits.
    thp : Thp
        Transparent huge pages.
    pools : mapping
        Sizes of hugetlb pages ("2m", "1g", ...) to `HugePool`.
    numa : Numa
        Nodes.
    capabilities : Capabilities
        Rights of this process.
    disks : tuple of Disk
        Disks with file systems.
    findings : tuple of Finding
        What to change, the greatest effect first, optional changes last.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        ram, n = format_bytes(self.memory.total_bytes), len(self.findings)
        return f"Machine({self.cpu.allowed_threads} CPUs, {ram}, {n} findings)"

    def __str__(self) -> str:
        from unimem.system.machine_text import render

        return render(self)

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def doctor(*, disk: str | os.PathLike[str] | None = None) -> Machine:
    """Describe this machine and this process's share of it. Nothing is changed.

    Parameters
    ----------
    disk : path-like, optional
        A model, or a folder, whose disk is measured: a large file there is read past the page
        cache, at most 2 GiB and for about 2 seconds; without one of 128 MiB, a temporary file of
        256 MiB is written and removed. The speed is remembered for `plan`. By default no data is
        read or written.

    Returns
    -------
    Machine
        Its ``str()`` names what to change, with commands.

    Raises
    ------
    OSError
        `disk` cannot be read or written, is in memory, or has no direct reads.
    TypeError, ValueError
        `disk` is no path.

    Examples
    --------
    >>> import unimem as um
    >>> machine = um.doctor()
    >>> machine.memory.page_bytes in (4096, 16384, 65536)
    True
    """
    status = kernel_files.read_fields("/proc/thread-self/status")
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
            kernel_files.read_number("/proc/sys/kernel/numa_balancing"),
            kernel_files.read_number("/proc/sys/vm/zone_reclaim_mode"),
            _cpuset_path({node.id for node in nodes.values() if not node.allowed}),
        ),
        capabilities=_capabilities(status),
        disks=find_disks() if disk is None else _with_measured(file_path(disk, "disk")),
    )
    from unimem.system.findings import judge

    return replace(machine, findings=judge(machine))


def _with_measured(path: str) -> tuple[Disk, ...]:
    """Measure a disk and remember its speed; return all disks."""
    os.stat(path)  # a missing path lies on no disk
    found = disk_of(path)
    if found is None:
        text = "It is in memory, or on no disk that this process sees"
        raise OSError(errno.EINVAL, text, path)
    measured = replace(found, speed=measure_speed(path))
    assert measured.speed is not None
    remember(found.name, measured.speed)
    others = find_disks()
    if all(one.name != found.name for one in others):
        return (*others, measured)
    return tuple(
        replace(one, speed=measured.speed) if one.name == found.name else one for one in others
    )


def _kernel() -> Kernel:
    release = kernel_files.read_text("/proc/sys/kernel/osrelease") or os.uname().release
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    return Kernel(release, version, os.uname().machine)


def _cpu(status: Mapping[str, str]) -> Cpu:
    # psutil counts neither sockets nor the cores of an affinity.
    online = set(parse_list(kernel_files.read_text(f"{_CPUS}/online") or ""))
    allowed = online & set(parse_list(status.get("Cpus_allowed_list", "")))
    info = kernel_files.read_fields("/proc/cpuinfo")
    has = cpu_features()
    governors = Counter(
        governor
        for policy in kernel_files.list_names(f"{_CPUS}/cpufreq")
        if (governor := kernel_files.read_text(f"{_CPUS}/cpufreq/{policy}/scaling_governor"))
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


def _memory() -> MemoryFacts:
    info = kernel_files.read_fields("/proc/meminfo")
    return MemoryFacts(
        total_bytes=parse_kib(info.get("MemTotal")),
        available_bytes=limits.available_bytes(),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        limits=limits.memory_limits(),
        memlock=limits.memlock(),
        overcommit_mode=limits.overcommit(),
        swap_total_bytes=parse_kib(info.get("SwapTotal")),
        swap_free_bytes=parse_kib(info.get("SwapFree")),
        swappiness=kernel_files.read_number("/proc/sys/vm/swappiness"),
        max_map_count=kernel_files.read_number("/proc/sys/vm/max_map_count"),
    )


def _thp(status: Mapping[str, str]) -> Thp:
    folder = "/sys/kernel/mm/transparent_hugepage"
    sizes = [
        ThpSize(
            int(found[1]) * 1024,
            _chosen(kernel_files.read_text(f"{folder}/{name}/enabled")),
            _chosen(kernel_files.read_text(f"{folder}/{name}/shmem_enabled")),
        )
        for name in kernel_files.list_names(folder)
        if (found := re.fullmatch(r"hugepages-(\d+)kB", name))
    ]
    khugepaged = kernel_files.read_number(f"{folder}/khugepaged/defrag")
    return Thp(
        page_bytes=kernel_files.read_number(f"{folder}/hpage_pmd_size"),
        enabled=_chosen(kernel_files.read_text(f"{folder}/enabled")),
        defrag=_chosen(kernel_files.read_text(f"{folder}/defrag")),
        shmem_enabled=_chosen(kernel_files.read_text(f"{folder}/shmem_enabled")),
        khugepaged_defrag=None if khugepaged is None else bool(khugepaged),
        shm_mount=_shm_mount(),
        is_disabled_for_process=status.get("THP_enabled") == "0",
        sizes=tuple(sorted(sizes, key=lambda size: size.page_bytes)),
        host_takes_pages=_host_takes_pages(),
    )


def _host_takes_pages() -> bool:
    """Look for a balloon with free page reporting."""
    balloons = "/sys/bus/virtio/drivers/virtio_balloon"
    features = (
        kernel_files.read_text(f"{balloons}/{name}/features") or ""
        for name in kernel_files.list_names(balloons)
        if name.startswith("virtio")
    )
    return any(bits[_REPORTING : _REPORTING + 1] == "1" for bits in features)


def _shm_mount() -> str | None:
    mode = None
    for line in (kernel_files.read_text("/proc/self/mounts") or "").splitlines():
        _, where, kind, options, *_ = line.split()
        if where == "/dev/shm":  # the last mount hides those before
            found = re.search(r"(?:^|,)huge=(\w+)", options)
            mode = (found[1] if found else "never") if kind == "tmpfs" else None
    return mode


def _weights() -> dict[int, int]:
    folder = "/sys/kernel/mm/mempolicy/weighted_interleave"
    return {
        int(name.removeprefix("node")): weight
        for name in sorted(kernel_files.list_names(folder))
        if re.fullmatch(r"node\d+", name)
        and (weight := kernel_files.read_number(f"{folder}/{name}")) is not None
    }


def _cpuset_path(forbidden: set[int]) -> str | None:
    """Find the topmost cgroup that excludes nodes: those below it cannot have more."""
    found = None
    for cgroup in cgroups_above("cpuset"):
        path = f"{cgroup.folder}/cpuset.mems"
        mems = kernel_files.read_text(path)
        if mems and forbidden.difference(parse_list(mems)):
            found = path
    return found


def _capabilities(status: Mapping[str, str]) -> Capabilities:
    effective = int(status.get("CapEff", "0"), 16)
    return Capabilities(
        has_ipc_lock=bool(effective >> _CAP_IPC_LOCK & 1),
        has_sys_nice=bool(effective >> _CAP_SYS_NICE & 1),
        has_seccomp_filter=status.get("Seccomp") == str(_SECCOMP_FILTER),
    )


def _chosen(text: str | None) -> str | None:
    """Read a file of modes; the one in brackets is set."""
    found = re.search(r"\[([^\]]+)\]", text or "")
    return found[1] if found else None
