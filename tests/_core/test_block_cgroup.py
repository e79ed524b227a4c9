"""In a cgroup of 512 MB: what would pass it is refused by name, and the process lives."""

from __future__ import annotations

import pytest

from support.kernel.cgroups import SmallCgroup, cgroup_512mb
from support.kernel.huge_pages import no_huge_pages
from support.processes.child_checks import CHECKS
from support.project.tiers import slow_after

__all__ = ["cgroup_512mb", "no_huge_pages"]

# hugetlb pages are not the memory cgroup's.
pytestmark = pytest.mark.usefixtures("no_huge_pages")

BEGIN = (
    CHECKS
    + """
def no_room(use, *parts):
    named = ("does not fit: cgroup ", "has room for", "limit 512.0 MiB")
    error = refused(um.CapacityError, use, *named, *parts)
    assert error.limit == 512 * MIB and error.used < error.limit < error.used + error.asked
    print(error)

"""
)
# What is refused, and how often.
SCRIPTS = {
    "making": """
for options in ({}, {"warm": True}, {"shared": True, "warm": True}, {"pages": "4k", "lock": True}):
    no_room(lambda: um.Block(600 * MIB, name="kv", **options), "block 'kv' of 600.0 MiB")
no_room(lambda: um.Tape(600 * MIB, name="tape"), "block 'tape'")
with um.Block(180 * MIB, pages="4k", warm=True) as block:
    assert block.granted.resident_bytes == 180 * MIB
    with um.Block(200 * MIB, warm=True):
        no_room(block.sealed_copy, "block 'sealed copy of block' of 180.0 MiB")
""",
    "warming": """
with um.Block(300 * MIB, name="a") as a, um.Block(300 * MIB, name="b") as b:
    a.warm()
    no_room(b.warm, "warming block 'b' of 300.0 MiB")
    assert b.verify().resident_bytes == 0
    a.warm()  # it is there already
    b.as_array()[: 80 * MIB] = 1  # with sanitizers the interpreter itself takes 100 and more
    no_room(b.warm, "warming block 'b' of 220.0 MiB")
""",
    "freezing": """
with um.Layout(4096, 300 * MIB, 300 * MIB) as layout:
    for tape in (layout.scratch, layout.history):
        tape.take_bytes(300 * MIB)
    no_room(layout.freeze, "Layout.freeze: warming memory of 600.0 MiB")
    assert not layout.frozen and layout.history.block.verify().resident_bytes == 0
""",
    "growing": """
with um.Block(200 * MIB, reserve=4096 * MIB, warm=True, name="kv") as block:
    address = block.address
    block.commit(300 * MIB)
    no_room(lambda: block.commit(900 * MIB), "growth of block 'kv' of 600.0 MiB")
    assert (block.nbytes, block.address) == (300 * MIB, address)
    block.warm()
    no_room(lambda: block.commit(600 * MIB), "growth of block 'kv' of 300.0 MiB")
    assert block.as_array()[:].nbytes == 300 * MIB
    assert block.release(0, 200 * MIB) == 200 * MIB
    block.commit(300 * MIB)
    block.warm()
    assert block.verify().resident_bytes == 300 * MIB
""",
}


@pytest.mark.parametrize("what", slow_after(1, SCRIPTS))
def test_what_has_no_room(what: str, cgroup_512mb: SmallCgroup) -> None:
    said = cgroup_512mb.run(BEGIN + SCRIPTS[what])
    expected = {"making": 6, "warming": 2, "freezing": 1, "growing": 2}
    assert said.count(cgroup_512mb.name) == expected[what]
