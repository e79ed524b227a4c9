"""The disks below file systems: how far the kernel reads ahead, and their measured speed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from unimem.base import kernel_files
from unimem.system.disk_speed import DiskSpeed, recall

_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk, or a server, with a mounted file system.

    Attributes
    ----------
    name : str
        The kernel's name of the whole disk, or the source of the mount.
    mounts : tuple of str
        Mount points of its file systems.
    read_ahead_bytes : int or None
        How much a page fault in a mapped file may read; None if unknown.
    read_ahead_path : str or None
        The file that sets it, in KiB.
    speed : DiskSpeed or None
        The remembered speed of direct reads; None before ``doctor(disk=...)``.
    """

    name: str
    mounts: tuple[str, ...]
    read_ahead_bytes: int | None
    read_ahead_path: str | None
    speed: DiskSpeed | None


class _Mount(NamedTuple):
    device: str
    point: str
    kind: str
    source: str


def find_disks() -> tuple[Disk, ...]:
    """Find the disks whose read-ahead or speed is known, in the order of their mounting."""
    found: dict[str, list[_Mount]] = {}
    for mount in _mounts():
        if mount.kind != "squashfs":  # images of packages
            found.setdefault(_whole_disk(mount) or mount.source, []).append(mount)
    disks = (_describe(mounts) for mounts in found.values())
    return tuple(disk for disk in disks if disk.read_ahead_path or disk.speed)


def disk_of(path: str | os.PathLike[str]) -> Disk | None:
    """Return the disk that a file or folder lies on; None if it is in memory, or unknown."""
    real = os.path.realpath(path)
    above = [m for m in _mounts() if real == m.point or real.startswith(m.point.rstrip("/") + "/")]
    if not above:
        return None
    longest = max(len(mount.point) for mount in above)
    mount = [mount for mount in above if len(mount.point) == longest][-1]  # it hides those before
    return None if mount.kind in _IN_MEMORY else _describe([mount])


def _mounts() -> Iterator[_Mount]:
    for line in (kernel_files.read_text("/proc/self/mountinfo") or "").splitlines():
        head, _, tail = line.partition(" - ")
        _, _, device, _, point, *_ = head.split()
        kind, source, *_ = tail.split()
        yield _Mount(device, _unescape(point), kind, _unescape(source))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _describe(mounts: list[_Mount]) -> Disk:
    mount = mounts[0]
    disk = _whole_disk(mount)
    name = disk or mount.source
    for path in _read_ahead_paths(mount, disk):
        kib = kernel_files.read_number(path)
        if kib is not None:
            break
    else:
        kib, path = None, None
    points = tuple(dict.fromkeys(mount.point for mount in mounts))
    return Disk(name, points, None if kib is None else kib << 10, path, recall(name))


def _whole_disk(mount: _Mount) -> str | None:
    """Return the name of the disk that a file system lies on, also if that is a part of it."""
    places = [f"/sys/dev/block/{mount.device}"]
    if mount.source.startswith("/dev/"):  # btrfs has devices of its own
        places.append(f"/sys/class/block/{os.path.basename(os.path.realpath(mount.source))}")
    for place in places:
        facts = kernel_files.read_fields(f"{place}/uevent", "=")
        if facts.get("DEVTYPE") == "partition":
            facts = kernel_files.read_fields(f"{place}/../uevent", "=")
        if "DEVNAME" in facts:
            return facts["DEVNAME"]
    return None


def _read_ahead_paths(mount: _Mount, disk: str | None) -> Iterator[str]:
    """Yield the files that may set the read-ahead of a file system; the first that exists does."""
    if mount.kind == "btrfs":
        device = os.path.basename(os.path.realpath(mount.source))
        for uuid in kernel_files.list_names("/sys/fs/btrfs"):
            if device in kernel_files.list_names(f"/sys/fs/btrfs/{uuid}/devices"):
                yield f"/sys/fs/btrfs/{uuid}/bdi/read_ahead_kb"
    elif disk is not None:
        # A file system of its own queue; the name of a folder has no slash.
        yield f"/sys/block/{disk.replace('/', '!')}/queue/read_ahead_kb"
    yield f"/sys/class/bdi/{mount.device}/read_ahead_kb"
