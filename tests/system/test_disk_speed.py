"""Speeds of disks: how they are measured, and that a remembered one is nobody else's."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from unimem.system import disk_speed
from unimem.system.disk_speed import DiskSpeed, measure_speed, recall, remember

MIB = 1 << 20
Patch = pytest.MonkeyPatch
Reads = Counter[tuple[str, int]]  # by file and place


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: Patch) -> Reads:
    """Count the reads; files of a few MiB are large."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no direct reads of temporary files here: {error}")
    monkeypatch.setattr(disk_speed, "_LEAST_BYTES", 2 * MIB)
    monkeypatch.setattr(disk_speed, "_ENOUGH_BYTES", 5 * MIB)
    monkeypatch.setattr(disk_speed, "_MADE_BYTES", 3 * MIB)
    monkeypatch.setattr(disk_speed, "_PASSES", 1)
    found: Reads = Counter()
    preadv = os.preadv

    def count(fd: int, buffers: list[object], offset: int) -> int:
        found[os.readlink(f"/proc/self/fd/{fd}"), offset] += 1
        return preadv(fd, buffers, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", count)
    return found


def make(path: Path, n: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(os.urandom(n * MIB))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)  # else the blocks of the file may not be there yet
    os.close(fd)
    return path


def test_each_place_of_a_given_file_is_read_once(tmp_path: Path, read: Reads) -> None:
    path = make(tmp_path / "model", 4)
    speed = measure_speed(path)
    assert read == {(str(path), i * MIB): 1 for i in range(4)}
    assert speed.bytes_per_second > 0
    assert speed.memory_bytes_per_second > 100 * MIB
    assert date.fromisoformat(speed.measured) <= date.today()


def test_the_amount_has_a_bound(tmp_path: Path, read: Reads, monkeypatch: Patch) -> None:
    monkeypatch.setattr(disk_speed, "_MOST_BYTES", 2 * MIB)
    measure_speed(make(tmp_path / "model", 4))
    assert read.total() == 2


def test_below_a_folder_a_large_file_is_read(tmp_path: Path, read: Reads) -> None:
    make(tmp_path / "small", 1)
    with open(tmp_path / "holes", "wb") as file:
        file.truncate(64 * MIB)
    path = make(tmp_path / "below" / "large", 3)
    (tmp_path / "link").symlink_to(path)
    measure_speed(tmp_path)
    assert {name for name, _ in read} == {str(path)}


def test_without_one_a_temporary_file_is(tmp_path: Path, read: Reads) -> None:
    path = make(tmp_path / "small", 1)
    for given in (path, tmp_path):
        read.clear()
        measure_speed(given)
        (name,) = {name for name, _ in read}
        assert name.startswith(str(tmp_path))
        assert name != str(path)
        assert read.total() == 3
        assert os.listdir(tmp_path) == ["small"]


def test_errors_name_the_path(tmp_path: Path, read: Reads, monkeypatch: Patch) -> None:
    path = make(tmp_path / "model", 3)
    with pytest.raises(FileNotFoundError, match="nosuch"):
        measure_speed(tmp_path / "nosuch")
    for number, text in ((errno.EINVAL, "O_DIRECT"), (errno.EIO, "Input/output error")):

        def fail(fd: int, buffers: object, offset: int, number: int = number) -> int:
            raise OSError(number, "")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(OSError, match=text) as caught:
            measure_speed(path)
        assert (caught.value.errno, caught.value.filename) == (number, str(path))


def test_it_is_remembered_for_a_machine(cache: Path, monkeypatch: Patch) -> None:
    speed = DiskSpeed(2_500_000_000, 12_000_000_000, "2026-11-28")
    assert recall("vda") is None
    remember("vda", speed)
    remember("server:/models/" + "x" * 300, speed)
    assert (recall("vda"), recall("vdb")) == (speed, None)
    assert recall("server:/models/" + "x" * 300) == speed
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("", "another", "", "", "")))
    assert recall("vda") is None


def test_nothing_is_kept_without_a_cache(monkeypatch: Patch) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", "off")
    remember("vda", DiskSpeed(1, 2, "2026-11-28"))
    assert recall("vda") is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", {"bytes_per_second": 0}, {"bytes_per_second": "1"},
     {"memory_bytes_per_second": None}, {"measured": "today"}, {"measured": 2}],
)  # fmt: skip
def test_a_damaged_memory_is_none(cache: Path, text: Any) -> None:
    remember("vda", DiskSpeed(1, 2, "2026-11-28"))
    (path,) = (cache / "disks").iterdir()
    good = {"bytes_per_second": 1, "memory_bytes_per_second": 2, "measured": "2026-11-28"}
    assert json.loads(path.read_text()) == good
    path.write_text(text if isinstance(text, str) else json.dumps(good | text))
    assert recall("vda") is None


def test_a_folder_of_others_is_not_believed(cache: Path) -> None:
    remember("vda", DiskSpeed(1, 2, "2026-11-28"))
    (cache / "disks").chmod(0o777)
    assert recall("vda") is None
    with pytest.raises(PermissionError):
        remember("vda", DiskSpeed(2, 3, "2026-11-28"))
