"""An invented machine for `um.doctor`, and changes to it."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unimem.base import kernel_files
from unimem.system import cgroups, limits

GIB = 1 << 30
THP = "/sys/kernel/mm/transparent_hugepage"
PMD = f"{THP}/hugepages-2048kB"
WEIGHTS = "/sys/kernel/mm/mempolicy/weighted_interleave"
CPUFREQ = "/sys/devices/system/cpu/cpufreq"


def read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


class Invented:
    """A machine of files and limits. As it begins, there is nothing to change."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.total_bytes = 256 * GIB
        self.more_limits: list[limits.Limit] = []
        self.memlock: limits.Limit | None = None
        self.overcommit = 0
        self.thread_count = 4
        self.nodes = {i: node(i) for i in range(2)}
        self.pools = {"2m": pool(2 << 20, 100), "1g": pool(1 << 30, 0)}
        monkeypatch.setenv("UNIMEM_CACHE", str(root / "cache"))
        monkeypatch.setattr(kernel_files, "read_text", self.read)
        monkeypatch.setattr(kernel_files, "list_names", self.names)
        monkeypatch.setattr(limits, "memory_limits", self.memory_limits)
        monkeypatch.setattr(limits, "available_bytes", lambda: 200 * GIB)
        for name in ("memlock", "overcommit", "thread_count", "nodes"):
            monkeypatch.setattr(limits, name, lambda name=name: getattr(self, name))
        monkeypatch.setattr(limits, "huge_pools", lambda: self.pools)
        self.status(CapEff="000001ffffffffff", Seccomp="0", Cpus_allowed_list="0-7")
        for path, text in FILES.items():
            self.write(path, text)
        self.thp(enabled="madvise", defrag="madvise", shmem_enabled="advise")
        self.thp(PMD, enabled="inherit", shmem_enabled="inherit")
        self.thp(f"{THP}/hugepages-64kB", enabled="madvise")
        self.thp(f"{THP}/hugepages-16kB", enabled="never")
        for cpu in range(8):
            folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
            self.write(f"{folder}/physical_package_id", str(cpu // 2 % 2))
            self.write(f"{folder}/core_id", str(cpu % 2))
            self.write(f"{CPUFREQ}/policy{cpu}/scaling_governor", "performance")

    def memory_limits(self) -> tuple[limits.Limit, ...]:
        return (limits.Limit("memory of the machine", self.total_bytes, 0, ""), *self.more_limits)

    def read(self, path: str) -> str | None:
        return read(str(self.root / path.lstrip("/")))

    def names(self, path: str) -> list[str]:
        folder = self.root / path.lstrip("/")
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def status(self, **lines: str) -> None:
        text = "\n".join(f"{name}:\t{value}" for name, value in lines.items())
        self.write("/proc/thread-self/status", text)

    def thp(self, folder: str = THP, **modes: str) -> None:
        """Write switches of huge pages as the kernel does: all modes, the chosen in brackets."""
        for name, mode in modes.items():
            words = ["inherit", *MODES[name].split()] if folder != THP else MODES[name].split()
            text = " ".join(f"[{word}]" if word == mode else word for word in words)
            assert f"[{mode}]" in text
            self.write(f"{folder}/{name}", text)


MODES = {
    "enabled": "always madvise never",
    "defrag": "always defer defer+madvise madvise never",
    "shmem_enabled": "always within_size advise never deny force",
}
FILES = {
    "/proc/sys/kernel/osrelease": "6.12.43-amd64",
    "/proc/cpuinfo": "model name : A CPU\nflags : fpu sse2 avx2 fma avx512f pdpe1gb\n"
    "model name : Another\nflags : fpu",
    "/proc/meminfo": f"MemTotal: {256 << 20} kB\nSwapTotal: 0 kB",
    "/proc/self/mounts": "tmpfs /dev/shm tmpfs rw,nosuid,huge=advise 0 0",
    "/proc/self/cgroup": "0::/a/b",
    "/proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    "31 1 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 1 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "33 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw",
    "/sys/dev/block/254:1/uevent": "MAJOR=254\nDEVNAME=vda1\nDEVTYPE=partition",
    "/sys/dev/block/uevent": "MAJOR=254\nDEVNAME=vda\nDEVTYPE=disk",  # of vda1/..
    "/sys/block/vda/queue/read_ahead_kb": "128",
    **{"/proc/sys/kernel/numa_balancing": "0", "/proc/sys/vm/zone_reclaim_mode": "0"},
    **{"/proc/sys/vm/swappiness": "60", "/proc/sys/vm/max_map_count": "65530"},
    **{f"{THP}/hpage_pmd_size": "2097152", f"{THP}/khugepaged/defrag": "1"},
    **{f"{WEIGHTS}/node0": "3", f"{WEIGHTS}/node1": "1", f"{WEIGHTS}/auto": "true"},
    "/sys/devices/system/cpu/online": "0-7",
}


def node(i: int, **changes: Any) -> limits.Node:
    sizes, cpus = (128 * GIB, 90 * GIB, 100 * GIB), tuple(range(4 * i, 4 * i + 4))
    whole = limits.Node(i, *sizes, cpus, (10, 21) if i == 0 else (21, 10), True)
    return dataclasses.replace(whole, **changes)


def pool(page_bytes: int, total: int, surplus_most: int = 0, **more: Any) -> limits.HugePool:
    half = total // 2
    nodes = {0: (total - half, total - half), 1: (half, half)}
    return limits.HugePool(page_bytes, total, total, 0, surplus_most, nodes, **more)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Invented]:
    # Where cgroups are mounted is read once.
    cgroups._mounts.cache_clear()
    limits.core_of.cache_clear()
    yield Invented(tmp_path, monkeypatch)
    cgroups._mounts.cache_clear()
    limits.core_of.cache_clear()


Change = Callable[[Invented], object]


def all_of(*changes: Change) -> Change:
    return lambda m: [change(m) for change in changes]


def files(**texts: str) -> Change:
    """Write files, which `PATHS` gives short names."""

    def write(m: Invented) -> None:
        for name, text in texts.items():
            m.write(PATHS[name], text)

    return write


def thp(folder: str = THP, **modes: str) -> Change:
    return lambda m: m.thp(folder, **modes)


def status(**lines: str) -> Change:
    return lambda m: m.status(Cpus_allowed_list="0-7", **lines)


def facts(**changes: Any) -> Change:
    return lambda m: vars(m).update(changes)


def without(folder: str) -> Change:
    return lambda m: shutil.rmtree(m.root / folder[1:])


def with_node(i: int, **changes: Any) -> Change:
    return lambda m: m.nodes.update({i: node(i, **changes)})


def of_2m(*cgroups: limits.Limit) -> Change:
    return lambda m: m.pools.update({"2m": pool(2 << 20, 100, cgroups=cgroups)})


def kernel(release: str) -> Change:
    return all_of(ONE_NODE, files(release=release))


CG = "/sys/fs/cgroup"
PATHS = {
    "release": "/proc/sys/kernel/osrelease",
    "own": "/proc/self/cgroup",
    "mounts": "/proc/self/mounts",
    **{"mountinfo": "/proc/self/mountinfo", "read_ahead": "/sys/block/vda/queue/read_ahead_kb"},
    "meminfo": "/proc/meminfo",
    "balancing": "/proc/sys/kernel/numa_balancing",
    "zone_reclaim": "/proc/sys/vm/zone_reclaim_mode",
    **{"swappiness": "/proc/sys/vm/swappiness", "maps": "/proc/sys/vm/max_map_count"},
    "governor": f"{CPUFREQ}/policy2/scaling_governor",
    **{"cpu_ab": f"{CG}/a/b/cpu.max", "cpu_a": f"{CG}/a/cpu.max"},
    **{f"{name}_c": f"{CG}/cpu/c/cpu.cfs_{name}_us" for name in ("quota", "period")},
    **{"mems_ab": f"{CG}/a/b/cpuset.mems", "mems_a": f"{CG}/a/cpuset.mems"},
    **{"mems": f"{CG}/cpuset.mems", "mems_c": f"{CG}/cpuset/c/cpuset.mems"},
    "mems_v1": f"{CG}/cpuset/cpuset.mems",
}
ONE_NODE = all_of(facts(nodes={0: node(0, distances=(10,))}), without(WEIGHTS))
CONTAINER = status(CapEff="00000000a80425fb", Seccomp="2")
SWAP = files(meminfo=f"MemTotal: {256 << 20} kB\nSwapTotal: 8388608 kB\nSwapFree: 8388608 kB")
SHM_MOUNT = files(mounts="tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0")
MEMLOCK = limits.Limit("locked memory (memlock)", 8 << 20, 0, "raise it")
CGROUP_MEMORY = facts(more_limits=[
    limits.Limit("cgroup /a/b", 300 * GIB, 0, "echo no"),
    limits.Limit("cgroup /a", 8 * GIB, GIB, f"echo 256G > {CG}/a/memory.max"),
])  # fmt: skip
QUOTA = files(cpu_ab="max 100000", cpu_a="250000 100000")
