"""The findings of `um.doctor`, each on an invented machine."""

from __future__ import annotations

import dataclasses
import re

import pytest

import unimem as um
from support.kernel.invented_machine import (
    CG,
    CGROUP_MEMORY,
    CONTAINER,
    CPUFREQ,
    GIB,
    MEMLOCK,
    ONE_NODE,
    PMD,
    QUOTA,
    SHM_MOUNT,
    SWAP,
    THP,
    WEIGHTS,
    Change,
    Invented,
    all_of,
    facts,
    files,
    kernel,
    of_2m,
    pool,
    status,
    thp,
    with_node,
    without,
)
from unimem.system import limits


def test_a_good_machine_has_nothing_to_change(machine: Invented) -> None:
    found = um.doctor()
    assert found.findings == ()
    assert str(found).endswith("\n\nNothing to change.")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.findings = ()  # type: ignore[misc]


# The change, its finding and its command, by effect.
NEEDED: dict[str, tuple[Change, str, str]] = {
    "memory of a cgroup": (CGROUP_MEMORY,
        "cgroup /a holds the process to 8.0 GiB", f"echo 256G > {CG}/a/memory.max"),
    "overcommit": (facts(overcommit=2), "vm.overcommit_memory=2", "sysctl vm.overcommit_memory=0"),
    "thp never": (thp(enabled="never"),
        "transparent huge pages are off", f"echo madvise > {THP}/enabled"),
    "thp of the size never": (thp(PMD, enabled="never"),
        "transparent huge pages are off", f"echo madvise > {PMD}/enabled"),
    "no thp": (without(THP), "has no transparent huge pages", "CONFIG_TRANSPARENT_HUGEPAGE=y"),
    "thp disabled": (status(CapEff="1ffffffffff", THP_enabled="0"),
        "disabled for this process", "start it without that call"),
    "quota": (QUOTA, "leaves 2.5 of 4 cores", f"echo max > {CG}/a/cpu.max"),
    "quota of version 1": (
        files(own="3:cpu,cpuacct:/c\n0::/", quota_c="100000", period_c="100000"),
        "leaves 1 of 4 cores", f"echo -1 > {CG}/cpu/c/cpu.cfs_quota_us"),
    "cpuset": (all_of(with_node(1, allowed=False), files(mems_ab="", mems_a="0", mems="0-1")),
        "leaves out node 1", f"echo 0,1 > {CG}/a/cpuset.mems"),
    "cpuset of version 1": (
        all_of(with_node(0, allowed=False), files(own="3:cpuset:/c", mems_c="1", mems_v1="0-1")),
        "leaves out node 0", f"echo 0,1 > {CG}/cpuset/c/cpuset.mems"),
    "cpuset that is not seen": (with_node(1, allowed=False),
        "leaves out node 1", "docker run --cpuset-mems=0,1"),
    "container": (CONTAINER, "may be refused in this container", "docker run --cap-add SYS_NICE"),
    "balancing": (files(balancing="1"),
        "moves pages between nodes", "sysctl kernel.numa_balancing=0"),
    "zone reclaim": (files(zone_reclaim="1"),
        "vm.zone_reclaim_mode=1", "sysctl vm.zone_reclaim_mode=0"),
    "read-ahead": (files(read_ahead="8192"),
        "vda reads 8.0 MiB ahead", "echo 128 > /sys/block/vda/queue/read_ahead_kb"),
    "swap": (SWAP, "vm.swappiness=60", "sysctl vm.swappiness=1"),
    "hugetlb cgroup": (
        of_2m(limits.Limit("hugetlb cgroup /a", 0, 0, f"echo max > {CG}/a/hugetlb.2MB.max"),
              limits.Limit("hugetlb cgroup /", GIB, 0, "echo no")),
        "hugetlb cgroup /a allows 0 B of the pool of 2m pages",
        f"echo max > {CG}/a/hugetlb.2MB.max"),
    "memlock": (facts(memlock=MEMLOCK), "only 8.0 MiB may be locked", "ulimit -l unlimited"),
    "defrag always": (thp(enabled="always", defrag="always"),
        "every page fault may wait", f"echo defer+madvise > {THP}/defrag"),
    "defrag defer": (thp(defrag="defer"),
        "THP defrag=defer", f"echo defer+madvise > {THP}/defrag"),
    "defrag never": (thp(defrag="never"),
        "THP defrag=never", f"echo defer+madvise > {THP}/defrag"),
    "shmem never": (thp(shmem_enabled="never"),
        "shmem_enabled=never", f"echo advise > {THP}/shmem_enabled"),
    "shmem deny": (all_of(thp(PMD, shmem_enabled="always"), thp(shmem_enabled="deny")),
        "shmem_enabled=deny", f"echo advise > {THP}/shmem_enabled"),
    "shmem of the size never": (thp(PMD, shmem_enabled="never"),
        "shmem_enabled=never", f"echo advise > {PMD}/shmem_enabled"),
    "mount of shm": (SHM_MOUNT, "files in /dev/shm", "mount -o remount,huge=advise /dev/shm"),
    "old kernel": (kernel("5.10.0-30-amd64"),
        "Linux 5.10 is older than 6.7", "boot Linux 6.7 or newer"),
    "maps": (files(maps="1000"), "only 1000 mappings", "sysctl vm.max_map_count=262144"),
    "governor": (files(governor="powersave"),
        "powersave", f"tee {CPUFREQ}/policy*/scaling_governor"),
}  # fmt: skip


BALLOON = "/sys/bus/virtio/drivers/virtio_balloon/virtio0/features"
OPTIONAL: dict[str, tuple[Change, str, str]] = {
    "balloon": (lambda m: m.write(BALLOON, "011001"), "the host takes free huge pages back",
        "free-page-reporting=off"),
    "kernel": (kernel("6.1.0-18-amd64"), "Linux 6.1 is older than 6.7", "boot Linux 6.7 or newer"),
    "no weights": (all_of(without(WEIGHTS), files(release="6.8.0-40-generic")),
        "Linux 6.8 is older than 6.9", "boot Linux 6.9 or newer"),
    "no pool": (facts(pools={"2m": pool(2 << 20, 0)}), "no hugetlb pages of 2m",
        "echo 8192 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*NEEDED, *OPTIONAL])
def test_each_fault_is_one_finding(machine: Invented, name: str) -> None:
    change, what, run = (NEEDED | OPTIONAL)[name]
    change(machine)
    found = um.doctor()
    (finding,) = found.findings
    assert what in finding.what
    assert run in finding.run
    assert finding.is_optional == (name in OPTIONAL)
    assert finding.why.endswith(".")
    assert finding.changes
    shown = str(found)
    assert max(map(len, shown.splitlines())) <= 80
    assert ("Nothing to change." in shown) == finding.is_optional
    for part in (finding.what, finding.why, finding.run, finding.changes):
        assert part in " ".join(shown.replace("\\\n", "").split())


HARMLESS: dict[str, Change] = {
    "balloon without reporting": lambda m: m.write(BALLOON, "011000"),
    "thp always": thp(enabled="always"),
    "the size overrides never": all_of(thp(enabled="never"), thp(PMD, enabled="madvise")),
    "defrag always, for those who ask": thp(defrag="always"),
    "shmem force": all_of(SHM_MOUNT, thp(shmem_enabled="force")),
    "shm is no tmpfs": files(mounts="/dev/vda /dev/shm ext4 rw 0 0"),
    "generous quota": files(cpu_a="400000 100000"),
    "container of one node": all_of(CONTAINER, ONE_NODE),
    "one node, balanced": all_of(ONE_NODE, files(balancing="1", zone_reclaim="1")),
    "tiered balancing": files(balancing="2"),
    "read-ahead of an expert": files(read_ahead="1024"),
    "quiet swap": all_of(SWAP, files(swappiness="10")),
    "memlock of all": facts(memlock=limits.Limit("locked memory (memlock)", 256 * GIB, 0, "")),
    "wide hugetlb cgroup": of_2m(limits.Limit("hugetlb cgroup /a", 200 << 20, 0, "echo no")),
    "pool on demand": facts(pools={"2m": pool(2 << 20, 0, surplus_most=10)}),
    "backported weights": files(release="6.8.0-el10"),
    "no cpufreq": without(CPUFREQ),
    "forbidden node without memory": with_node(1, total_bytes=0, allowed=False),
    "new kernel": kernel("7.0.1"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_settings_are_no_finding(machine: Invented, name: str) -> None:
    HARMLESS[name](machine)
    assert um.doctor().findings == ()


def test_old_kernels_lack_later_features(machine: Invented) -> None:
    without(WEIGHTS)(machine)
    since = ["5.14", "6.1", "6.7", "6.9"]
    for i, release in enumerate(("5.13.0", "5.14.0", "6.1.0", "6.7.0")):
        machine.write("/proc/sys/kernel/osrelease", release)
        (finding,) = um.doctor().findings
        assert re.findall(r"\((\d\.\d+)\)", finding.why) == since[i:]


def test_large_pages_are_proposed_on_large_machines(machine: Invented) -> None:
    machine.pools = {"2m": pool(2 << 20, 0), "1g": pool(1 << 30, 0)}
    found = um.doctor().findings
    assert [finding.is_optional for finding in found] == [True, True]
    assert found[1].run.endswith("hugepagesz=1G hugepages=16")
    machine.write("/proc/meminfo", f"MemTotal: {32 << 20} kB")
    (small,) = um.doctor().findings
    assert small.run.startswith("echo 4096 >")  # a fourth of the machine
    machine.write("/proc/meminfo", f"MemTotal: {2 << 20} kB")
    assert um.doctor().findings[0].run.startswith("echo 512 >")


def test_findings_are_sorted_by_effect(machine: Invented) -> None:
    names = (
        "memory of a cgroup|overcommit|thp never|quota|cpuset|balancing|swap|memlock|"
        "shmem never|mount of shm|maps|governor|no pool"
    ).split("|")
    cases = NEEDED | OPTIONAL
    for name in reversed(names):
        cases[name][0](machine)
    found = um.doctor()
    for finding, name in zip(found.findings, names, strict=True):
        assert cases[name][1] in finding.what
    shown = str(found)
    places = [shown.index(f"\n{i}.") for i in range(1, len(names) + 1)]
    assert places == sorted(places)
    assert max(map(len, shown.splitlines())) <= 80
