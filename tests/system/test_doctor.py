"""`um.doctor`: each finding on an invented machine, and every field on the real one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.project.checkout import ROOT
from unimem.base import kernel_files
from unimem.system import cgroups, limits

GIB = 1 << 30
THP = "/sys/kernel/mm/transparent_hugepage"
PMD = f"{THP}/hugepages-2048kB"
WEIGHTS = "/sys/kernel/mm/mempolicy/weighted_interleave"
CPUFREQ = "/sys/devices/system/cpu/cpufreq"


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
    "32 1 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset",
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


# ---- what it finds -------------------------------------------------------------------------


def test_a_machine_that_serves_well_has_nothing_to_change(machine: Invented) -> None:
    found = um.doctor()
    assert found.findings == ()
    assert str(found).endswith("\n\nNothing to change.")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.findings = ()  # type: ignore[misc]


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
SWAP = files(meminfo=f"MemTotal: {256 << 20} kB\nSwapTotal: 8388608 kB\nSwapFree: 0 kB")
SHM_MOUNT = files(mounts="tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0")
MEMLOCK = limits.Limit("locked memory (memlock)", 8 << 20, 0, "raise it")
CGROUP_MEMORY = facts(more_limits=[
    limits.Limit("cgroup /a/b", 300 * GIB, 0, "echo no"),
    limits.Limit("cgroup /a", 8 * GIB, GIB, f"echo 256G > {CG}/a/memory.max"),
])  # fmt: skip
QUOTA = files(cpu_ab="max 100000", cpu_a="250000 100000")

# What is changed, what is found, and what to run, by their effect.
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
OPTIONAL: dict[str, tuple[Change, str, str]] = {
    "kernel": (kernel("6.1.0-18-amd64"), "Linux 6.1 is older than 6.7", "boot Linux 6.7 or newer"),
    "no weights": (all_of(without(WEIGHTS), files(release="6.8.0-40-generic")),
        "Linux 6.8 is older than 6.9", "boot Linux 6.9 or newer"),
    "no pool": (facts(pools={"2m": pool(2 << 20, 0)}), "no hugetlb pages of 2m",
        "echo 8192 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*NEEDED, *OPTIONAL])
def test_one_thing_amiss_is_one_finding(machine: Invented, name: str) -> None:
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
    "thp always": thp(enabled="always"),
    "the size overrides never": all_of(thp(enabled="never"), thp(PMD, enabled="madvise")),
    "defrag always, for those who ask": thp(defrag="always"),
    "shmem force": all_of(SHM_MOUNT, thp(shmem_enabled="force")),
    "shm is no tmpfs": files(mounts="/dev/vda /dev/shm ext4 rw 0 0"),
    "generous quota": files(cpu_a="400000 100000"),
    "container of one node": all_of(CONTAINER, ONE_NODE),
    "one node, balanced": all_of(ONE_NODE, files(balancing="1", zone_reclaim="1")),
    "tiered balancing": files(balancing="2"),
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
def test_what_does_no_harm_is_no_finding(machine: Invented, name: str) -> None:
    HARMLESS[name](machine)
    assert um.doctor().findings == ()


def test_kernels_lack_what_came_later(machine: Invented) -> None:
    without(WEIGHTS)(machine)
    since = ["5.14", "6.1", "6.7", "6.9"]
    for i, release in enumerate(("5.13.0", "5.14.0", "6.1.0", "6.7.0")):
        machine.write("/proc/sys/kernel/osrelease", release)
        (finding,) = um.doctor().findings
        assert re.findall(r"\((\d\.\d+)\)", finding.why) == since[i:]


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
    names = (
        "memory of a cgroup",
        "overcommit",
        "thp never",
        "quota",
        "cpuset",
        "balancing",
        "swap",
        "memlock",
        "shmem never",
        "mount of shm",
        "maps",
        "governor",
        "no pool",
    )
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


def test_an_arm_machine_whose_affinity_narrows_the_cores(machine: Invented) -> None:
    machine.status(CapEff="0", Cpus_allowed_list="0-1,4-5")
    machine.write("/proc/cpuinfo", "processor : 0\nFeatures : fp asimd asimddp i8mm sve")
    cpu = um.doctor().cpu
    assert (cpu.allowed_threads, cpu.allowed_cores, cpu.cores) == (4, 2, 4)
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
    CGROUP_MEMORY(machine)
    facts(memlock=MEMLOCK)(machine)
    found = um.doctor()
    document = json.loads(found.to_json())
    assert document == found.to_dict()
    assert list(document) == ["schema", *[field.name for field in dataclasses.fields(found)]]
    assert document["schema"] == "unimem.doctor/1"
    pages = {"total_pages": 100, "free_pages": 100, "reserved_pages": 0, "surplus_most_pages": 0}
    assert document["pools"]["2m"] == pages | {
        "page_bytes": 2 << 20,
        "available_bytes": 200 << 20,
        "cgroups": [],
        "nodes": {node: {"total_pages": 50, "free_pages": 50} for node in "01"},
    }
    assert document["memory"]["limits"][2]["room_bytes"] == 7 * GIB
    assert document["numa"]["nodes"]["1"]["distances"] == [21, 10]
    assert document["findings"][0]["run"] == "echo 256G > /sys/fs/cgroup/a/memory.max"


def test_every_key_is_documented(machine: Invented) -> None:
    CGROUP_MEMORY(machine)
    facts(memlock=MEMLOCK)(machine)
    QUOTA(machine)
    text = (ROOT / "docs" / "doctor.md").read_text()
    assert sorted(keys(um.doctor().to_dict()) - set(re.findall(r"`(\w+)`", text))) == []


def keys(value: Any) -> set[str]:
    """Names of all keys; those of nodes, sizes of pools and governors are data."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if not isinstance(value, dict):
        return set()
    found = {key for key in value if not re.fullmatch(r"\d+[mgk]?|performance", key)}
    return found.union(*map(keys, value.values()))


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
    for name in MODES:
        assert f"[{getattr(found.thp, name)}]" in (read(f"{THP}/{name}") or "[None]")
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
