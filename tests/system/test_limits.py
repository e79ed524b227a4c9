"""Limits: what the machine and the cgroups above a process leave to it, on invented trees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unimem.errors import CapacityError
from unimem.system import cgroups, kernel_files, limits

Write = Callable[[str, object], None]

V2 = "30 20 0:25 / /cg rw - cgroup2 cgroup2 rw\n"
V1 = (
    "31 20 0:26 / /cg/memory rw - cgroup cgroup rw,memory\n"
    "32 20 0:27 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 20 0:28 / /cg/huge rw - cgroup cgroup rw,hugetlb\n"
)
MEMINFO = "MemTotal: 20 kB\nMemFree: 5 kB\nMemAvailable: 10 kB\nHugepagesize: 2048 kB"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write files as the process would see them, cgroups under /cg; all others are absent."""
    for name in ("read_text", "list_names"):
        real = getattr(kernel_files, name)
        monkeypatch.setattr(kernel_files, name, lambda path, real=real: real(f"{tmp_path}{path}"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    cgroups._mounts.cache_clear()
    limits.core_of.cache_clear()

    def write(name: str, content: object) -> None:
        short = {"self": "proc/self/cgroup", "cgroup": "cg", "cpu": "sys/devices/system/cpu"}
        first, slash, rest = name.partition("/")
        path = tmp_path / f"{short.get(first, first)}{slash}{rest}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")

    write("proc/self/mountinfo", V2 + V1)
    write("proc/meminfo", MEMINFO)
    yield write
    cgroups._mounts.cache_clear()
    limits.core_of.cache_clear()


def test_without_cgroups(tree: Write) -> None:
    assert limits.available_bytes() == 10 << 10
    assert limits.thread_count() == 8
    (machine,) = limits.memory_limits()
    assert (machine.name, machine.limit_bytes) == ("memory of the machine", 20 << 10)


def test_without_proc(tree: Write, tmp_path: Path) -> None:
    (tmp_path / "proc/meminfo").unlink()
    (machine,) = limits.memory_limits()
    assert 0 < machine.room_bytes <= machine.limit_bytes


def test_version_2_takes_the_least_room_above(tree: Write) -> None:
    tree("self", "0::/a/b")
    tree("cgroup/a/b/memory.max", "max")
    tree("cgroup/a/b/memory.current", 100)
    tree("cgroup/a/memory.max", 5000)
    tree("cgroup/a/memory.current", 2000)
    tree("cgroup/a/memory.stat", "anon 1200\ninactive_file 300\nslab 7")
    assert limits.available_bytes() == 3300
    assert limits.tightest().name == "cgroup /a"
    tree("cgroup/a/b/memory.max", 1000)
    assert limits.available_bytes() == 900
    tree("cgroup/a/memory.current", 9000)
    assert limits.available_bytes() == 0


def test_limits_of_another_process(tree: Write) -> None:
    tree("self", "0::/a")
    tree("proc/7/cgroup", "0::/b")
    for name, room in (("a", 3000), ("b", 2000)):
        tree(f"cgroup/{name}/memory.max", room)
        tree(f"cgroup/{name}/memory.current", 0)
    assert [limit.name for limit in limits.memory_limits()[1:]] == ["cgroup /a"]
    assert [limit.name for limit in limits.memory_limits(7)[1:]] == ["cgroup /b"]
    assert len(limits.memory_limits(8)) == 1  # it has ended


def test_version_1(tree: Write) -> None:
    tree("self", "7:memory:/a\n3:cpu,cpuacct:/c\n0::/")
    tree("cgroup/memory/a/memory.limit_in_bytes", 4000)
    tree("cgroup/memory/a/memory.usage_in_bytes", 1500)
    tree("cgroup/memory/a/memory.stat", "total_inactive_file 500")
    tree("cgroup/memory/memory.limit_in_bytes", 2**63 - 4096)
    tree("cgroup/memory/memory.usage_in_bytes", 10)
    tree("cgroup/cpu/c/cpu.cfs_quota_us", 250_000)
    tree("cgroup/cpu/c/cpu.cfs_period_us", 100_000)
    assert limits.available_bytes() == 3000
    assert limits.thread_count() == 2
    tree("cgroup/cpu/c/cpu.cfs_quota_us", -1)
    assert limits.thread_count() == 8


def test_the_quota_of_version_2(tree: Write) -> None:
    tree("self", "0::/a/b")
    tree("cgroup/a/b/cpu.max", "max 100000")
    assert limits.thread_count() == 8
    tree("cgroup/a/cpu.max", "350000 100000")
    assert limits.thread_count() == 3
    tree("cgroup/a/b/cpu.max", "10000 100000")
    assert limits.thread_count() == 1


def test_threads_of_one_core_count_once(tree: Write) -> None:
    for cpu in range(8):
        tree(f"cpu/cpu{cpu}/topology/physical_package_id", cpu // 4)
        tree(f"cpu/cpu{cpu}/topology/core_id", cpu % 2)
    assert limits.thread_count() == 4


def test_high_is_a_limit_and_the_remedy_names_its_file(tree: Write) -> None:
    tree("self", "0::/a")
    tree("cgroup/a/memory.max", 5000)
    tree("cgroup/a/memory.high", 4000)
    tree("cgroup/a/memory.current", 1000)
    limit = limits.tightest()
    assert (limit.name, limit.limit_bytes, limit.room_bytes) == ("cgroup /a", 4000, 3000)
    assert limit.remedy == "echo max > /cg/a/memory.high"


def test_a_container_sees_a_part_of_the_tree(tree: Write) -> None:
    tree("proc/self/mountinfo", r"30 20 0:25 /docker/x /c\040g ro - cgroup2 cgroup2 rw")
    tree("c g/s/memory.max", 4000)
    tree("c g/s/memory.current", 0)
    tree("c g/memory.max", 3000)
    tree("c g/memory.current", 0)
    tree("self", "0::/docker/x/s")
    assert [limit.name for limit in limits.memory_limits()[1:]] == [
        "cgroup /docker/x/s",
        "cgroup /docker/x",
    ]
    for hidden in ("/elsewhere/y", "/../../y"):
        tree("self", f"0::{hidden}")
        assert [limit.name for limit in limits.memory_limits()[1:]] == ["cgroup /"]
        assert limits.available_bytes() == 3000


def test_the_commit_limit_counts_in_mode_2_only(tree: Write) -> None:
    tree("proc/meminfo", MEMINFO + "\nCommitLimit: 9 kB\nCommitted_AS: 8 kB")
    assert (limits.overcommit(), limits.available_bytes()) == (0, 10 << 10)
    tree("proc/sys/vm/overcommit_memory", 2)
    assert (limits.overcommit(), limits.available_bytes()) == (2, 1 << 10)
    assert limits.tightest().name == "commit limit (overcommit_memory=2)"


def test_require_names_the_least_room(tree: Write) -> None:
    tree("self", "0::/a")
    tree("cgroup/a/memory.max", 4096)
    tree("cgroup/a/memory.current", 3072)
    tree("cgroup/a/memory.stat", "inactive_file 1024")
    limits.require(2048, "block 'kv'")
    with pytest.raises(CapacityError) as caught:
        limits.require(2049, "block 'kv'")
    error = caught.value
    assert (error.limit, error.used, error.asked) == (4096, 2048, 2049)
    assert str(error) == (
        "block 'kv' of 2.0 KiB does not fit: cgroup /a has room for 2.0 KiB (limit 4.0 KiB, "
        "2.0 KiB used); raise it with: echo max > /cg/a/memory.max"
    )


def test_memlock(tree: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    soft = 1 << 20
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, soft))
    tree("proc/self/status", "VmLck:\t 64 kB\nCapEff:\t0000000000000000")
    limit = limits.memlock()
    assert limit is not None
    assert (limit.limit_bytes, limit.room_bytes) == (1 << 20, (1 << 20) - (64 << 10))
    assert all(way in limit.remedy for way in ("ulimit -l", "LimitMEMLOCK=", "--ulimit memlock"))
    tree("proc/self/status", "VmLck:\t 64 kB\nCapEff:\t0000000000004000")
    assert limits.memlock() is None
    # The capability of a container with its own user ids is not the kernel's.
    tree("proc/self/uid_map", "0 1000 65536")
    assert limits.memlock() is not None
    soft = -1
    assert limits.memlock() is None


def test_huge_pools(tree: Write) -> None:
    assert limits.huge_pools() == {}
    for kib, total in ((1048576, 2), (2048, 10), (64, 0)):
        folder = f"sys/kernel/mm/hugepages/hugepages-{kib}kB"
        tree(f"{folder}/nr_hugepages", total)
        tree(f"{folder}/free_hugepages", total)
    tree("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", 3)
    tree("sys/devices/system/node/online", "0")
    tree("sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", 10)
    pools = limits.huge_pools()
    assert list(pools) == ["64k", "2m", "1g"]
    assert pools["2m"].nodes == {0: (10, 0)}
    assert pools["2m"].available_bytes == 7 * (2 << 20)
    limit = pools["2m"].limit(8 * (2 << 20))
    assert limit.remedy == "echo 11 > /proc/sys/vm/nr_hugepages"
    assert limit.room_bytes == pools["2m"].available_bytes
    assert pools["1g"].limit(3 << 30).remedy.startswith("echo 3 > /sys/kernel/mm/hugepages/")


@pytest.mark.parametrize(
    ("own", "most", "used"),
    [
        ("0::/a", "cgroup/a/hugetlb.2MB.max", "cgroup/a/hugetlb.2MB.current"),
        ("0::/a", "cgroup/a/hugetlb.2MB.rsvd.max", "cgroup/a/hugetlb.2MB.rsvd.current"),
        (
            "5:hugetlb:/a",
            "cgroup/huge/a/hugetlb.2MB.rsvd.limit_in_bytes",
            "cgroup/huge/a/hugetlb.2MB.rsvd.usage_in_bytes",
        ),
    ],
)
def test_hugetlb_cgroups(tree: Write, own: str, most: str, used: str) -> None:
    folder = "sys/kernel/mm/hugepages/hugepages-2048kB"
    tree(f"{folder}/nr_hugepages", 10)
    tree(f"{folder}/free_hugepages", 10)
    tree("self", own)
    tree(most, 5 << 20)
    tree(used, 1 << 20)
    pool = limits.huge_pools()["2m"]
    assert pool.available_bytes == 4 << 20
    assert pool.limit(10 << 20).name == "hugetlb cgroup /a"


def test_nodes(tree: Write) -> None:
    tree("sys/devices/system/node/online", "0,2,1023")
    tree("proc/self/status", "Mems_allowed_list:\t0,2")
    for node, total, cpus in ((0, 100, "0-3"), (2, 0, ""), (1023, 50, "")):
        folder = f"sys/devices/system/node/node{node}"
        figures = {"MemTotal": total, "MemFree": total // 2, "Inactive(file)": total // 10}
        lines = [f"Node {node} {name}: {kib} kB" for name, kib in figures.items()]
        tree(f"{folder}/meminfo", "\n".join(lines))
        tree(f"{folder}/cpulist", cpus)
        tree(f"{folder}/distance", "10 15 20")
    assert limits.nodes() == {
        0: limits.Node(0, 100 << 10, 50 << 10, 60 << 10, (0, 1, 2, 3), (10, 20), True),
        1023: limits.Node(1023, 50 << 10, 25 << 10, 30 << 10, (), (10, 20), False),
    }


def test_the_only_node_with_memory_has_the_machine_s(tree: Write) -> None:
    tree("sys/devices/system/node/online", "0-1")
    for node, total in ((0, 0), (1, 100)):
        folder = f"sys/devices/system/node/node{node}"
        tree(f"{folder}/meminfo", f"Node {node} MemTotal: {total} kB\nNode {node} MemFree: 1 kB")
        tree(f"{folder}/cpulist", "0-1")
        tree(f"{folder}/distance", "10 20" if node == 0 else "20 10")
    only = limits.nodes()[1]
    assert (only.total_bytes, only.free_bytes) == (20 << 10, 5 << 10)
    assert only.available_bytes == 10 << 10
    assert limits.nodes()[0].total_bytes == 0


def test_a_kernel_without_numa_has_one_node(tree: Write) -> None:
    tree("cpu/online", "0-1")
    assert limits.nodes() == {0: limits.Node(0, 20 << 10, 5 << 10, 10 << 10, (0, 1), (10,), True)}


def test_this_machine() -> None:
    machine = limits.memory_limits()[0]
    assert 0 < limits.available_bytes() <= machine.limit_bytes
    assert 1 <= limits.thread_count() <= len(os.sched_getaffinity(0))
    assert any(node.allowed for node in limits.nodes().values())


def test_files_that_are_cached_need_no_room_again(tree: Write) -> None:
    tree("self", "0::/a")
    tree("cgroup/a/memory.max", 9 << 10)
    tree("cgroup/a/memory.current", 4 << 10)
    limits.require_cached(5 << 10, 0, "a model")
    limits.require_cached(9 << 10, 4 << 10, "a model")
    with pytest.raises(CapacityError, match=r"cgroup /a has room for 5\.0 KiB") as raised:
        limits.require_cached(9 << 10, (4 << 10) - 1, "a model")
    assert (raised.value.used, raised.value.asked) == (4 << 10, (5 << 10) + 1)
    # What the machine could drop may be the file itself: all of it has to fit.
    with pytest.raises(CapacityError, match=r"memory of the machine has room for 10\.0 KiB"):
        limits.require_cached(11 << 10, 11 << 10, "a model")


def test_files_take_nothing_of_the_commit_limit(tree: Write) -> None:
    tree("proc/sys/vm/overcommit_memory", 2)
    tree("proc/meminfo", f"{MEMINFO}\nCommitLimit: 4 kB\nCommitted_AS: 4 kB")
    limits.require_cached(10 << 10, 0, "a model")
    with pytest.raises(CapacityError, match="commit limit"):
        limits.require(1, "a block")
