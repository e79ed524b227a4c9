"""Placement requests to the kernel, decided on invented machines."""

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
    """Invented facts; any other question fails."""

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
    options["numa"] = policy.parse_numa(options.get("numa"))
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


LISTS = ("", "1024", "0-1024", "3-1", "-1", "1,", ",1", "1--2", "a", " 0", "0 ", "0\n", "9" * 20)
WRONG = ["", "bind", "preferred", "interleave:", "spread:0", "BIND:0", "bind:\u0661", "bind:0x1"]


@pytest.mark.parametrize("text", [*WRONG, *(f"bind:{nodes}" for nodes in LISTS)])
def test_numa_grammar_errors_show_the_grammar(text: str) -> None:
    with pytest.raises(ValueError, match=r"bind:NODES.*interleave.*weighted.*0,2-3") as caught:
        policy.parse_numa(text)
    assert repr(text) in str(caught.value)


def test_only_weights_are_copied_to_nodes() -> None:
    for text, nodes in (("mirror", ()), ("mirror:0,2-3", (0, 2, 3))):
        wanted = policy.parse_numa(text, mirror=True)
        assert wanted is not None
        assert (wanted.mode, wanted.nodes, str(wanted)) == ("mirror", nodes, text)
        with pytest.raises(ValueError, match=f"is for weights .*got '{text}'"):
            policy.parse_numa(text)


def test_numa_is_text_or_none() -> None:
    assert policy.parse_numa(None) is None
    wrong: Any = 0
    with pytest.raises(TypeError, match="bind:NODES"):
        policy.parse_numa(wrong)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0b", "x" * 256])
def test_a_name_is_a_path(name: str) -> None:
    assert policy.shared_path("kv") == "/dev/shm/kv"
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
def test_auto_takes_the_largest_pages(nbytes: int, pools: Any, options: Any, pages: str) -> None:
    choice = decide(Machine(pools), nbytes, **options)
    assert (choice.pages, choice.shortfalls) == (pages, ())  # auto has none


# ---- what is short ----

CGROUP = Limit("hugetlb cgroup /a of 2m pages", 4 * MIB, 2 * MIB, "echo 1G > /a/max")
MEMLOCK = Limit("locked memory (memlock)", 8 * MIB, 2 * MIB, "ulimit -l unlimited")
FIVE = Machine({"2m": pool(2 * MIB, 5, reserved=2)})
OF_A_CGROUP = Machine({"2m": pool(2 * MIB, 100, cgroups=(CGROUP,))})
OF_TWO_NODES = Machine({"2m": pool(2 * MIB, 8, nodes={0: (6, 6), 1: (2, 2)})}, NODES)
POOL_OF_NODE_1 = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages"
NO_POOL = Machine({}, NODES)
FULL = {0: node(0), 1: node(1, available=GIB), 2: node(2, available=GIB)}
FULL_WITH_POOL = Machine({"2m": pool(2 * MIB, 2048, nodes={1: (2048, 2048)})}, FULL)
LOCKED_TWICE = {"lock": True, "shared": True, "mirror": (4096, 0, 1)}
MIRROR = {"shared": True, "mirror": (2 * MIB, 0, 1)}

# A machine, a size and other requests; then the granted pages, policy and lock.
GRANTED: list[tuple[Machine, int, dict[str, Any], tuple[object, ...]]] = [
    *((Machine(), 8 * MIB, {"pages": pages}, (pages, None, False)) for pages in ("4k", "thp")),
    (FIVE, 6 * MIB, {"pages": "2m"}, ("2m", None, False)),
    (Machine(), 8 * MIB, MIRROR, ("auto", None, False)),
    (Machine(POOLS), 8 * MIB, {"pages": "2m", **MIRROR}, ("2m", None, False)),
    (OF_A_CGROUP, 2 * MIB, {"pages": "2m"}, ("2m", None, False)),
    # The pool of the bound nodes counts.
    (OF_TWO_NODES, 12 * MIB, {"pages": "2m", "numa": "bind:0"}, ("2m", "bind:0", False)),
    (OF_TWO_NODES, 12 * MIB, {"numa": "bind:0"}, ("2m", "bind:0", False)),
    (OF_TWO_NODES, 12 * MIB, {"numa": "bind:1"}, ("auto", "bind:1", False)),
    (OF_TWO_NODES, 16 * MIB, {"pages": "2m", "numa": "interleave"},
     ("2m", "interleave:0-2", False)),
    # Without named nodes, all usable nodes count.
    (NO_POOL, 4 * MIB, {"numa": "interleave"}, ("auto", "interleave:0-2", False)),
    (NO_POOL, 4 * MIB, {"numa": "weighted"}, ("auto", "weighted:0-2", False)),
    (Machine({}, FULL), 2 * GIB, {"numa": "bind:1-2"}, ("auto", "bind:1-2", False)),
    # hugetlb pages come from the pool, not from the nodes' free memory, and never leave RAM.
    (FULL_WITH_POOL, 3 * GIB, {"pages": "2m", "numa": "bind:1-2"}, ("2m", "bind:1-2", False)),
    *((Machine(POOLS), 64 * MIB, {"pages": "2m", "lock": lock}, ("2m", None, lock))
      for lock in (True, "onfault")),
    (Machine(memlock=None), 2**40, {"pages": "4k", "lock": True}, ("4k", None, True)),
    *((Machine(memlock=MEMLOCK), 6 * MIB, {"pages": "4k", "lock": lock}, ("4k", None, lock))
      for lock in (True, "onfault")),
    (Machine(memlock=MEMLOCK), 3 * MIB, LOCKED_TWICE, ("auto", None, True)),
]  # fmt: skip

# The same, and the message about the shortfall.
SHORT: list[tuple[Machine, int, dict[str, Any], tuple[object, ...], tuple[str, ...]]] = [
    (FIVE, 6 * MIB + 1, {"pages": "2m"}, ("thp", None, False),
     ("needs 4 hugetlb pages of 2.0 MiB", "5 in all, 5 free, 2 of these promised",
      "echo 6 > /", "nr_hugepages")),  # 4 more than are promised
    # Blocks that are shared or too small for huge pages fall back.
    (Machine(EMPTY), MIB, {"pages": "2m"}, ("4k", None, False), ("needs 1 ",)),
    (Machine(EMPTY), MIB, {"pages": "1g"}, ("4k", None, False), ("needs 1 ",)),
    (Machine(EMPTY), 4 * MIB, {"pages": "2m", "shared": True}, ("auto", None, False), ("needs 2",)),
    (Machine(EMPTY), 4 * MIB, {"pages": "2m", "thp_bytes": 0}, ("4k", None, False), ("needs 2",)),
    (Machine(EMPTY), 8 * MIB, {"pages": "2m", **MIRROR}, ("thp", None, False), ("needs 4",)),
    (Machine({"2m": pool(2 * MIB, 1)}), GIB, {"pages": "1g"}, ("thp", None, False),
     ("no hugetlb pages of 1g (it has 2m)", "hugepagesz=1G")),
    (OF_A_CGROUP, 4 * MIB, {"pages": "2m"}, ("thp", None, False),
     ("hugetlb cgroup /a of 2m pages has room for 2.0 MiB", "echo 1G > /a/max")),
    (Machine(), 4 * MIB, {"pages": "2m", "shared": "kv"}, ("auto", None, False),
     ("cannot have a name",)),
    (Machine(POOLS), 4 * MIB, {"pages": "2m", "refused": {"2m": "empty"}}, ("thp", None, False),
     ("pages='2m': empty",)),
    (OF_TWO_NODES, 12 * MIB, {"pages": "2m", "numa": "bind:1"}, ("thp", "bind:1", False),
     ("2 free on node 1", f"echo 6 > {POOL_OF_NODE_1}")),
    (NO_POOL, MIB, {"numa": "bind:0,3-4,9"}, ("auto", "bind:0", False),
     ("numa='bind:0,3-4,9'", "node 3 has no memory", "node 4 is not allowed", "cpuset",
      "node 9 is offline", "can use 0-2")),
    *((NO_POOL, MIB, {"numa": f"preferred:{nodes}"}, ("auto", None, False), ("numa=",))
      for nodes in ("3", "4", "9", "3-4,1023")),
    # A bound node without room becomes a preferred one.
    (Machine({}, FULL), 2 * GIB + 1, {"numa": "bind:1-2"}, ("auto", "preferred:1-2", False),
     ("needs 2.0 GiB", "node 1 has 1.0 GiB of 16.0 GiB available", "node 2 has 1.0 GiB")),
    (NO_POOL, MIB, {"numa": "weighted:0-1", "refused": {"weighted": "Linux 6.9 has it"}},
     ("auto", "interleave:0-1", False), ("Linux 6.9",)),
    (NO_POOL, MIB, {"numa": "weighted:0-1", "refused": {"numa": "CAP_SYS_NICE"}},
     ("auto", None, False), ("numa='weighted:0-1': CAP_SYS_NICE",)),
    # Double mappings count twice.
    (Machine(memlock=MEMLOCK), 3 * MIB + 4096, LOCKED_TWICE, ("auto", None, False),
     ("needs 6.0 MiB",)),
    *((Machine(memlock=MEMLOCK), 6 * MIB + 1, {"pages": "4k", "lock": lock}, ("4k", None, False),
       ("memlock) has room for 6.0 MiB of 8.0 MiB", "ulimit -l unlimited"))
      for lock in (True, "onfault")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "nbytes", "options", "chosen", "told"), [*((*row, ()) for row in GRANTED), *SHORT]
)
def test_shortfalls(machine: Machine, nbytes: int, options: Any, chosen: Any, told: Any) -> None:
    choice = decide(machine, nbytes, **options)
    assert (choice.pages, choice.numa and str(choice.numa), choice.lock) == chosen
    assert len(choice.shortfalls) == bool(told)
    for text in choice.shortfalls:
        tells(text, *told)


def test_all_shortfalls_are_reported_together() -> None:
    machine = Machine(EMPTY, NODES, MEMLOCK)
    choice = decide(machine, 64 * MIB, pages="2m", numa="bind:9", lock=True)
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
    """A request and the choice for it, by default all of it."""
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
def test_comparison(wanted: Any, found: Placement, warm: bool, word: str | None) -> None:
    texts = policy.find_mismatches(wanted[0], wanted[1], found, 8, warm=warm)
    assert len(texts) == (word is not None)
    assert all(str(word) in text for text in texts)


def test_few_huge_pages() -> None:
    assert policy.huge_page_message("b", granted("thp", 5 * MIB, huge_bytes=4 * MIB), 2 * MIB) == ""
    text = policy.huge_page_message("b", granted("4k", 5 * MIB, huge_bytes=2 * MIB), 2 * MIB)
    tells(text, "2.0 MiB of 5.0 MiB", "compact_memory")
    assert policy.huge_page_message("b", granted("4k", 5 * MIB), 0) == ""


def test_pages_left_after_repair() -> None:
    text = policy.misplaced_message("b", BIND, MIB, granted("4k", 8, nodes={0: MIB, 1: GIB}))
    tells(text, "1.0 MiB could not be moved", "1.0 MiB on node 0")
    spread = NumaPolicy("interleave", (0, 1))
    text = policy.misplaced_message("b", spread, MIB, granted("4k", 8, nodes={0: 3, 1: 5}))
    assert "3 B on node 0, 5 B on node 1" in text


@pytest.mark.parametrize(
    ("pages", "numa", "lock", "breaks", "touches"),
    [
        ("4k", BIND, True, True, False),
        ("2m", None, False, False, False),
        ("2m", None, False, True, True),
        ("2m", None, "onfault", False, False),
        ("2m", None, True, False, True),
        ("1g", BIND, False, False, True),
        ("1g", NumaPolicy("interleave", (0, 1)), False, False, False),
    ],
)
def test_pages_that_could_be_missing_later_are_touched_at_once(
    pages: Any, numa: Any, lock: Any, breaks: bool, touches: bool
) -> None:
    pools = {"2m": pool(2 * MIB, 4, may_break_promises=breaks), "1g": pool(GIB, 4)}
    assert policy.is_prefaulted(PlacementChoice(pages, numa, lock), Machine(pools)) == touches


# ---- CPUs that warm ----


def test_threads_cycle_through_the_policy_s_nodes() -> None:
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
