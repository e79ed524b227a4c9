"""`um.doctor`: each finding on an invented machine, and every field on the real one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from project import ROOT
from unimem.system import cgroups, kernel_files, limits

GIB = 1 << 30
THP = "/sys/kernel/mm/transparent_hugepage"
PMD = f"{THP}/hugepages-2048kB"


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
        monkeypatch.setattr(kernel_files, "read_text", self.read)
        monkeypatch.setattr(kernel_files, "list_names", self.names)
        monkeypatch.setattr(limits, "memory_limits", self.memory_limits)
        monkeypatch.setattr(limits, "available_bytes", lambda: 200 * GIB)
        monkeypatch.setattr(limits, "memlock", lambda: self.memlock)
        monkeypatch.setattr(limits, "overcommit", lambda: self.overcommit)
        monkeypatch.setattr(limits, "thread_count", lambda: self.thread_count)
        monkeypatch.setattr(limits, "nodes", lambda: self.nodes)
        monkeypatch.setattr(limits, "huge_pools", lambda: self.pools)
        self.status(CapEff="000001ffffffffff", Seccomp="0", Cpus_allowed_list="0-7")
        self.write("/proc/sys/kernel/osrelease", "6.12.43-amd64")
        self.write("/proc/cpuinfo", CPUINFO)
        self.write("/proc/meminfo", f"MemTotal: {self.total_bytes >> 10} kB\nSwapTotal: 0 kB")
        self.write("/proc/self/mounts", "tmpfs /dev/shm tmpfs rw,nosuid,huge=advise 0 0")
        self.write("/proc/self/cgroup", "0::/a/b")
        self.write("/proc/self/mountinfo", MOUNTS)
        self.write("/proc/sys/kernel/numa_balancing", "0")
        self.write("/proc/sys/vm/zone_reclaim_mode", "0")
        self.write("/proc/sys/vm/swappiness", "60")
        self.write("/proc/sys/vm/max_map_count", "65530")
        self.write(f"{THP}/hpage_pmd_size", "2097152")
        self.write(f"{THP}/enabled", "always [madvise] never")
        self.write(f"{THP}/defrag", "always defer defer+madvise [madvise] never")
        self.write(f"{THP}/shmem_enabled", "always within_size [advise] never deny force")
        self.write(f"{THP}/khugepaged/defrag", "1")
        self.write(f"{PMD}/enabled", "always [inherit] madvise never")
        self.write(f"{PMD}/shmem_enabled", "always [inherit] within_size advise never")
        self.write(f"{THP}/hugepages-64kB/enabled", "always inherit [madvise] never")
        self.write(f"{THP}/hugepages-16kB/enabled", "always inherit madvise [never]")
        self.write("/sys/kernel/mm/mempolicy/weighted_interleave/node0", "3")
        self.write("/sys/kernel/mm/mempolicy/weighted_interleave/node1", "1")
        self.write("/sys/kernel/mm/mempolicy/weighted_interleave/auto", "true")
        self.write("/sys/devices/system/cpu/online", "0-7")
        for cpu in range(8):
            folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
            self.write(f"{folder}/physical_package_id", str(cpu // 2 % 2))
            self.write(f"{folder}/core_id", str(cpu % 2))
        for policy in range(8):
            self.governor(policy, "performance")

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

    def governor(self, policy: int, name: str) -> None:
        self.write(f"/sys/devices/system/cpu/cpufreq/policy{policy}/scaling_governor", name)

    def one_node(self) -> None:
        self.nodes = {0: node(0, distances=(10,))}
        folder = self.root / "sys/kernel/mm/mempolicy/weighted_interleave"
        for name in ("node0", "node1", "auto"):
            (folder / name).unlink()


MOUNTS = """30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
31 1 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
32 1 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"""
CPUINFO = """processor : 0
model name : A CPU
flags : fpu sse2 avx2 fma avx512f pdpe1gb
processor : 1
model name : Another
flags : fpu"""


def node(i: int, **changes: Any) -> limits.Node:
    facts: dict[str, Any] = {
        "id": i,
        "total_bytes": 128 * GIB,
        "free_bytes": 90 * GIB,
        "available_bytes": 100 * GIB,
        "cpus": tuple(range(4 * i, 4 * i + 4)),
        "distances": (10, 21) if i == 0 else (21, 10),
        "allowed": True,
    }
    return limits.Node(**facts | changes)


def pool(page_bytes: int, total: int, surplus_most: int = 0) -> limits.HugePool:
    half = total // 2
    nodes = {0: (total - half, total - half), 1: (half, half)}
    return limits.HugePool(page_bytes, total, total, 0, surplus_most, nodes)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Invented]:
    # Where cgroups are mounted is read once.
    cgroups._mounts.cache_clear()
    limits.core_of.cache_clear()
    yield Invented(tmp_path, monkeypatch)
    cgroups._mounts.cache_clear()
    limits.core_of.cache_clear()


# ---- what it finds -------------------------------------------------------------------------


def test_a_machine_that_serves_well_has_nothing_to_change(machine: Invented) -> None:
    found = um.doctor()
    assert found.findings == ()
    assert str(found).endswith("\n\nNothing to change.")


def cgroup_memory(m: Invented) -> None:
    m.more_limits = [
        limits.Limit("cgroup /a/b", 300 * GIB, 0, "echo no"),
        limits.Limit("cgroup /a", 8 * GIB, GIB, "echo 256G > /sys/fs/cgroup/a/memory.max"),
    ]


def overcommit(m: Invented) -> None:
    m.overcommit = 2


def thp_never(m: Invented) -> None:
    m.write(f"{THP}/enabled", "always madvise [never]")


def thp_of_the_size_never(m: Invented) -> None:
    m.write(f"{PMD}/enabled", "always inherit madvise [never]")


def thp_missing(m: Invented) -> None:
    for path in (m.root / THP[1:]).rglob("*"):
        if path.is_file():
            path.unlink()


def thp_disabled(m: Invented) -> None:
    m.status(CapEff="1ffffffffff", Cpus_allowed_list="0-7", THP_enabled="0")


def quota_v2(m: Invented) -> None:
    m.write("/sys/fs/cgroup/a/b/cpu.max", "max 100000")
    m.write("/sys/fs/cgroup/a/cpu.max", "250000 100000")


def quota_v1(m: Invented) -> None:
    m.write("/proc/self/cgroup", "3:cpu,cpuacct:/c\n0::/")
    m.write("/sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "100000")
    m.write("/sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "100000")


def cpuset(m: Invented) -> None:
    m.nodes[1] = node(1, allowed=False)
    m.write("/sys/fs/cgroup/a/b/cpuset.mems", "")
    m.write("/sys/fs/cgroup/a/cpuset.mems", "0")
    m.write("/sys/fs/cgroup/cpuset.mems", "0-1")


def cpuset_v1(m: Invented) -> None:
    m.nodes[0] = node(0, allowed=False)
    m.write("/proc/self/cgroup", "3:cpuset:/c")
    m.write("/sys/fs/cgroup/cpuset/c/cpuset.mems", "1")
    m.write("/sys/fs/cgroup/cpuset/cpuset.mems", "0-1")


def cpuset_unseen(m: Invented) -> None:
    m.nodes[1] = node(1, allowed=False)


def container(m: Invented) -> None:
    m.status(CapEff="00000000a80425fb", Seccomp="2", Cpus_allowed_list="0-7")


def balancing(m: Invented) -> None:
    m.write("/proc/sys/kernel/numa_balancing", "1")


def zone_reclaim(m: Invented) -> None:
    m.write("/proc/sys/vm/zone_reclaim_mode", "1")


def swap(m: Invented) -> None:
    m.write("/proc/meminfo", f"MemTotal: {256 << 20} kB\nSwapTotal: 8388608 kB\nSwapFree: 0 kB")


def hugetlb_cgroup(m: Invented) -> None:
    remedy = "echo max > /sys/fs/cgroup/a/hugetlb.2MB.max"
    limit = limits.Limit("hugetlb cgroup /a", 0, 0, remedy)
    wide = limits.Limit("hugetlb cgroup /", GIB, 0, "echo no")
    m.pools["2m"] = dataclasses.replace(m.pools["2m"], cgroups=(limit, wide))


def memlock(m: Invented) -> None:
    m.memlock = limits.Limit("locked memory (memlock)", 8 << 20, 0, "raise it")


def defrag_always(m: Invented) -> None:
    m.write(f"{THP}/enabled", "[always] madvise never")
    m.write(f"{THP}/defrag", "[always] defer defer+madvise madvise never")


def defrag_defer(m: Invented) -> None:
    m.write(f"{THP}/defrag", "always [defer] defer+madvise madvise never")


def defrag_never(m: Invented) -> None:
    m.write(f"{THP}/defrag", "always defer defer+madvise madvise [never]")


def shmem_never(m: Invented) -> None:
    m.write(f"{THP}/shmem_enabled", "always within_size advise [never] deny force")


def shmem_deny(m: Invented) -> None:
    m.write(f"{PMD}/shmem_enabled", "[always] inherit within_size advise never")
    m.write(f"{THP}/shmem_enabled", "always within_size advise never [deny] force")


def shmem_of_the_size_never(m: Invented) -> None:
    m.write(f"{PMD}/shmem_enabled", "always inherit within_size advise [never]")


def shm_mount(m: Invented) -> None:
    m.write("/proc/self/mounts", "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0")


def kernel(release: str) -> Callable[[Invented], None]:
    def change(m: Invented) -> None:
        m.one_node()
        m.write("/proc/sys/kernel/osrelease", release)

    return change


def no_weights(m: Invented) -> None:
    m.one_node()
    m.nodes = {i: node(i) for i in range(2)}
    m.write("/proc/sys/kernel/osrelease", "6.8.0-40-generic")


def maps(m: Invented) -> None:
    m.write("/proc/sys/vm/max_map_count", "1000")


def governor(m: Invented) -> None:
    m.governor(2, "powersave")


def no_pool(m: Invented) -> None:
    m.pools = {"2m": pool(2 << 20, 0)}


NEEDED = [
    (cgroup_memory, "cgroup /a holds the process to 8.0 GiB",
     "echo 256G > /sys/fs/cgroup/a/memory.max"),
    (overcommit, "vm.overcommit_memory=2", "sysctl vm.overcommit_memory=0"),
    (thp_never, "transparent huge pages are off", f"echo madvise > {THP}/enabled"),
    (thp_of_the_size_never, "transparent huge pages are off", f"echo madvise > {PMD}/enabled"),
    (thp_missing, "has no transparent huge pages", "CONFIG_TRANSPARENT_HUGEPAGE=y"),
    (thp_disabled, "disabled for this process", "start it without that call"),
    (quota_v2, "leaves 2.5 of 4 cores", "echo max > /sys/fs/cgroup/a/cpu.max"),
    (quota_v1, "leaves 1 of 4 cores", "echo -1 > /sys/fs/cgroup/cpu/c/cpu.cfs_quota_us"),
    (cpuset, "leaves out node 1", "echo 0,1 > /sys/fs/cgroup/a/cpuset.mems"),
    (cpuset_v1, "leaves out node 0", "echo 0,1 > /sys/fs/cgroup/cpuset/c/cpuset.mems"),
    (cpuset_unseen, "leaves out node 1", "docker run --cpuset-mems=0,1"),
    (container, "may be refused in this container", "docker run --cap-add SYS_NICE"),
    (balancing, "moves pages between nodes", "sysctl kernel.numa_balancing=0"),
    (zone_reclaim, "vm.zone_reclaim_mode=1", "sysctl vm.zone_reclaim_mode=0"),
    (swap, "vm.swappiness=60", "sysctl vm.swappiness=1"),
    (hugetlb_cgroup, "hugetlb cgroup /a allows 0 B of the pool of 2m pages",
     "echo max > /sys/fs/cgroup/a/hugetlb.2MB.max"),
    (memlock, "only 8.0 MiB may be locked", "ulimit -l unlimited"),
    (defrag_always, "every page fault may wait", f"echo defer+madvise > {THP}/defrag"),
    (defrag_defer, "THP defrag=defer", f"echo defer+madvise > {THP}/defrag"),
    (defrag_never, "THP defrag=never", f"echo defer+madvise > {THP}/defrag"),
    (shmem_never, "shmem_enabled=never", f"echo advise > {THP}/shmem_enabled"),
    (shmem_deny, "shmem_enabled=deny", f"echo advise > {THP}/shmem_enabled"),
    (shmem_of_the_size_never, "shmem_enabled=never", f"echo advise > {PMD}/shmem_enabled"),
    (shm_mount, "files in /dev/shm", "mount -o remount,huge=advise /dev/shm"),
    (kernel("5.10.0-30-amd64"), "Linux 5.10 is older than 6.7", "boot Linux 6.7 or newer"),
    (maps, "only 1000 mappings", "sysctl vm.max_map_count=262144"),
    (governor, "powersave", "tee /sys/devices/system/cpu/cpufreq/policy*/scaling_governor"),
]  # fmt: skip
OPTIONAL = [
    (kernel("6.1.0-18-amd64"), "Linux 6.1 is older than 6.7", "boot Linux 6.7 or newer"),
    (no_weights, "Linux 6.8 is older than 6.9", "boot Linux 6.9 or newer"),
    (
        no_pool,
        "no hugetlb pages of 2m",
        "echo 8192 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
    ),
]
CASES = [(*case, False) for case in NEEDED] + [(*case, True) for case in OPTIONAL]


@pytest.mark.parametrize(("change", "what", "run", "is_optional"), CASES)
def test_one_thing_amiss_is_one_finding(
    machine: Invented,
    change: Callable[[Invented], None],
    what: str,
    run: str,
    is_optional: bool,
) -> None:
    change(machine)
    found = um.doctor()
    (finding,) = found.findings
    assert what in finding.what
    assert run in finding.run
    assert finding.is_optional == is_optional
    assert finding.why.endswith(".")
    assert finding.changes
    shown = str(found)
    assert max(map(len, shown.splitlines())) <= 80
    assert ("Nothing to change." in shown) == is_optional
    for part in (finding.what, finding.why, finding.run, finding.changes):
        assert part in " ".join(shown.replace("\\\n", "").split())


def thp_always(m: Invented) -> None:
    m.write(f"{THP}/enabled", "[always] madvise never")


def size_overrides_never(m: Invented) -> None:
    m.write(f"{THP}/enabled", "always madvise [never]")
    m.write(f"{PMD}/enabled", "always inherit [madvise] never")


def defrag_always_for_those_who_ask(m: Invented) -> None:
    m.write(f"{THP}/defrag", "[always] defer defer+madvise madvise never")


def shmem_force(m: Invented) -> None:
    shm_mount(m)
    m.write(f"{THP}/shmem_enabled", "always within_size advise never deny [force]")


def shm_is_no_tmpfs(m: Invented) -> None:
    m.write("/proc/self/mounts", "/dev/vda /dev/shm ext4 rw 0 0")


def generous_quota(m: Invented) -> None:
    m.write("/sys/fs/cgroup/a/cpu.max", "400000 100000")


def container_of_one_node(m: Invented) -> None:
    container(m)
    m.one_node()


def one_node_balanced(m: Invented) -> None:
    m.one_node()
    balancing(m)
    zone_reclaim(m)


def tiered_balancing(m: Invented) -> None:
    m.write("/proc/sys/kernel/numa_balancing", "2")


def quiet_swap(m: Invented) -> None:
    swap(m)
    m.write("/proc/sys/vm/swappiness", "10")


def memlock_of_all(m: Invented) -> None:
    m.memlock = limits.Limit("locked memory (memlock)", 256 * GIB, 0, "")


def wide_hugetlb_cgroup(m: Invented) -> None:
    limit = limits.Limit("hugetlb cgroup /a", 200 << 20, 0, "echo no")
    m.pools["2m"] = dataclasses.replace(m.pools["2m"], cgroups=(limit,))


def pool_on_demand(m: Invented) -> None:
    m.pools = {"2m": pool(2 << 20, 0, surplus_most=10)}


def backported_weights(m: Invented) -> None:
    m.write("/proc/sys/kernel/osrelease", "6.8.0-el10")


def no_cpufreq(m: Invented) -> None:
    for path in (m.root / "sys/devices/system/cpu/cpufreq").rglob("scaling_governor"):
        path.unlink()


def forbidden_node_without_memory(m: Invented) -> None:
    m.nodes[1] = node(1, total_bytes=0, allowed=False)


@pytest.mark.parametrize(
    "change",
    [
        thp_always, size_overrides_never, defrag_always_for_those_who_ask, shmem_force,
        shm_is_no_tmpfs, generous_quota, container_of_one_node, one_node_balanced,
        tiered_balancing, quiet_swap, memlock_of_all, wide_hugetlb_cgroup, pool_on_demand,
        backported_weights, no_cpufreq, forbidden_node_without_memory, kernel("7.0.1"),
    ],
)  # fmt: skip
def test_what_does_no_harm_is_no_finding(
    machine: Invented, change: Callable[[Invented], None]
) -> None:
    change(machine)
    assert um.doctor().findings == ()


def test_kernels_lack_what_came_later(machine: Invented) -> None:
    (machine.root / "sys/kernel/mm/mempolicy/weighted_interleave/node0").unlink()
    (machine.root / "sys/kernel/mm/mempolicy/weighted_interleave/node1").unlink()
    lacking = {
        "5.13.0": ["5.14", "6.1", "6.7", "6.9"],
        "5.14.0": ["6.1", "6.7", "6.9"],
        "6.1.0": ["6.7", "6.9"],
        "6.7.0": ["6.9"],
    }
    for release, since in lacking.items():
        machine.write("/proc/sys/kernel/osrelease", release)
        (finding,) = um.doctor().findings
        assert re.findall(r"\((\d\.\d+)\)", finding.why) == since


def test_large_pages_are_proposed_to_large_machines(machine: Invented) -> None:
    machine.pools = {"2m": pool(2 << 20, 0), "1g": pool(1 << 30, 0)}
    found = um.doctor().findings
    assert [finding.is_optional for finding in found] == [True, True]
    assert found[1].run.endswith("hugepagesz=1G hugepages=16")
    machine.write("/proc/meminfo", f"MemTotal: {32 << 20} kB")
    (small,) = um.doctor().findings
    assert small.run.startswith("echo 4096 >")  # a fourth of the machine
    machine.write("/proc/meminfo", f"MemTotal: {2 << 20} kB")
    assert um.doctor().findings[0].run.startswith("echo 512 >")


def test_findings_come_by_their_effect(machine: Invented) -> None:
    changes = (
        no_pool, governor, maps, shm_mount, shmem_never, memlock, swap, balancing, cpuset,
        quota_v2, thp_never, overcommit, cgroup_memory,
    )  # fmt: skip
    for change in changes:
        change(machine)
    found = um.doctor()
    needed = [case for case in NEEDED if case[0] in changes]
    wanted = [what for _, what, _ in needed] + ["no hugetlb pages of 2m"]
    assert len(found.findings) == len(wanted)
    for finding, what in zip(found.findings, wanted, strict=True):
        assert what in finding.what
    shown = str(found)
    places = [shown.index(f"\n{i}.") for i in range(1, len(wanted) + 1)]
    assert places == sorted(places)
    assert max(map(len, shown.splitlines())) <= 80


# ---- what it reads -------------------------------------------------------------------------


def test_it_describes_the_machine(machine: Invented) -> None:
    found = um.doctor()
    assert found.kernel.version == (6, 12)
    cpu = found.cpu
    assert (cpu.model, cpu.sockets, cpu.cores, cpu.threads) == ("A CPU", 2, 4, 8)
    assert (cpu.allowed_cores, cpu.allowed_threads, cpu.usable_cores) == (4, 8, 4)
    assert cpu.features == ("fma", "avx2", "avx512f", "pdpe1gb")
    assert cpu.governors == {"performance": 8}
    assert found.memory.total_bytes == 256 * GIB
    assert [size.page_bytes for size in found.thp.sizes] == [16 << 10, 64 << 10, 2 << 20]
    assert found.thp.mode == "madvise"
    assert (found.thp.shmem_mode, found.thp.shm_mount) == ("advise", "advise")
    assert found.numa.weights == {0: 3, 1: 1}
    shown = str(found)
    for line in (
        r"kernel    Linux 6\.12\.43-amd64, ",
        r"cpu       A CPU: 2 sockets, 4 cores, 8 threads; 4 cores for this process",
        r"limits    locking without limit",
        r"          mTHP 64\.0 KiB madvise",
        r"hugetlb   2m: 100 pages, 100 free; 1g: 0 pages, 0 free",
        r"numa      2 nodes; automatic balancing off; vm\.zone_reclaim_mode 0",
        r"node  CPUs +memory +available +2m free +1g free +weight",
        r"0      0-3  128\.0 GiB  100\.0 GiB +50 +0 +3",
        r"distance   0   1",
        r"1         21  10",
    ):
        assert re.search(f"^{line}", shown, re.M), line


def test_affinity_narrows_the_cores(machine: Invented) -> None:
    machine.status(CapEff="0", Cpus_allowed_list="0-1,4-5")
    cpu = um.doctor().cpu
    assert (cpu.allowed_threads, cpu.allowed_cores, cpu.cores) == (4, 2, 4)


def test_an_arm_machine(machine: Invented) -> None:
    machine.write("/proc/cpuinfo", "processor : 0\nFeatures : fp asimd asimddp i8mm sve")
    cpu = um.doctor().cpu
    assert (cpu.model, cpu.features) == ("unknown", ("asimd", "asimddp", "i8mm", "sve"))


def test_a_machine_that_shows_nothing(tmp_path: Path, machine: Invented) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    machine.nodes = {0: node(0, distances=(10,))}
    machine.root = empty
    found = um.doctor()
    assert found.kernel.version > (0, 0)  # from uname
    assert (found.thp.enabled, found.memory.swappiness, found.numa.balancing) == (None, None, None)
    assert len(found.findings) == 1  # no THP
    assert "not there" in str(found)


def test_long_lists_of_cpus_are_counted(machine: Invented) -> None:
    machine.nodes[0] = node(0, cpus=tuple(range(0, 128, 2)))
    assert re.search(r"^0     64 of them  128", str(um.doctor()), re.M)


def test_names_cannot_command_a_terminal(machine: Invented) -> None:
    machine.more_limits = [limits.Limit("cgroup /a\x1b[2J", GIB, 0, "echo 1 > /a\x1b[2J\nb")]
    shown = str(um.doctor())
    assert "\x1b" not in shown
    assert r"echo 1 > /a\x1b[2J\nb" in shown


# ---- as data -------------------------------------------------------------------------------


def test_the_document_is_plain_and_whole(machine: Invented) -> None:
    cgroup_memory(machine)
    memlock(machine)
    found = um.doctor()
    document = json.loads(found.to_json())
    assert document == found.to_dict()
    fields = [field.name for field in dataclasses.fields(found)]
    assert list(document) == ["schema", *fields]
    assert document["schema"] == "unimem.doctor/1"
    assert document["pools"]["2m"] == {
        "page_bytes": 2 << 20,
        "total_pages": 100,
        "free_pages": 100,
        "reserved_pages": 0,
        "surplus_most_pages": 0,
        "available_bytes": 200 << 20,
        "cgroups": [],
        "nodes": {
            "0": {"total_pages": 50, "free_pages": 50},
            "1": {"total_pages": 50, "free_pages": 50},
        },
    }
    assert document["memory"]["limits"][2]["room_bytes"] == 7 * GIB
    assert document["numa"]["nodes"]["1"]["distances"] == [21, 10]
    assert document["findings"][0]["run"] == "echo 256G > /sys/fs/cgroup/a/memory.max"


def test_every_key_is_documented(machine: Invented) -> None:
    cgroup_memory(machine)
    memlock(machine)
    quota_v2(machine)
    text = (ROOT / "docs" / "doctor.md").read_text()
    documented = set(re.findall(r"`(\w+)`", text))
    assert sorted(keys(um.doctor().to_dict()) - documented) == []


def keys(value: Any) -> set[str]:
    """Names of all keys; those of nodes, sizes of pools and governors are data."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if not isinstance(value, dict):
        return set()
    found = {key for key in value if not re.fullmatch(r"\d+[mgk]?|performance", key)}
    return found.union(*map(keys, value.values()))


def test_a_machine_cannot_be_changed(machine: Invented) -> None:
    found = um.doctor()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.findings = ()  # type: ignore[misc]


# ---- the machine that the tests run on -----------------------------------------------------


def read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def number(path: str) -> int | None:
    text = read(path)
    return None if text is None else int(text)


def test_the_real_machine_is_as_the_kernel_says() -> None:
    found = um.doctor()
    assert found.kernel.release == os.uname().release
    assert ".".join(map(str, found.kernel.version)) in os.uname().release
    assert found.kernel.architecture == os.uname().machine
    memory = found.memory
    meminfo = dict(re.findall(r"^(\w+): +(\d+)", read("/proc/meminfo") or "", re.M))
    assert memory.total_bytes == int(meminfo["MemTotal"]) * 1024
    assert memory.swap_total_bytes == int(meminfo["SwapTotal"]) * 1024
    assert memory.page_bytes == os.sysconf("SC_PAGE_SIZE")
    assert memory.swappiness == number("/proc/sys/vm/swappiness")
    assert memory.max_map_count == number("/proc/sys/vm/max_map_count")
    assert memory.overcommit_mode == number("/proc/sys/vm/overcommit_memory")
    assert found.numa.balancing == number("/proc/sys/kernel/numa_balancing")
    assert found.numa.zone_reclaim_mode == number("/proc/sys/vm/zone_reclaim_mode")
    assert found.thp.page_bytes == number(f"{THP}/hpage_pmd_size")
    for mode, file in (
        (found.thp.enabled, "enabled"),
        (found.thp.defrag, "defrag"),
        (found.thp.shmem_enabled, "shmem_enabled"),
    ):
        assert f"[{mode}]" in (read(f"{THP}/{file}") or "[None]")
    sizes = {int(re.findall(r"\d+", p.name)[0]) << 10 for p in Path(THP).glob("hugepages-*kB")}
    assert {size.page_bytes for size in found.thp.sizes} == sizes
    assert found.cpu.allowed_threads == len(os.sched_getaffinity(0))
    assert found.cpu.threads == os.cpu_count()
    assert found.cpu.cores <= found.cpu.threads
    assert set(found.cpu.features) <= set((read("/proc/cpuinfo") or "").split())
    assert found.cpu.usable_cores == limits.thread_count()
    assert list(found.pools) == list(limits.huge_pools())
    assert set(found.numa.nodes) == set(limits.nodes())
    assert max(map(len, str(found).splitlines()[:4])) <= 80
