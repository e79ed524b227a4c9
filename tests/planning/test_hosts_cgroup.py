"""Cgroups of this machine as hosts, on an invented tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.kernel.cgroup_tree import Write, memory, names
from unimem.planning.hosts import CgroupHost


def test_limits_of_a_process_in_another_cgroup(tree: Write, tmp_path: Path) -> None:
    tree("self", "0::/own")
    memory(tree, "/own", 100, 0)
    memory(tree, "/a", 5000, 1000)
    memory(tree, "/a/b", 3000, 500)
    tree("cgroup/a/cpu.max", "150000 50000")
    tree("cgroup/a/cpuset.cpus.effective", "0-3")
    tree("cgroup/a/cpuset.mems.effective", "1")
    host = CgroupHost("/cg/a/b")
    assert [(limit.name, limit.room_bytes) for limit in host.memory_limits()[1:]] == [
        ("cgroup /a/b", 2500),
        ("cgroup /a", 4000),
    ]
    assert host.thread_count() == 3
    assert [node.allowed for node in host.nodes().values()] == [False]
    assert names() == ["cgroup /own"]


def test_a_version_1_cgroup_has_the_same_path_in_each_tree(tree: Write, tmp_path: Path) -> None:
    tree("cgroup/memory/a/memory.limit_in_bytes", 4000)
    tree("cgroup/memory/a/memory.usage_in_bytes", 1000)
    tree("cgroup/cpu/a/cpu.cfs_quota_us", 200)
    tree("cgroup/cpu/a/cpu.cfs_period_us", 100)
    tree("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", 4)
    tree("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 4)
    tree("cgroup/huge/a/hugetlb.2MB.limit_in_bytes", 4 << 20)
    tree("cgroup/huge/a/hugetlb.2MB.usage_in_bytes", 0)
    for folder in ("/cg/memory/a", "/cg/cpu/a"):
        host = CgroupHost(folder)
        (_, own) = host.memory_limits()
        assert (own.name, own.room_bytes) == ("cgroup /a", 3000)
        assert host.thread_count() == 2
        assert host.huge_pools()["2m"].available_bytes == 4 << 20


@pytest.mark.parametrize("folder", ["/cg/none", "/elsewhere", "", "/cg/memory.max"])
def test_invalid_cgroups(tree: Write, folder: str) -> None:
    tree("cgroup/memory.max", "max")
    tree("elsewhere/memory.max", "max")
    with pytest.raises(ValueError, match=r"expected the folder of a cgroup \(trees .*/cg"):
        CgroupHost(folder)
