"""What is asked of the kernel, decided on machines that are invented."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from unimem.errors import CapacityError, PlacementError, PlacementWarning
from unimem.system import policy
from unimem.system.limits import HugePool, Limit, Node
from unimem.system.placement import Placement
from unimem.system.policy import NumaPolicy, PlacementChoice, Request

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Machine:
    """Facts that are made up; what is not, may not be asked."""

    def __init__(
        self,
        pools: Mapping[str, HugePool] | None = None,
        nodes: Mapping[int, Node] | None = None,
        memlock: Limit | str | None = "unknown",
    ) -> None:
        self._pools, self._nodes, self._memlock = pools, nodes, memlock

    def huge_pools(self) -> Mapping[str, HugePool]:
        assert self._pools is not None, "the pools were asked"
        return self._pools

    def nodes(self) -> Mapping[int, Node]:
        assert self._nodes is not None, "the nodes were asked"
        return self._nodes

    def require(self, nbytes: int, what: str) -> None:
        if nbytes > 8 * GIB:
            raise CapacityError(f"{what} does not fit")

    def memlock(self) -> Limit | None:
        assert not isinstance(self._memlock, str), "the memlock limit was asked"
        return self._memlock


def pool(page: int, free: int, reserved: int = 0, **options: Any) -> HugePool:
    per_node = options.pop("nodes", {0: (free, free)})
    return HugePool(page, free, free, reserved, 0, per_node, **options)


def node(n: int, available: int = 8 * GIB, total: int = 16 * GIB, **options: Any) -> Node:
    cpus = options.get("cpus", (2 * n, 2 * n + 1))
    return Node(n, total, available, available, cpus, (10,), options.get("allowed", True))


POOLS = {"2m": pool(2 * MIB, 1024), "1g": pool(GIB, 4)}
EMPTY = {"2m": pool(2 * MIB, 0), "1g": pool(GIB, 0)}
NO_MEMORY = node(3, available=0, total=0)
NODES = {0: node(0), 1: node(1), 2: node(2, cpus=()), 3: NO_MEMORY, 4: node(4, allowed=False)}


def decide(
    machine: Machine, nbytes: int, refused: Mapping[str, str] | None = None, **options: Any
) -> PlacementChoice:
    return policy.decide(Request(nbytes=nbytes, **options), machine, refused)


def tells(text: str, *parts: str) -> None:
    assert [part for part in parts if part not in text] == []


# ---- the grammar ----


@pytest.mark.parametrize(
    ("text", "mode", "nodes"),
    [
        ("bind:0", "bind", (0,)),
        ("bind:0,2-3", "bind", (0, 2, 3)),
        ("bind:3,0,3-4", "bind", (0, 3, 4)),
        ("interleave", "interleave", ()),
        ("interleave:0,1", "interleave", (0, 1)),
        ("weighted", "weighted", ()),
        ("weighted:1023", "weighted", (1023,)),
        ("preferred:1", "preferred", (1,)),
        ("bind:0-1023", "bind", tuple(range(1024))),
    ],
)
def test_numa_grammar(text: str, mode: str, nodes: tuple[int, ...]) -> None:
    wanted = policy.parse_numa(text)
    assert wanted is not None
    assert (wanted.mode, wanted.nodes) == (mode, nodes)
    assert policy.parse_numa(str(wanted)) == wanted


@pytest.mark.parametrize(
    "text",
    [
        *("", "bind", "preferred", "bind:", "interleave:", "bind:1024", "bind:0-1024", "bind:3-1"),
        *("bind:-1", "bind:1,", "bind:,1", "bind:1--2", "bind:a", "spread:0", "bind: 0"),
        *("bind:0 ", "bind:0\n", "BIND:0", "bind:99999999999999999999", "bind:\u0661", "bind:0x1"),
    ],
)
def test_numa_grammar_errors_show_the_grammar(text: str) -> None:
    with pytest.raises(ValueError, match=r"bind:NODES.*interleave.*weighted.*0,2-3") as caught:
        policy.parse_numa(text)
    assert repr(text) in str(caught.value)


def test_numa_is_text_or_none() -> None:
    assert policy.parse_numa(None) is None
    wrong: Any = 0
    with pytest.raises(TypeError, match="bind:NODES"):
        policy.parse_numa(wrong)


def test_a_name_is_a_path() -> None:
    assert policy.shared_path("kv") == "/dev/shm/kv"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0b", "x" * 256])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ValueError, match="/dev/shm"):
        policy.shared_path(name)


# ---- pages ----


@pytest.mark.parametrize(
    ("nbytes", "pools", "options", "pages"),
    [
        (MIB, None, {}, "auto"),  # too small: the pools are not even asked
        (2 * MIB - 1, None, {}, "auto"),
        (2 * MIB, POOLS, {}, "2m"),
        (2 * MIB, EMPTY, {}, "auto"),
        (2 * MIB, {}, {}, "auto"),
        (2 * MIB, {"2m": pool(2 * MIB, 4, reserved=4)}, {}, "auto"),
        (GIB - 1, POOLS, {}, "2m"),
        (GIB, POOLS, {}, "1g"),
        (4 * GIB, POOLS, {}, "1g"),
        (4 * GIB + 1, POOLS, {}, "auto"),  # too much for either pool
        (GIB + 1, POOLS, {}, "2m"),  # half of the second page would be wasted
        (16 * GIB // 9, POOLS, {}, "2m"),  # a little more than an eighth of it would be wasted
        (16 * GIB // 9 + 1, POOLS, {}, "1g"),
        (2 * GIB - GIB // 8, POOLS, {}, "1g"),
        (GIB, {"2m": pool(2 * MIB, 512)}, {}, "2m"),
        (GIB, POOLS, {"shared": True}, "1g"),
        (GIB, POOLS, {"shared": "name"}, "auto"),
        (2 * MIB, {"2m": pool(2 * MIB, 4)}, {"reserve": 8 * MIB}, "2m"),
        (2 * MIB, {"2m": pool(2 * MIB, 4)}, {"reserve": 8 * MIB + 1}, "auto"),
        (GIB, POOLS, {"refused": {"1g": "full"}}, "2m"),
        (GIB, POOLS, {"refused": {"1g": "full", "2m": "full"}}, "auto"),
    ],
)
def test_auto_takes_the_largest_pages_that_are_there(
    nbytes: int, pools: Any, options: dict[str, Any], pages: str
) -> None:
    choice = decide(Machine(pools), nbytes, **options)
    assert (choice.pages, choice.shortfalls) == (pages, ())  # auto has none


@pytest.mark.parametrize("pages", ["4k", "thp"])
def test_other_pages_need_no_facts(pages: Any) -> None:
    assert decide(Machine(), 8 * MIB, pages=pages) == PlacementChoice(pages, None, False)


def test_a_pool_that_is_too_small_is_told_with_the_command() -> None:
    machine = Machine({"2m": pool(2 * MIB, 5, reserved=2)})
    assert decide(machine, 6 * MIB, pages="2m").pages == "2m"
    choice = decide(machine, 6 * MIB + 1, pages="2m")
    assert choice.pages == "thp"
    (text,) = choice.shortfalls
    tells(text, "needs 4 hugetlb pages of 2.0 MiB", "5 in all, 5 free, 2 of these promised")
    tells(text, "echo 6 > /", "nr_hugepages")  # 4 more than are promised


def test_small_blocks_and_shared_ones_fall_back_to_what_they_can_have() -> None:
    assert decide(Machine(EMPTY), MIB, pages="2m").pages == "4k"
    assert decide(Machine(EMPTY), MIB, pages="1g").pages == "4k"
    assert decide(Machine(EMPTY), 4 * MIB, pages="2m", shared=True).pages == "auto"
    assert decide(Machine(EMPTY), 4 * MIB, pages="2m", thp_bytes=0).pages == "4k"


def test_memory_that_is_mapped_twice_has_huge_pages_when_they_are_named() -> None:
    options: dict[str, Any] = {"shared": True, "mirror": 2 * MIB}
    assert decide(Machine(), 8 * MIB, **options) == PlacementChoice("auto", None, False)
    assert decide(Machine(POOLS), 8 * MIB, pages="2m", **options).pages == "2m"
    assert decide(Machine(EMPTY), 8 * MIB, pages="2m", **options).pages == "thp"


def test_a_kernel_without_such_pages() -> None:
    (text,) = decide(Machine({"2m": pool(2 * MIB, 1)}), GIB, pages="1g").shortfalls
    tells(text, "no hugetlb pages of 1g (it has 2m)", "hugepagesz=1G")


def test_a_cgroup_of_hugetlb_pages_is_named() -> None:
    cgroup = Limit("hugetlb cgroup /a of 2m pages", 4 * MIB, 2 * MIB, "echo 1G > /a/max")
    machine = Machine({"2m": pool(2 * MIB, 100, cgroups=(cgroup,))})
    assert decide(machine, 2 * MIB, pages="2m").pages == "2m"
    (text,) = decide(machine, 4 * MIB, pages="2m").shortfalls
    tells(text, "hugetlb cgroup /a of 2m pages has room for 2.0 MiB", "echo 1G > /a/max")


def test_hugetlb_pages_have_no_name() -> None:
    choice = decide(Machine(), 4 * MIB, pages="2m", shared="kv")
    assert choice.pages == "auto"
    assert "cannot have a name" in choice.shortfalls[0]


def test_what_the_kernel_refused_is_not_asked_again() -> None:
    choice = decide(Machine(POOLS), 4 * MIB, pages="2m", refused={"2m": "the pool is empty"})
    assert choice.pages == "thp"
    assert choice.shortfalls == ("pages='2m': the pool is empty",)


def test_the_pool_of_the_bound_nodes_counts() -> None:
    pools = {"2m": pool(2 * MIB, 8, nodes={0: (6, 6), 1: (2, 2)})}
    machine = Machine(pools, NODES)
    bind0, bind1 = NumaPolicy("bind", (0,)), NumaPolicy("bind", (1,))
    assert decide(machine, 12 * MIB, pages="2m", numa=bind0).pages == "2m"
    choice = decide(machine, 12 * MIB, pages="2m", numa=bind1)
    assert choice.pages == "thp"
    assert choice.numa == bind1
    (text,) = choice.shortfalls
    file = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages"
    tells(text, "2 free on node 1", f"echo 6 > {file}")
    assert decide(machine, 12 * MIB, numa=bind0).pages == "2m"
    assert decide(machine, 12 * MIB, numa=bind1) == PlacementChoice("auto", bind1, False)
    assert decide(machine, 16 * MIB, pages="2m", numa=NumaPolicy("interleave")).pages == "2m"


# ---- nodes ----


@pytest.mark.parametrize("mode", ["interleave", "weighted"])
def test_without_nodes_all_that_can_be_used(mode: Any) -> None:
    choice = decide(Machine({}, NODES), 4 * MIB, numa=NumaPolicy(mode))
    assert choice == PlacementChoice("auto", NumaPolicy(mode, (0, 1, 2)), False)


def test_nodes_that_cannot_be_used_are_named() -> None:
    wanted = NumaPolicy("bind", (0, 3, 4, 9))
    choice = decide(Machine({}, NODES), MIB, numa=wanted)
    assert choice.numa == NumaPolicy("bind", (0,))
    (text,) = choice.shortfalls
    tells(text, "numa='bind:0,3-4,9'", "node 3 has no memory", "node 4 is not allowed")
    tells(text, "cpuset", "node 9 is offline", "can use 0-2")


@pytest.mark.parametrize("nodes", [(3,), (4,), (9,), (3, 4, 1023)])
def test_no_policy_is_left_when_no_node_can_be_used(nodes: tuple[int, ...]) -> None:
    choice = decide(Machine({}, NODES), MIB, numa=NumaPolicy("preferred", nodes))
    assert choice.numa is None
    assert len(choice.shortfalls) == 1


def test_a_bound_node_without_room_is_preferred_instead() -> None:
    nodes = {0: node(0), 1: node(1, available=GIB), 2: node(2, available=GIB)}
    wanted = NumaPolicy("bind", (1, 2))
    choice = decide(Machine({}, nodes), 2 * GIB, numa=wanted)
    assert choice == PlacementChoice("auto", wanted, False)
    choice = decide(Machine({}, nodes), 2 * GIB + 1, numa=wanted)
    assert choice.numa == NumaPolicy("preferred", (1, 2))
    (text,) = choice.shortfalls
    tells(text, "needs 2.0 GiB", "node 1 has 1.0 GiB of 16.0 GiB available", "node 2 has 1.0 GiB")
    # hugetlb pages come out of the pool, not out of this.
    pools = {"2m": pool(2 * MIB, 2048, nodes={1: (2048, 2048)})}
    assert decide(Machine(pools, nodes), 3 * GIB, pages="2m", numa=wanted).shortfalls == ()


def test_policies_that_the_kernel_refuses() -> None:
    weighted = NumaPolicy("weighted", (0, 1))
    machine = Machine({}, NODES)
    choice = decide(machine, MIB, numa=weighted, refused={"weighted": "Linux 6.9 has it"})
    assert choice.numa == NumaPolicy("interleave", (0, 1))
    assert "Linux 6.9" in choice.shortfalls[0]
    choice = decide(machine, MIB, numa=weighted, refused={"numa": "CAP_SYS_NICE"})
    assert choice.numa is None
    assert choice.shortfalls == ("numa='weighted:0-1': CAP_SYS_NICE",)


# ---- lock ----

MEMLOCK = Limit("locked memory (memlock)", 8 * MIB, 2 * MIB, "ulimit -l unlimited")


def test_what_is_mapped_twice_counts_twice_against_the_memlock_limit() -> None:
    options: dict[str, Any] = {"lock": True, "shared": True, "mirror": 4096}
    assert decide(Machine(memlock=MEMLOCK), 3 * MIB, **options).lock is True
    choice = decide(Machine(memlock=MEMLOCK), 3 * MIB + 4096, **options)
    assert choice.lock is False
    assert "needs 6.0 MiB" in choice.shortfalls[0]


@pytest.mark.parametrize("lock", [True, "onfault"])
def test_the_memlock_limit_is_named(lock: Any) -> None:
    assert decide(Machine(memlock=None), 2**40, pages="4k", lock=lock).lock == lock
    assert decide(Machine(memlock=MEMLOCK), 6 * MIB, pages="4k", lock=lock).lock == lock
    choice = decide(Machine(memlock=MEMLOCK), 6 * MIB + 1, pages="4k", lock=lock)
    assert choice.lock is False
    (text,) = choice.shortfalls
    tells(text, "memlock) has room for 6.0 MiB of 8.0 MiB", "ulimit -l unlimited")
    # hugetlb pages are never taken out of RAM.
    choice = decide(Machine(POOLS), 64 * MIB, pages="2m", lock=lock)
    assert choice == PlacementChoice("2m", None, lock)


def test_all_shortfalls_come_together() -> None:
    machine, nowhere = Machine(EMPTY, NODES, MEMLOCK), NumaPolicy("bind", (9,))
    choice = decide(machine, 64 * MIB, pages="2m", numa=nowhere, lock=True)
    assert (choice.pages, choice.numa, choice.lock) == ("thp", None, False)
    assert [text.split("=")[0] for text in choice.shortfalls] == ["numa", "pages", "lock"]


def test_growth_is_not_downgraded() -> None:
    machine = Machine(EMPTY, {0: node(0, available=MIB)}, MEMLOCK)
    for choice, pages, part in (
        (PlacementChoice("2m", None, False), "2m", "nr_hugepages"),
        (PlacementChoice("thp", NumaPolicy("bind", (0,)), False), "thp", "node 0"),
        (PlacementChoice("thp", None, True), "thp", "memlock"),
    ):
        with pytest.raises(PlacementError, match=part):
            policy.require_growth("kv", 8 * MIB, choice, machine, pages)  # type: ignore[arg-type]
    policy.require_growth("kv", 8 * MIB, None, Machine(), "auto")


def test_warming_needs_room_in_the_machine_and_on_the_bound_nodes() -> None:
    machine = Machine({}, {0: node(0, available=GIB), 1: node(1)})
    bound = PlacementChoice("thp", NumaPolicy("bind", (0,)), True)
    policy.require_room("kv", GIB, bound, machine)
    with pytest.raises(PlacementError, match=r"'kv'.*node 0 has 1\.0 GiB"):
        policy.require_room("kv", GIB + 1, bound, machine)
    preferred = PlacementChoice("thp", NumaPolicy("preferred", (0,)), False)
    policy.require_room("kv", 4 * GIB, preferred, machine)
    policy.require_room("kv", 4 * GIB, None, Machine())
    with pytest.raises(CapacityError, match="warming block 'kv'"):
        policy.require_room("kv", 9 * GIB, None, Machine())


# ---- what came of it ----


def granted(pages: Any, resident: int, **options: Any) -> Placement:
    nothing: dict[str, Any] = {"huge_bytes": 0, "locked_bytes": 0, "swapped_bytes": 0, "nodes": {}}
    return Placement(pages, 4096, resident, pss_bytes=resident, **nothing | options)


def asked(pages: Any, *, choice: Any = None, **options: Any) -> tuple[Request, PlacementChoice]:
    """What was asked for, and what of it was chosen: by default all."""
    request = Request(nbytes=8, pages=pages, **options)
    return request, PlacementChoice(choice or pages, request.numa, request.lock)


BIND = NumaPolicy("bind", (1,))
ONFAULT = asked("auto", lock="onfault")


@pytest.mark.parametrize(
    ("wanted", "found", "warm", "word"),
    [
        (asked("auto"), granted("4k", 0), False, None),
        (asked("thp"), granted("thp", 0), False, None),
        (asked("thp"), granted("4k", 0), False, "echo madvise"),
        (asked("thp"), granted("thp", 8, huge_bytes=4), True, "compact_memory"),
        (asked("thp"), granted("thp", 8, huge_bytes=8), True, None),
        (asked("thp", shared=True), granted("4k", 0), False, "collapse"),
        (asked("thp", shared=True), granted("4k", 8), True, "shmem_enabled"),
        (asked("2m", choice="thp"), granted("4k", 0), False, None),  # told already
        (asked("2m"), granted("2m", 0), False, None),
        (asked("2m"), granted("4k", 0), False, "the kernel says 4k"),
        (asked("4k"), granted("thp", 8, huge_bytes=8), True, "huge pages"),
        (asked("auto"), granted("4k", 4, swapped_bytes=4), True, "swapped out"),
        (asked("auto", lock=True), granted("4k", 8, locked_bytes=8), False, None),
        (asked("auto", lock=True), granted("4k", 8), False, "lock=True: 0 B of 8 B"),
        (ONFAULT, granted("4k", 0), False, None),
        (ONFAULT, granted("4k", 8, locked_bytes=4), False, "lock='onfault': 4 B of 8 B"),
        (asked("auto", numa=BIND), granted("4k", 8, nodes={0: 3, 1: 5}), True, "3 B on node 0"),
        (asked("auto", numa=BIND), granted("4k", 8, nodes={1: 8}), True, None),
    ],
)
def test_comparison(
    wanted: tuple[Request, PlacementChoice], found: Placement, warm: bool, word: str | None
) -> None:
    texts = policy.find_mismatches(*wanted, found, 8, warm=warm)
    assert len(texts) == (word is not None)
    assert all(str(word) in text for text in texts)


def test_few_huge_pages() -> None:
    assert policy.huge_page_message("b", granted("thp", 5 * MIB, huge_bytes=4 * MIB), 2 * MIB) == ""
    text = policy.huge_page_message("b", granted("4k", 5 * MIB, huge_bytes=2 * MIB), 2 * MIB)
    tells(text, "2.0 MiB of 5.0 MiB", "compact_memory")
    assert policy.huge_page_message("b", granted("4k", 5 * MIB), 0) == ""


def test_what_repair_left() -> None:
    text = policy.misplaced_message("b", BIND, MIB, granted("4k", 8, nodes={0: MIB, 1: GIB}))
    tells(text, "1.0 MiB could not be moved", "1.0 MiB on node 0")
    spread = NumaPolicy("interleave", (0, 1))
    text = policy.misplaced_message("b", spread, MIB, granted("4k", 8, nodes={0: 3, 1: 5}))
    assert "3 B on node 0, 5 B on node 1" in text


# ---- CPUs that warm ----


def test_threads_go_round_the_nodes_of_the_policy() -> None:
    nodes = {0: node(0, cpus=(0, 1)), 1: node(1, cpus=(2, 3)), 2: node(2, cpus=())}
    every = {0, 1, 2, 3}

    def cpus(mode: Any, *chosen: int, n: int, allowed: set[int] = every) -> list[int] | None:
        return policy.warm_cpus(NumaPolicy(mode, chosen), n, nodes, allowed)

    assert cpus("bind", 1, n=3) == [2, 3, 2]
    assert cpus("interleave", 0, 1, n=4) == [0, 2, 1, 3]
    assert cpus("preferred", 2, n=2) == [0, 1]  # no CPUs of its own: any
    assert cpus("bind", 1, n=2, allowed={0, 3}) == [3, 3]
    assert cpus("bind", 1, n=2, allowed={0}) == [0, 0]
    assert policy.warm_cpus(None, 2, nodes, every) is None
    assert policy.warm_cpus(NumaPolicy("bind", (0,)), 2, {0: nodes[0]}, every) is None


# ---- messages ----


def test_warnings_point_at_the_caller() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy.warn("as it is")
    (warning,) = caught
    assert warning.category is PlacementWarning
    assert warning.filename == __file__
