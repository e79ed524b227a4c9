"""`um.doctor`: every field, on an invented machine and on the real one."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

import unimem as um
from support.kernel.invented_machine import GIB, MODES, THP, Invented, node
from unimem.system import doctor, limits
from unimem.system.disk_speed import DiskSpeed

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


def test_an_arm_machine_with_a_narrow_affinity(machine: Invented) -> None:
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


def test_a_disk_is_measured_and_remembered(
    tmp_path: Path, machine: Invented, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    speed = DiskSpeed(2 << 30, 8 << 30, "2026-11-28")

    def measure(path: str) -> DiskSpeed:
        measured.append(path)
        return speed

    monkeypatch.setattr(doctor, "measure_speed", measure)
    (before,) = um.doctor().disks
    assert (before.name, before.speed, measured) == ("vda", None, [])
    (found,) = um.doctor(disk=tmp_path).disks
    assert (found, measured) == (replace(before, speed=speed), [str(tmp_path)])
    again = um.doctor()
    assert (again.disks, measured) == ((found,), [str(tmp_path)])
    assert "vda: read-ahead 128.0 KiB, direct reads 2.0 GiB/s (2026-11-28)" in str(again)
    machine.write("/proc/self/mountinfo", "1 0 0:60 / / rw - overlay overlay rw")
    (found,) = um.doctor(disk=tmp_path).disks
    assert "\ndisks     overlay: direct reads 2.0 GiB/s (2026-11-28)" in str(um.doctor())


def test_a_path_without_a_disk_is_not_measured(tmp_path: Path, machine: Invented) -> None:
    with pytest.raises(FileNotFoundError, match="nosuch"):
        um.doctor(disk=tmp_path / "nosuch")
    machine.write("/proc/self/mountinfo", "1 0 0:60 / / rw - tmpfs tmpfs rw")
    with pytest.raises(OSError, match="in memory") as caught:
        um.doctor(disk=tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, str(tmp_path))


# ---- the machine that the tests run on -----------------------------------------------------


def read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def number(path: str) -> int | None:
    text = read(path)
    return None if text is None else int(text)


def test_the_real_machine_matches_the_kernel() -> None:
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
