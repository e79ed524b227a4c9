"""In a cgroup of 512 MB: what would pass it is refused by name, and the process lives."""

from __future__ import annotations

import pytest

from cgroups import SmallCgroup, cgroup_512mb
from huge_pages import no_huge_pages

__all__ = ["cgroup_512mb", "no_huge_pages"]

# hugetlb pages are not the memory cgroup's.
pytestmark = pytest.mark.usefixtures("no_huge_pages")

CHECK = """
import unimem as um
from unimem._core.status import ledger

MIB = 1 << 20

def refused(use, *parts):
    before = ledger()["other"]["mapped_bytes"]
    try:
        use()
    except um.CapacityError as error:
        for part in ("does not fit: cgroup ", "has room for", "limit 512.0 MiB", *parts):
            assert part in str(error), (part, str(error))
        assert error.limit == 512 * MIB and error.used < error.limit < error.used + error.asked
        print(error)
    else:
        raise AssertionError("no CapacityError")
    assert ledger()["other"]["mapped_bytes"] == before
"""


def test_a_block(cgroup_512mb: SmallCgroup) -> None:
    said = cgroup_512mb.run(
        CHECK
        + """
for options in ({}, {"warm": True}, {"shared": True, "warm": True}, {"pages": "4k", "lock": True}):
    refused(lambda: um.Block(600 * MIB, name="kv", **options), "block 'kv' of 600.0 MiB")
refused(lambda: um.Tape(600 * MIB, name="tape"), "block 'tape'")
with um.Block(180 * MIB, pages="4k", warm=True) as block:
    assert block.granted.resident_bytes == 180 * MIB
    with um.Block(200 * MIB, warm=True):
        refused(block.sealed_copy, "block 'sealed copy of block' of 180.0 MiB")
"""
    )
    assert said.count(cgroup_512mb.name) == 6


def test_warming(cgroup_512mb: SmallCgroup) -> None:
    said = cgroup_512mb.run(
        CHECK
        + """
with um.Block(300 * MIB, name="a") as a, um.Block(300 * MIB, name="b") as b:
    a.warm()
    refused(b.warm, "warming block 'b' of 300.0 MiB")
    assert b.verify().resident_bytes == 0
    a.warm()  # it is there already
    b.as_array()[: 80 * MIB] = 1  # with sanitizers the interpreter itself takes 100 and more
    refused(b.warm, "warming block 'b' of 220.0 MiB")
"""
    )
    assert said.count(cgroup_512mb.name) == 2


def test_a_growth_step(cgroup_512mb: SmallCgroup) -> None:
    said = cgroup_512mb.run(
        CHECK
        + """
with um.Block(200 * MIB, reserve=4096 * MIB, warm=True, name="kv") as block:
    address = block.address
    block.commit(300 * MIB)
    refused(lambda: block.commit(900 * MIB), "growth of block 'kv' of 600.0 MiB")
    assert (block.nbytes, block.address) == (300 * MIB, address)
    block.warm()
    refused(lambda: block.commit(600 * MIB), "growth of block 'kv' of 300.0 MiB")
    assert block.as_array()[:].nbytes == 300 * MIB
    assert block.release(0, 200 * MIB) == 200 * MIB
    block.commit(300 * MIB)
    block.warm()
    assert block.verify().resident_bytes == 300 * MIB
"""
    )
    assert said.count(cgroup_512mb.name) == 2
