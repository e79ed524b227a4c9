"""Limits: what the machine and the cgroups above a process leave to it, on invented trees."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest

from unimem import limits

Write = Callable[[str, object], None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write files of /sys/fs/cgroup, of /sys/devices/system/cpu and /proc/self/cgroup."""
    real = limits._read

    def read(path: Path) -> str | None:
        return real(tmp_path / "self" if str(path) == "/proc/self/cgroup" else path)

    monkeypatch.setattr(limits, "_CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(limits, "_read", read)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def write(name: str, content: object) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")

    return write


def test_without_cgroups(tree: Write) -> None:
    assert limits.available_bytes() == 10_000
    assert limits.thread_count() == 8


def test_version_2_takes_the_least_room_above(tree: Write) -> None:
    tree("self", "0::/a/b")
    tree("cgroup/a/b/memory.max", "max")
    tree("cgroup/a/b/memory.current", 100)
    tree("cgroup/a/memory.max", 5000)
    tree("cgroup/a/memory.current", 2000)
    tree("cgroup/a/memory.stat", "anon 1200\ninactive_file 300\nslab 7")
    assert limits.available_bytes() == 3300
    tree("cgroup/a/b/memory.max", 1000)
    assert limits.available_bytes() == 900
    tree("cgroup/a/memory.current", 9000)
    assert limits.available_bytes() == 0


def test_version_1(tree: Write) -> None:
    tree("self", "7:memory:/a\n3:cpu,cpuacct:/c\n0::/")
    tree("cgroup/memory/a/memory.limit_in_bytes", 4000)
    tree("cgroup/memory/a/memory.usage_in_bytes", 1500)
    tree("cgroup/memory/a/memory.stat", "total_inactive_file 500")
    tree("cgroup/memory/memory.limit_in_bytes", 2**63 - 4096)
    tree("cgroup/memory/memory.usage_in_bytes", 10)
    tree("cgroup/cpu/c/cpu.cfs_quota_us", 250_000)
    tree("cgroup/cpu/c/cpu.cfs_period_us", 100_000)
    assert limits.available_bytes() == 3000
    assert limits.thread_count() == 2
    tree("cgroup/cpu/c/cpu.cfs_quota_us", -1)
    assert limits.thread_count() == 8


def test_the_quota_of_version_2(tree: Write) -> None:
    tree("self", "0::/a/b")
    tree("cgroup/a/b/cpu.max", "max 100000")
    assert limits.thread_count() == 8
    tree("cgroup/a/cpu.max", "350000 100000")
    assert limits.thread_count() == 3
    tree("cgroup/a/b/cpu.max", "10000 100000")
    assert limits.thread_count() == 1


def test_threads_of_one_core_count_once(tree: Write) -> None:
    for cpu in range(8):
        tree(f"cpu/cpu{cpu}/topology/physical_package_id", cpu // 4)
        tree(f"cpu/cpu{cpu}/topology/core_id", cpu % 2)
    assert limits.thread_count() == 4


def test_this_machine() -> None:
    assert 0 < limits.available_bytes() <= psutil.virtual_memory().total
    assert 1 <= limits.thread_count() <= len(os.sched_getaffinity(0))
