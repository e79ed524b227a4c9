"""Memory pressure and pages read, on invented trees and on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unimem.system import cgroups, kernel_files, pressure
from unimem.system.pressure import Pressure

Write = Callable[[str, str], None]

PSI = (
    "some avg10={some} avg60=0.02 avg300=0.00 total=12121074\n"
    "full avg10={full} avg60=0.01 avg300=0.00 total=4594278\n"
)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write files as the process would see them; all others are absent."""
    real = kernel_files.read_text
    monkeypatch.setattr(kernel_files, "read_text", lambda path: real(f"{tmp_path}{path}"))
    cgroups._mounts.cache_clear()

    def write(name: str, content: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    write("proc/self/mountinfo", "30 20 0:25 / /cg rw - cgroup2 cgroup2 rw\n")
    yield write
    cgroups._mounts.cache_clear()


def test_of_the_machine_and_of_the_own_cgroup(tree: Write) -> None:
    tree("proc/pressure/memory", PSI.format(some="1.50", full="0.25"))
    tree("proc/7/cgroup", "4:memory:/elsewhere\n0::/a/b\n")
    tree("cg/a/memory.pressure", PSI.format(some="9.00", full="9.00"))
    tree("cg/a/b/cgroup.type", "domain\n")
    tree("cg/a/b/memory.pressure", PSI.format(some="99.10", full="40.00"))
    assert pressure.memory_pressure(7) == (
        Pressure("machine", 1.5, 0.25),
        Pressure("cgroup /a/b", 99.1, 40.0),
    )


def test_of_a_container_whose_cgroup_is_its_root(tree: Write) -> None:
    tree("proc/pressure/memory", PSI.format(some="1.50", full="0.25"))
    tree("proc/self/cgroup", "0::/\n")
    tree("cg/cgroup.type", "domain threaded\n")
    tree("cg/memory.pressure", PSI.format(some="99.10", full="40.00"))
    assert pressure.memory_pressure()[1:] == (Pressure("cgroup /", 99.1, 40.0),)


@pytest.mark.parametrize("own", ["0::/\n", "0::/a/b\n", "4:memory:/a\n", ""])
def test_of_the_machine_alone(tree: Write, own: str) -> None:
    """The root's is the machine's; with cgroup.pressure at 0 there is no file."""
    tree("proc/pressure/memory", PSI.format(some="0.00", full="0.00"))
    tree("cg/memory.pressure", PSI.format(some="0.00", full="0.00"))
    tree("proc/self/cgroup", own)
    assert pressure.memory_pressure() == (Pressure("machine", 0.0, 0.0),)


def test_a_kernel_that_counts_none(tree: Write) -> None:
    assert pressure.memory_pressure() == ()
    assert pressure.paged_in_bytes() is None


def test_pages_read_are_bytes(tree: Write) -> None:
    tree("proc/vmstat", "nr_free_pages 5\npgpgin 12\npgpgout 9\n")
    assert pressure.paged_in_bytes() == 12 << 10


def test_this_machine() -> None:
    found = pressure.memory_pressure()
    if not found:
        pytest.skip("this kernel counts no memory pressure (CONFIG_PSI, psi=1)")
    machine = found[0]
    assert machine.source == "machine"
    assert 0 <= machine.full_percent <= machine.some_percent <= 100
    assert (pressure.paged_in_bytes() or 0) > 0
