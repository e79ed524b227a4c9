"""The watches of memory pressure, on this machine and in an invented cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unimem.system import pressure
from unimem.system.cgroups import Cgroup
from unimem.system.pressure import Notice


def test_the_watches_of_this_machine() -> None:
    watches, refusals = pressure.open_watches()
    try:
        names = [f"{watch.source}: {watch.name}" for watch in watches]
        assert all(": " in text for text in names + refusals)
        if os.access("/proc/pressure/memory", os.W_OK):
            assert "machine: /proc/pressure/memory" in names
    finally:
        for watch in watches:
            watch.close()
            watch.close()


def test_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Cgroup(str(tmp_path), "/a", 2)
    events = tmp_path / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 3\noom 0\noom_kill 0\n")
    (tmp_path / "memory.pressure").write_text("")
    monkeypatch.setattr(pressure, "_MACHINE", str(tmp_path / "none"))
    monkeypatch.setattr(pressure, "cgroups_above", lambda name: iter([group]))
    watches, refusals = pressure.open_watches()
    trigger, counts = watches
    assert refusals == []
    # The kernel's trigger format: "some", microseconds of stalling, microseconds of a window.
    kind, stall, window = (tmp_path / "memory.pressure").read_text().rstrip("\0").split()
    assert (kind, 0 < int(stall) < int(window)) == ("some", True)
    told = trigger.read()
    assert told is not None
    assert told.is_pressure
    assert counts.read() is None
    events.write_text("low 0\nhigh 2\nmax 9\noom 0\noom_kill 0\n")
    assert counts.read() == Notice("cgroup /a", "memory.events: high +2, max +6", False)
    events.write_text("low 0\nhigh 2\nmax 9\noom 1\noom_kill 0\n")
    told = counts.read()
    assert told is not None
    assert told.is_pressure
    for watch in watches:
        watch.close()


def test_unusable_watches_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.pressure").mkdir()  # which not even root can open for writing
    monkeypatch.setattr(pressure, "_MACHINE", str(tmp_path / "none"))
    group = Cgroup(str(tmp_path), "/a", 2)
    monkeypatch.setattr(pressure, "cgroups_above", lambda name: iter([group]))
    assert pressure.open_watches() == ([], ["cgroup /a: memory.pressure: Is a directory"])
