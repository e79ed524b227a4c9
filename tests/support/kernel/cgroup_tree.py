"""An invented tree of cgroups and of other files of the kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unimem.base import kernel_files
from unimem.system import cgroups, limits

Write = Callable[[str, object], None]
V2 = "30 20 0:25 / /cg rw - cgroup2 cgroup2 rw\n"
V1 = (
    "31 20 0:26 / /cg/memory rw - cgroup cgroup rw,memory\n"
    "32 20 0:27 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 20 0:28 / /cg/huge rw - cgroup cgroup rw,hugetlb\n"
)
MEMINFO = "MemTotal: 20 kB\nMemFree: 5 kB\nMemAvailable: 10 kB\nHugepagesize: 2048 kB"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write files as the process would see them, cgroups under /cg; all others are absent."""
    for name in ("read_text", "list_names", "is_folder"):
        real = getattr(kernel_files, name)
        monkeypatch.setattr(kernel_files, name, lambda path, real=real: real(f"{tmp_path}{path}"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    cgroups._mounts.cache_clear()
    limits.core_of.cache_clear()

    def write(name: str, content: object) -> None:
        short = {"self": "proc/self/cgroup", "cgroup": "cg", "cpu": "sys/devices/system/cpu"}
        first, slash, rest = name.partition("/")
        path = tmp_path / f"{short.get(first, first)}{slash}{rest}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")

    write("proc/self/mountinfo", V2 + V1)
    write("proc/meminfo", MEMINFO)
    yield write
    cgroups._mounts.cache_clear()
    limits.core_of.cache_clear()


def memory(tree: Write, cgroup: str, most: object, used: int, **more: object) -> None:
    """Write the files of a cgroup of version 2."""
    for name, content in {"max": most, "current": used, **more}.items():
        tree(f"cgroup{cgroup}/memory.{name}", content)


def names(pid: int | None = None) -> list[str]:
    """The cgroups that limit a process."""
    return [limit.name for limit in limits.memory_limits(pid)[1:]]
