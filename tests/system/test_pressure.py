"""Memory pressure: its figures and the watches that announce it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.kernel.cgroup_tree import Write
from unimem.system import pressure
from unimem.system.cgroups import Cgroup
from unimem.system.pressure import Notice, Pressure


def psi(some: str, full: str) -> str:
    return "\n".join(
        f"{name} avg10={figure} avg60=0.02 avg300=0.00 total=12121074"
        for name, figure in (("some", some), ("full", full))
    )


@pytest.mark.parametrize(
    ("own", "folder", "name"),
    [
        ("4:memory:/elsewhere\n0::/a/b\n", "cgroup/a/b", "cgroup /a/b"),
        ("0::/\n", "cgroup", "cgroup /"),  # of a container, whose root is a cgroup
    ],
)
def test_pressure_of_the_machine_and_of_the_own_cgroup(
    tree: Write, own: str, folder: str, name: str
) -> None:
    tree("proc/pressure/memory", psi("1.50", "0.25"))
    tree("proc/7/cgroup", own)
    tree("cgroup/a/memory.pressure", psi("9.00", "9.00"))
    tree(f"{folder}/cgroup.type", "domain threaded\n")
    tree(f"{folder}/memory.pressure", psi("99.10", "40.00"))
    found = pressure.memory_pressure(7)
    assert found == (Pressure("machine", 1.5, 0.25), Pressure(name, 99.1, 40.0))


@pytest.mark.parametrize("own", ["0::/\n", "0::/a/b\n", "4:memory:/a\n", ""])
def test_pressure_of_the_machine_alone(tree: Write, own: str) -> None:
    """The root cgroup has the machine's pressure; with cgroup.pressure at 0 the file is missing."""
    tree("proc/pressure/memory", psi("0.00", "0.00"))
    tree("cgroup/memory.pressure", psi("0.00", "0.00"))
    tree("proc/self/cgroup", own)
    assert pressure.memory_pressure() == (Pressure("machine", 0.0, 0.0),)


def test_page_ins_are_bytes_if_the_kernel_counts_them(tree: Write) -> None:
    assert pressure.memory_pressure() == ()
    assert pressure.paged_in_bytes() is None
    tree("proc/vmstat", "nr_free_pages 5\npgpgin 12\npgpgout 9\n")
    assert pressure.paged_in_bytes() == 12 << 10


def test_the_pressure_of_this_machine() -> None:
    found = pressure.memory_pressure()
    if not found:
        pytest.skip("this kernel counts no memory pressure (CONFIG_PSI, psi=1)")
    machine = found[0]
    assert machine.source == "machine"
    assert 0 <= machine.full_percent <= machine.some_percent <= 100
    assert (pressure.paged_in_bytes() or 0) > 0


# ---- watches ----


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
