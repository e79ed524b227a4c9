"""What this process may have: memory and CPUs. The only place that asks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

__all__ = ["available_bytes", "thread_count"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_NO_LIMIT = 1 << 60  # version 1 writes "none" as a number near 2**63


def available_bytes() -> int:
    """Bytes that this process can take without anything being swapped out or killed.

    Returns
    -------
    int
        The least of the system's available memory and the room in each memory cgroup above the
        process, version 1 or 2. File pages that can be dropped count as room.
    """
    room = int(psutil.virtual_memory().available)
    for folder, version in _cgroups("memory"):
        if version == 2:
            limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
            droppable = "inactive_file"
        else:
            limit = _number(folder / "memory.limit_in_bytes")
            used = _number(folder / "memory.usage_in_bytes")
            droppable = "total_inactive_file"
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        stat = _read(folder / "memory.stat") or ""
        fields = dict(line.split() for line in stat.splitlines() if line.count(" ") == 1)
        room = min(room, max(0, limit - used + int(fields.get(droppable, 0))))
    return room


def thread_count() -> int:
    """Threads that can compute at the same time.

    Returns
    -------
    int
        Physical cores that the process's CPU affinity allows, and not more than the CPU quota of
        any cgroup above it; at least 1.
    """
    cores = {_core(cpu) for cpu in os.sched_getaffinity(0)}
    count = float(len(cores))
    for folder, version in _cgroups("cpu"):
        if version == 2:
            quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
        else:
            quota = _read(folder / "cpu.cfs_quota_us") or ""
            period = _read(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            count = min(count, int(quota) / int(period))
    return max(1, int(count))


def _core(cpu: int) -> tuple[str, str]:
    topology = _CPUS / f"cpu{cpu}" / "topology"
    package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
    # Without a known topology each CPU counts as a core.
    return (package or "", core) if core else ("cpu", str(cpu))


def _cgroups(controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of the cgroups above this process, from its own up, and their version."""
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, names, path = line.split(":", 2)
        if not names:
            root, version = _CGROUP_ROOT, 2
        elif controller in names.split(","):
            root, version = _CGROUP_ROOT / controller, 1
        else:
            continue
        # In a container the path may be the host's, which is not visible: what exists is ours.
        folder = root / path.lstrip("/")
        yield from ((f, version) for f in (folder, *folder.parents) if f.is_relative_to(root))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None
