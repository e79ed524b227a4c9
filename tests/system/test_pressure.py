"""Memory pressure: its figures and the watches that announce it."""

from __future__ import annotations

import pytest

from support.kernel.cgroup_tree import Write
from unimem.system import pressure
from unimem.system.pressure import Pressure


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
