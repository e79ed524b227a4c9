"""Room left to a process by the machine and its cgroups, and their memory pressure.

The tests use invented trees, this machine and a real cgroup.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.kernel.cgroup_tree import MEMINFO, Write, memory, names
from support.kernel.cgroups import LIMIT_BYTES, SmallCgroup
from unimem.errors import CapacityError
from unimem.system import limits

MIB = 1 << 20


def test_without_cgroups(tree: Write) -> None:
    assert (limits.available_bytes(), limits.thread_count()) == (10 << 10, 8)
    (machine,) = limits.memory_limits()
    assert (machine.name, machine.limit_bytes) == ("memory of the machine", 20 << 10)


def test_without_proc(tree: Write, tmp_path: Path) -> None:
    (tmp_path / "proc/meminfo").unlink()
    (machine,) = limits.memory_limits()
    assert 0 < machine.room_bytes <= machine.limit_bytes
    assert machine.limit_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_version_2_takes_the_tightest_ancestor(tree: Write) -> None:
    tree("self", "0::/a/b")
    memory(tree, "/a/b", "max", 100)
    memory(tree, "/a", 5000, 2000, stat="anon 1200\ninactive_file 300\nslab 7")
    assert limits.available_bytes() == 3150  # of a little, half of the file pages
    assert limits.tightest().name == "cgroup /a"
    memory(tree, "/a/b", 1000, 100)
    assert limits.available_bytes() == 900
    memory(tree, "/a", 5000, 9000)
    assert limits.available_bytes() == 0


def test_limits_of_another_process(tree: Write) -> None:
    tree("self", "0::/a")
    tree("proc/7/cgroup", "0::/b")
    memory(tree, "/a", 3000, 0)
    memory(tree, "/b", 2000, 0)
    assert (names(), names(7)) == (["cgroup /a"], ["cgroup /b"])
    assert names(8) == []  # it has ended


def test_version_1(tree: Write) -> None:
    tree("self", "7:memory:/a\n3:cpu,cpuacct:/c\n0::/")
    for folder, most, used in (("memory/a", 4000, 1500), ("memory", 2**63 - 4096, 10)):
        tree(f"cgroup/{folder}/memory.limit_in_bytes", most)
        tree(f"cgroup/{folder}/memory.usage_in_bytes", used)
    tree("cgroup/memory/a/memory.stat", "total_inactive_file 500")
    limit = limits.tightest()
    limit_file = limit.path
    assert limit_file.endswith("memory/a/memory.limit_in_bytes")
    # In version 1, -1 removes the limit; for a larger need, the remedy names a figure.
    assert limit.remedy == f"echo -1 > {limit_file}  # -1: no limit"
    assert limit.remedy_for(2750) == limit.remedy
    assert limit.remedy_for(8000) == f"echo 12288 > {limit_file}"
    with pytest.raises(CapacityError, match=f"raise it with: echo 12288 > {limit_file}"):
        limits.require(8000, "block 'kv'")
    tree("cgroup/cpu/c/cpu.cfs_quota_us", 250_000)
    tree("cgroup/cpu/c/cpu.cfs_period_us", 100_000)
    assert (limits.available_bytes(), limits.thread_count()) == (2750, 2)
    tree("cgroup/cpu/c/cpu.cfs_quota_us", -1)
    assert limits.thread_count() == 8


@pytest.mark.parametrize(
    ("stat", "room"),
    [
        ("", 1000),
        ("inactive_file 300", 1292),
        ("active_file 300", 1292),
        ("active_file 300\ninactive_file 200", 1492),
        ("active_file 300\ninactive_file 200\nfile_dirty 150", 1342),
        ("active_file 300\ninactive_file 200\nfile_dirty 150\nfile_writeback 50", 1292),
        ("active_file 300\nfile_dirty 400", 1000),
        ("active_file 8\ninactive_file 2", 1005),  # half of a little
        # None of these is in the two sums of file pages.
        ("file 900\nshmem 500\nunevictable 400\nfile_mapped 300\nslab_reclaimable 200", 1000),
        # The counters may lag behind the charges, or run ahead of them.
        ("inactive_file 9000", 5000),
    ],
)
def test_clean_file_pages_are_room(tree: Write, stat: str, room: int) -> None:
    pairs = [line.split() for line in stat.splitlines()]
    tree("self", "0::/a")
    lines = [f"{name} {int(n) * MIB}" for name, n in pairs]
    memory(tree, "/a", 5000 * MIB, 4000 * MIB, stat="\n".join(["anon 1200", *lines]))
    assert limits.memory_limits()[1].room_bytes == room * MIB
    # Version 1 has each counter twice: for the cgroup alone, and including its children.
    tree("self", "7:memory:/b")
    tree("cgroup/memory/b/memory.limit_in_bytes", 5000 * MIB)
    tree("cgroup/memory/b/memory.usage_in_bytes", 4000 * MIB)
    lines = [f"total_{name.removeprefix('file_')} {int(n) * MIB}" for name, n in pairs]
    tree("cgroup/memory/b/memory.stat", "\n".join(["active_file 7", "dirty 9", *lines]))
    assert limits.memory_limits()[1].room_bytes == room * MIB


def test_dirty_files_still_make_room_for_files(tree: Write) -> None:
    tree("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 9000000 kB")
    tree("self", "0::/a")
    stat = f"active_file {3000 * MIB}\ninactive_file {500 * MIB}\nfile_dirty {800 * MIB}"
    memory(tree, "/a", 5000 * MIB, 4000 * MIB, stat=stat)
    limit = limits.tightest()
    figures = (limit.room_bytes, limit.file_bytes, limit.busy_file_bytes)
    assert figures == (3692 * MIB, 3500 * MIB, 808 * MIB)
    limits.require_cached(4500 * MIB, 3500 * MIB, "a model")
    with pytest.raises(CapacityError, match="cgroup /a has room"):
        limits.require_cached(4500 * MIB + 1, 3500 * MIB, "a model")


def test_the_quota_of_version_2(tree: Write) -> None:
    tree("self", "0::/a/b")
    for cgroup, quota, n in (("a/b", "max", 8), ("a", "350000", 3), ("a/b", "10000", 1)):
        tree(f"cgroup/{cgroup}/cpu.max", f"{quota} 100000")
        assert limits.thread_count() == n


def test_threads_of_one_core_count_once(tree: Write) -> None:
    for cpu in range(8):
        tree(f"cpu/cpu{cpu}/topology/physical_package_id", cpu // 4)
        tree(f"cpu/cpu{cpu}/topology/core_id", cpu % 2)
    assert limits.thread_count() == 4


def test_high_is_a_limit_and_the_remedy_names_its_file(tree: Write) -> None:
    tree("self", "0::/a")
    memory(tree, "/a", 5000, 1000, high=4000)
    limit = limits.tightest()
    assert (limit.name, limit.limit_bytes, limit.room_bytes) == ("cgroup /a", 4000, 3000)
    assert limit.remedy == "echo max > /cg/a/memory.high"


def test_the_commit_limit_counts_in_mode_2_only(tree: Write) -> None:
    tree("proc/meminfo", MEMINFO + "\nCommitLimit: 9 kB\nCommitted_AS: 8 kB")
    assert (limits.overcommit(), limits.available_bytes()) == (0, 10 << 10)
    tree("proc/sys/vm/overcommit_memory", 2)
    assert (limits.overcommit(), limits.available_bytes()) == (2, 1 << 10)
    assert limits.tightest().name == "commit limit (overcommit_memory=2)"


def test_require_names_the_tightest_limit(tree: Write) -> None:
    tree("self", "0::/a")
    memory(tree, "/a", 4096, 3072, stat="inactive_file 2048")
    limits.require(2048, "block 'kv'")
    with pytest.raises(CapacityError) as caught:
        limits.require(2049, "block 'kv'")
    error = caught.value
    assert (error.limit, error.used, error.asked) == (4096, 2048, 2049)
    assert str(error) == (
        "block 'kv' of 2.0 KiB does not fit: cgroup /a has room for 2.0 KiB (limit 4.0 KiB, "
        "2.0 KiB used); raise it with: echo 8192 > /cg/a/memory.max"
    )


def test_memlock(tree: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    soft = 1 << 20
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, soft))
    tree("proc/self/status", "VmLck:\t 64 kB\nCapEff:\t0000000000000000")
    limit = limits.memlock()
    assert limit is not None
    assert (limit.limit_bytes, limit.room_bytes) == (1 << 20, (1 << 20) - (64 << 10))
    assert all(way in limit.remedy for way in ("ulimit -l", "LimitMEMLOCK=", "--ulimit memlock"))
    tree("proc/self/status", "VmLck:\t 64 kB\nCapEff:\t0000000000003fff")  # all below it
    assert limits.memlock() is not None
    tree("proc/self/status", "VmLck:\t 64 kB\nCapEff:\t0000000000004000")
    assert limits.memlock() is None
    # The capability of a container with its own user ids is not the kernel's.
    tree("proc/self/uid_map", "0 1000 65536")
    assert limits.memlock() is not None
    soft = -1
    assert limits.memlock() is None


POOLS = "sys/kernel/mm/hugepages/hugepages"


def test_huge_pools(tree: Write) -> None:
    assert limits.huge_pools() == {}
    for kib, total in ((1048576, 2), (2048, 10), (64, 0)):
        tree(f"{POOLS}-{kib}kB/nr_hugepages", total)
        tree(f"{POOLS}-{kib}kB/free_hugepages", total)
    tree(f"{POOLS}-2048kB/resv_hugepages", 3)
    tree("sys/devices/system/node/online", "0")
    tree("sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", 10)
    pools = limits.huge_pools()
    assert list(pools) == ["64k", "2m", "1g"]
    assert (pools["2m"].nodes, pools["2m"].available_bytes) == ({0: (10, 0)}, 7 * (2 << 20))
    assert pools["64k"].available_bytes == 0
    limit = pools["2m"].limit(9 * (2 << 20))
    assert limit.remedy == "echo 12 > /proc/sys/vm/nr_hugepages"
    assert limit.room_bytes == pools["2m"].available_bytes
    assert pools["1g"].limit(3 << 30).remedy.startswith("echo 3 > /sys/kernel/mm/hugepages/")


@pytest.mark.parametrize(
    ("own", "most", "used"),
    [
        ("0::/a", "a/hugetlb.2MB.max", "a/hugetlb.2MB.current"),
        ("0::/a", "a/hugetlb.2MB.rsvd.max", "a/hugetlb.2MB.rsvd.current"),
        (
            "5:hugetlb:/a",
            "huge/a/hugetlb.2MB.rsvd.limit_in_bytes",
            "huge/a/hugetlb.2MB.rsvd.usage_in_bytes",
        ),
    ],
)
def test_hugetlb_cgroups(tree: Write, own: str, most: str, used: str) -> None:
    tree(f"{POOLS}-2048kB/nr_hugepages", 10)
    tree(f"{POOLS}-2048kB/free_hugepages", 10)
    tree("self", own)
    tree(f"cgroup/{most}", 5 << 20)
    tree(f"cgroup/{used}", 1 << 20)
    pool = limits.huge_pools()["2m"]
    limit = pool.limit(10 << 20)
    assert (pool.available_bytes, limit.name) == (4 << 20, "hugetlb cgroup /a")
    # The remedy adds the missing 6 MiB of 10 to the limit of 5 MiB with 4 left.
    assert limit.remedy == f"echo {11 << 20} > {limit.path}"
    assert limit.path.endswith(most)


@pytest.mark.parametrize(
    ("files", "may_break"),
    [
        ({}, False),
        ({"cgroup/a/hugetlb.2MB.max": "max"}, False),
        ({"cgroup/a/hugetlb.2MB.max": 5 << 20}, True),
        ({"cgroup/a/hugetlb.2MB.rsvd.max": 5 << 20}, False),
        ({"cgroup/hugetlb.2MB.max": 0, "cgroup/a/hugetlb.2MB.rsvd.max": 0}, True),
        ({"self": "5:hugetlb:/a", "cgroup/huge/a/hugetlb.2MB.limit_in_bytes": 4096}, True),
        ({"self": "5:hugetlb:/a", "cgroup/huge/a/hugetlb.2MB.rsvd.limit_in_bytes": 1}, False),
        ({"proc/self/status": "Mems_allowed_list:\t0"}, True),
        ({"proc/self/status": "Mems_allowed_list:\t0-1"}, False),
        ({"proc/self/mountinfo": "30 20 0:25 /x /cg rw - cgroup2 cgroup2 rw"}, True),
        ({f"{POOLS}-2048kB/nr_hugepages": 0, "cgroup/a/hugetlb.2MB.max": 5 << 20}, False),
    ],
)
def test_pages_that_are_promised_and_not_given(
    tree: Write, files: dict[str, object], may_break: bool
) -> None:
    """A cgroup counts pages in use at their first touch, and promised ones at the mapping."""
    tree(f"{POOLS}-2048kB/nr_hugepages", 10)
    tree("sys/devices/system/node/online", "0-1")
    for node in (0, 1):
        tree(f"sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages", 5)
    tree("self", "0::/a")
    for name, content in files.items():
        tree(name, content)
    assert limits.huge_pools()["2m"].may_break_promises == may_break


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
    for folder, text in (("node0/access1", "25600"), ("node1023/access1", "none")):
        tree(f"sys/devices/system/node/{folder}/initiators/read_bandwidth", text)
    assert limits.nodes() == {
        0: limits.Node(0, 100 << 10, 50 << 10, 60 << 10, (0, 1, 2, 3), (10, 20), True, 25600),
        1023: limits.Node(1023, 50 << 10, 25 << 10, 30 << 10, (), (10, 20), False),
    }


def test_the_only_node_with_memory_has_the_machine_s_room(tree: Write) -> None:
    tree("sys/devices/system/node/online", "0-1")
    for node, total in ((0, 0), (1, 100)):
        folder = f"sys/devices/system/node/node{node}"
        tree(f"{folder}/meminfo", f"Node {node} MemTotal: {total} kB\nNode {node} MemFree: 1 kB")
        tree(f"{folder}/cpulist", "0-1")
        tree(f"{folder}/distance", "10 20" if node == 0 else "20 10")
    empty, only = limits.nodes().values()
    figures = (empty.total_bytes, only.total_bytes, only.free_bytes, only.available_bytes)
    assert figures == (0, 20 << 10, 5 << 10, 10 << 10)


def test_a_kernel_without_numa_has_one_node(tree: Write) -> None:
    tree("cpu/online", "0-1")
    assert limits.nodes() == {0: limits.Node(0, 20 << 10, 5 << 10, 10 << 10, (0, 1), (10,), True)}


def test_the_cpu_of_a_thread_whatever_its_name(tree: Write) -> None:
    assert limits.current_cpu() is None
    # proc(5) has the CPU as the 39th field.
    tree("proc/thread-self/stat", "1 (a b) c) R " + " ".join(str(n) for n in range(4, 53)))
    assert limits.current_cpu() == 39


def test_this_machine() -> None:
    assert 0 < limits.available_bytes() <= limits.memory_limits()[0].limit_bytes
    assert 1 <= limits.thread_count() <= len(os.sched_getaffinity(0))
    assert any(node.allowed for node in limits.nodes().values())


def test_cached_files_need_no_more_room(tree: Write) -> None:
    tree("self", "0::/a")
    memory(tree, "/a", 9 << 10, 4 << 10)
    limits.require_cached(5 << 10, 0, "a model")
    limits.require_cached(9 << 10, 4 << 10, "a model")
    with pytest.raises(CapacityError, match=r"cgroup /a has room for 5\.0 KiB") as raised:
        limits.require_cached(9 << 10, (4 << 10) - 1, "a model")
    assert (raised.value.used, raised.value.asked) == (4 << 10, (5 << 10) + 1)
    # The droppable pages may be the file itself, so the whole file has to fit.
    with pytest.raises(CapacityError, match=r"memory of the machine has room for 10\.0 KiB"):
        limits.require_cached(11 << 10, 11 << 10, "a model")


def test_memory_charged_to_another_cgroup_needs_no_room(tree: Write) -> None:
    tree("self", "0::/a")
    memory(tree, "/a", 9 << 10, 4 << 10, stat="inactive_file 1024")

    def needed(nbytes: int, cached: Callable[[], int]) -> tuple[int, int]:
        _, found = limits.room_for_files(limits.memory_limits(), nbytes, cached)
        return found[1:]

    assert needed(7 << 10, lambda: 3 << 10) == (5 << 10, 6 << 10)
    unasked = needed(6 << 10, lambda: pytest.fail("asked, where that decides nothing"))
    assert unasked == (6 << 10, 6 << 10)


def test_files_do_not_count_against_the_commit_limit(tree: Write) -> None:
    tree("proc/sys/vm/overcommit_memory", 2)
    tree("proc/meminfo", f"{MEMINFO}\nCommitLimit: 4 kB\nCommitted_AS: 4 kB")
    limits.require_cached(10 << 10, 0, "a model")
    with pytest.raises(CapacityError, match="commit limit"):
        limits.require(1, "a block")


# ---- in a real cgroup of 512 MB: what would be killed in it is refused by name, and lives ----

REFUSED = """
import json
from unimem.system import limits
from unimem.errors import CapacityError
found = [[limit.name, limit.limit_bytes, limit.used_bytes] for limit in limits.memory_limits()]
limits.require(300 << 20, "block 'kv'")
try:
    limits.require(600 << 20, "block 'kv'")
except CapacityError as error:
    refused = [str(error), error.limit, error.used, error.asked]
print(json.dumps([found, refused]))
"""


def test_a_request_beyond_the_cgroup_is_refused_by_name(cgroup_512mb: SmallCgroup) -> None:
    found, (text, limit, used, asked) = json.loads(cgroup_512mb.run(REFUSED))
    by_name = {name: (limit, used) for name, limit, used in found}
    assert by_name[cgroup_512mb.name][0] == LIMIT_BYTES
    # The count includes the small interpreter.
    assert 0 < by_name[cgroup_512mb.name][1] < LIMIT_BYTES // 2
    assert (limit, asked) == (LIMIT_BYTES, 600 << 20)
    assert 0 < used < LIMIT_BYTES // 2
    assert text.startswith(f"block 'kv' of 600.0 MiB does not fit: {cgroup_512mb.name} has room ")
    assert "(limit 512.0 MiB, " in text
    assert str(cgroup_512mb.folder) in text


def test_a_failed_script_in_the_cgroup_is_reported(cgroup_512mb: SmallCgroup) -> None:
    with pytest.raises(AssertionError, match="status 3"):
        cgroup_512mb.run("raise SystemExit(3)")


def test_file_pages_read_once_are_room(cgroup_512mb: SmallCgroup) -> None:
    cgroup_512mb.run("""
import os, tempfile
from unimem.system import limits
with tempfile.TemporaryFile(dir="/var/tmp") as file:
    for _ in range(100):
        file.write(bytes(1 << 20))
    file.flush()
    os.fsync(file.fileno())
    limits.require(400 << 20, "block 'kv'")
    """)


READ_TWICE = """
import os, tempfile
import unimem as um
from unimem.system import limits

def active_bytes():
    for limit in limits.memory_limits():
        if limit.name == {name!r}:
            lines = open({folder!r} + "/memory.stat").read().splitlines()
            stat = dict(line.split() for line in lines)
            return int(stat.get("total_active_file", stat["active_file"]))

with tempfile.TemporaryFile(dir="/var/tmp") as file:
    for _ in range(300):
        file.write(bytes(1 << 20))
    file.flush()
    os.fsync(file.fileno())
    for _ in range(3):
        file.seek(0)
        while file.read(1 << 20):
            pass
    assert active_bytes() > 250 << 20, active_bytes()
    with um.Block(400 << 20, pages="4k", warm=True) as block:
        assert block.granted.resident_bytes == 400 << 20
"""


def test_file_pages_read_twice_are_room(cgroup_512mb: SmallCgroup) -> None:
    name, folder = cgroup_512mb.name, str(cgroup_512mb.folder)
    cgroup_512mb.run(READ_TWICE.format(name=name, folder=folder))


def test_a_small_shm_is_named() -> None:
    limits.require_shm(1, "block 'kv'")
    with pytest.raises(CapacityError, match=r"block 'kv' of .*/dev/shm has room for .*remount"):
        limits.require_shm(2**60, "block 'kv'")


def test_the_needed_size_of_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(f_frsize=4096, f_blocks=3, f_bavail=1)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    with pytest.raises(CapacityError, match=f"size={5 * 4096} /dev/shm"):
        limits.require_shm(3 * 4096, "block 'kv'")
