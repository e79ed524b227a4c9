"""Disks: which one a file lies on, and where their read-ahead is set, on an invented machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.kernel.invented_machine import Invented
from unimem.system.disk_speed import DiskSpeed, remember
from unimem.system.disks import disk_of, find_disks

# Files beside those of the invented machine, the mount, and what is found of it.
MOUNTS: dict[str, tuple[dict[str, str], str, tuple[str, int | None, str | None]]] = {
    "a whole disk": (
        {"/sys/dev/block/8:0/uevent": "DEVNAME=sda\nDEVTYPE=disk",
         "/sys/block/sda/queue/read_ahead_kb": "4096"},
        "8:0 / /m rw - xfs /dev/sda rw",
        ("sda", 4 << 20, "/sys/block/sda/queue/read_ahead_kb")),
    "a name with a slash": (
        {"/sys/dev/block/104:0/uevent": "DEVNAME=cciss/c0d0\nDEVTYPE=disk",
         "/sys/block/cciss!c0d0/queue/read_ahead_kb": "64"},
        "104:0 / /m rw - ext4 /dev/cciss/c0d0 rw",
        ("cciss/c0d0", 64 << 10, "/sys/block/cciss!c0d0/queue/read_ahead_kb")),
    "btrfs reads ahead by its own setting": (
        {"/sys/class/block/nosuch2/uevent": "DEVNAME=nosuch2\nDEVTYPE=partition",
         "/sys/class/block/uevent": "DEVNAME=nosuch\nDEVTYPE=disk",
         "/sys/fs/btrfs/a/devices/nosuch1": "", "/sys/fs/btrfs/b/devices/nosuch2": "",
         "/sys/fs/btrfs/a/bdi/read_ahead_kb": "1", "/sys/fs/btrfs/b/bdi/read_ahead_kb": "4096",
         "/sys/block/nosuch/queue/read_ahead_kb": "128"},
        "0:35 /home /m rw - btrfs /dev/nosuch2 rw",
        ("nosuch", 4 << 20, "/sys/fs/btrfs/b/bdi/read_ahead_kb")),
    "a server": (
        {"/sys/class/bdi/0:50/read_ahead_kb": "15360"},
        "0:50 / /m rw - nfs4 server:/my\\040models rw",
        ("server:/my models", 15 << 20, "/sys/class/bdi/0:50/read_ahead_kb")),
    "nothing is known": ({}, "0:60 / /m rw - overlay overlay rw", ("overlay", None, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", MOUNTS)
def test_a_disk_has_a_name_and_a_read_ahead(machine: Invented, name: str) -> None:
    texts, mount, expected = MOUNTS[name]
    for path, text in texts.items():
        machine.write(path, text)
    machine.write("/proc/self/mountinfo", f"40 1 {mount}")
    disk = disk_of("/m/model.gguf")
    assert disk is not None
    assert (disk.name, disk.read_ahead_bytes, disk.read_ahead_path) == expected
    assert (disk.mounts, disk.speed) == (("/m",), None)
    assert find_disks() == (() if disk.read_ahead_path is None else (disk,))


def test_the_mount_that_hides_others_counts(machine: Invented) -> None:
    lines = (
        "1 0 254:1 / / rw - ext4 /dev/vda1 rw",
        "2 1 0:50 / /m rw - nfs4 one:/ rw",
        "3 1 0:51 / /m rw - nfs4 two:/ rw",
        "4 1 0:52 / /m\\040x rw - nfs4 three:/ rw",
        "5 1 0:53 / /m/shm rw - tmpfs tmpfs rw",
    )
    machine.write("/proc/self/mountinfo", "\n".join(lines))
    paths = ("/m", "/m/a", "/m x/a", "/mother", "/m/shm/a")
    disks = [disk_of(path) for path in paths]
    names = [None if disk is None else disk.name for disk in disks]
    assert names == ["two:/", "two:/", "three:/", "vda", None]
    machine.write("/proc/self/mountinfo", lines[4])
    assert disk_of("/elsewhere") is None


def test_all_mounts_of_a_disk_are_one(machine: Invented) -> None:
    machine.write(
        "/proc/self/mountinfo",
        "1 0 254:1 / / rw - ext4 /dev/vda1 rw\n2 0 254:1 /etc /mnt/etc rw - ext4 /dev/vda1 rw\n"
        "3 0 254:1 / /snap rw - squashfs /dev/vda1 rw\n4 0 0:9 / /proc rw - proc proc rw",
    )
    (disk,) = find_disks()
    assert (disk.name, disk.mounts, disk.speed) == ("vda", ("/", "/mnt/etc"), None)
    remember("vda", DiskSpeed(123, 456, "2026-11-28"))
    assert [disk.speed for disk in find_disks()] == [DiskSpeed(123, 456, "2026-11-28")]


def test_a_link_leads_to_the_disk_of_its_target(machine: Invented, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/m/model.gguf")
    machine.write(
        "/proc/self/mountinfo",
        "1 0 254:1 / / rw - ext4 /dev/vda1 rw\n2 0 0:50 / /m rw - nfs4 server:/ rw",
    )
    disk = disk_of(tmp_path / "link")
    assert disk is not None
    assert disk.name == "server:/"


def test_disks_of_the_real_machine() -> None:
    for disk in find_disks():
        assert disk.mounts
        if disk.read_ahead_path is not None:
            kib = int(Path(disk.read_ahead_path).read_text())
            assert disk.read_ahead_bytes == kib << 10
            assert os.stat(disk.read_ahead_path).st_uid == 0
