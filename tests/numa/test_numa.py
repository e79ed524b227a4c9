"""Placement on several NUMA nodes is what the kernel says of the pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Unpack

import numpy as np
import pytest

import unimem as um
from numa.books import NODES, drop_page_tables, meminfo, move, node_bytes, numastat, page_nodes
from unimem.system import limits
from unimem.system.placement import Pages, PlacementOptions

MB = 1 << 20
PAGES: tuple[Pages, ...] = ("4k", "thp", "2m")
UNIT = {"4k": 4096, "thp": 2 * MB, "2m": 2 * MB}  # memory that lies on one node
# Two nodes cannot share an odd number of units evenly.
NBYTES = {"4k": 16 * MB + 4096, "thp": 18 * MB, "2m": 18 * MB}
WEIGHTS = Path("/sys/kernel/mm/mempolicy/weighted_interleave")


def nodes_of(block: um.Block) -> dict[int, int]:
    """Return resident bytes on each node, after unimem and the kernel agree on them."""
    nodes = node_bytes(block.address, block.reserved_bytes)
    assert block.verify().nodes == nodes
    assert sum(nodes.values()) == block.verify().resident_bytes
    return nodes


def made(pages: Pages, numa: str, *, shared: bool = False) -> um.Block:
    """Make a warm block that has exactly its requested placement."""
    nbytes = NBYTES[pages]
    block = um.Block(nbytes, pages=pages, numa=numa, shared=shared, warm=True, strict=True)
    placement = block.verify()
    assert placement.pages == pages
    assert placement.resident_bytes == block.nbytes == nbytes
    assert placement.huge_bytes == (0 if pages == "4k" else nbytes)
    return block


def fallen_back(match: str, nbytes: int, **options: Unpack[PlacementOptions]) -> um.Block:
    """Return a block that has less than it asked for, as one warning says."""
    with pytest.warns(um.PlacementWarning, match=match) as warned:
        block = um.Block(nbytes, **options)
    assert len(warned) == 1
    return block


def is_even(nodes: dict[int, int], among: set[int], unit: int) -> bool:
    """Tell whether these nodes have the same, up to one unit, and the others nothing."""
    return set(nodes) == among and max(nodes.values()) - min(nodes.values()) <= unit


# ---- the machine ----


def test_the_machine_has_three_nodes_one_without_cpus() -> None:
    assert (NODES / "has_memory").read_text().strip() == "0-2"
    assert (NODES / "has_cpu").read_text().strip() == "0-1"


def test_limits_know_the_nodes() -> None:
    nodes = limits.nodes()
    assert list(nodes) == [0, 1, 2]
    for number, node in nodes.items():
        folder = NODES / f"node{number}"
        memory = meminfo(number)
        assert node.id == number
        assert node.allowed
        assert node.total_bytes == memory["MemTotal"]
        assert abs(node.free_bytes - memory["MemFree"]) < 32 * MB
        assert node.free_bytes <= node.available_bytes <= node.total_bytes
        assert node.distances == tuple(map(int, (folder / "distance").read_text().split()))
        assert node.cpus == limits.parse_list((folder / "cpulist").read_text())
        pool = limits.huge_pools()["2m"].nodes[number]
        assert pool == (memory["HugePages_Total"], memory["HugePages_Free"]) == (32, 32)
    assert nodes[2].cpus == ()
    assert nodes[0].distances == (10, 20, 30)
    assert [node.read_mb_per_second for node in nodes.values()] == [12_800, 25_600, 6_400]


# ---- policies ----


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize(
    ("numa", "among"),
    [
        ("interleave:0,1", {0, 1}),
        ("interleave", {0, 1, 2}),
        ("interleave:0-2", {0, 1, 2}),
        ("bind:0", {0}),
        ("bind:1", {1}),
        ("bind:2", {2}),
        ("preferred:0", {0}),
        ("preferred:1", {1}),
        ("preferred:2", {2}),
    ],
)
def test_nodes_that_have_the_same(pages: Pages, numa: str, among: set[int]) -> None:
    with made(pages, numa) as block:
        assert is_even(nodes_of(block), among, UNIT[pages])


@pytest.mark.parametrize(
    ("numa", "among"), [("bind:0,2", {0, 2}), ("bind:0-1", {0, 1}), ("preferred:1-2", {1, 2})]
)
@pytest.mark.parametrize("pages", PAGES)
def test_any_of_several_nodes(pages: Pages, numa: str, among: set[int]) -> None:
    with made(pages, numa) as block:
        assert set(nodes_of(block)) <= among
        wrong = ({0, 1, 2} - among).pop()
        move(block.address, 3 * UNIT[pages], UNIT[pages], wrong)
        assert nodes_of(block)[wrong] == 3 * UNIT[pages]
        assert set(block.repair().nodes) <= among
        assert set(nodes_of(block)) <= among


@pytest.fixture
def three_to_one() -> Iterator[None]:
    """Set the kernel's weights to 3 for node 0, and to 1 for the others."""
    before = {file: file.read_text() for file in WEIGHTS.iterdir() if file.name != "auto"}
    assert len(before) == 3
    try:
        for file in before:
            file.write_text("3" if file.name == "node0" else "1")
        yield
    finally:
        for file, weight in before.items():
            file.write_text(weight)


@pytest.mark.usefixtures("three_to_one")
@pytest.mark.parametrize(
    ("pages", "numa", "shares"),
    [
        ("4k", "weighted:0,1", {0: 0.75, 1: 0.25}),
        ("thp", "weighted:0,1", {0: 0.75, 1: 0.25}),
        ("2m", "weighted:0,1", {0: 0.75, 1: 0.25}),
        ("4k", "weighted", {0: 0.6, 1: 0.2, 2: 0.2}),
    ],
)
def test_weighted(pages: Pages, numa: str, shares: dict[int, float]) -> None:
    n_units = 32 if pages != "4k" else 8192
    with um.Block(n_units * UNIT[pages], pages=pages, numa=numa, strict=True) as block:
        block.warm(threads=2)
        found = {node: nbytes / block.nbytes for node, nbytes in nodes_of(block).items()}
        assert found == pytest.approx(shares, abs=0.02)


def test_a_policy_holds_for_what_grows() -> None:
    with um.Block(2 * MB, reserve=64 * MB, pages="thp", numa="bind:1", strict=True) as block:
        block.commit(32 * MB)
        block.as_array()[:] = 1
        assert nodes_of(block) == {1: 32 * MB}
        block.release(8 * MB, 8 * MB)
        assert nodes_of(block) == {1: 24 * MB}
        block.commit(32 * MB)
        block.warm()
        assert nodes_of(block) == {1: 32 * MB}


KINDS = [("4k", False), ("thp", False), ("2m", False), ("4k", True), ("2m", True)]


@pytest.mark.parametrize(("pages", "shared"), KINDS)
def test_interleave_goes_on_where_a_block_grows(pages: Pages, shared: bool) -> None:
    numa, unit = "interleave:0,1", UNIT[pages]
    options: PlacementOptions = {"pages": pages, "numa": numa, "strict": True}
    with um.Block(unit, reserve=12 * unit, shared=shared, **options) as block:
        for n_units in range(1, 13):
            block.commit(n_units * unit)
            block.warm()
        assert is_even(nodes_of(block), {0, 1}, 0)


def test_what_stands_on_blocks_is_placed() -> None:
    placement: um.PlacementOptions = {"numa": "bind:1", "warm": True, "strict": True}
    with ExitStack() as stack:
        tape = stack.enter_context(um.Tape(4 * MB, **placement))
        grid = stack.enter_context(um.Grid(64 << 10, 32, **placement))
        layout = stack.enter_context(um.Layout(2 * MB, 2 * MB, 2 * MB, **placement))
        cache = stack.enter_context(um.KVCache(2, 4, 64, 1024, **placement))
        assert isinstance(layout.weights, um.Tape)
        tapes = (tape, grid.tape, layout.weights, layout.scratch, layout.history)
        for block in (*(part.block for part in tapes), cache.block):
            assert block is not None
            assert nodes_of(block) == {1: block.nbytes}


# ---- repair ----


@pytest.mark.parametrize(("pages", "shared"), KINDS)
@pytest.mark.parametrize("numa", ["bind:1", "interleave:0,1", "interleave:0-2"])
def test_repair(pages: Pages, shared: bool, numa: str) -> None:
    unit, nbytes = UNIT[pages], NBYTES[pages]
    with made(pages, numa, shared=shared) as block:
        words = block.as_array("uint64")
        words[:] = np.arange(words.size, dtype=np.uint64)
        before = page_nodes(block.address, nbytes, unit)
        balance = nodes_of(block)

        # Repair moves each page of a part back.
        wrong = 2 if numa != "interleave:0-2" else 0
        move(block.address + unit, 5 * unit, unit, wrong)
        assert nodes_of(block) != balance
        assert block.repair().nodes == nodes_of(block) == balance
        assert (page_nodes(block.address, nbytes, unit) == before).all()

        # If everything moved, the pattern may begin anywhere.
        move(block.address, nbytes, unit, wrong)
        assert nodes_of(block) == {wrong: nbytes}
        placement = block.repair()
        assert nodes_of(block) == placement.nodes
        assert is_even(placement.nodes, set(balance), unit)
        assert placement.pages == pages
        assert (words == np.arange(words.size, dtype=np.uint64)).all()
        del words


@pytest.mark.usefixtures("three_to_one")
def test_repair_by_weights() -> None:
    with made("4k", "weighted:0,1") as block:
        before = page_nodes(block.address, block.nbytes, 4096)
        move(block.address, block.nbytes // 2 & -4096, 4096, 2)
        block.repair()
        assert (page_nodes(block.address, block.nbytes, 4096) == before).all()


@pytest.mark.parametrize(("numa", "among"), [("bind:1", {1}), ("interleave:0,1", {0, 1})])
def test_huge_pages_of_shared_memory(numa: str, among: set[int]) -> None:
    # `collapse` joins existing small pages.
    with um.Block(16 * MB, pages="thp", numa=numa, shared=True, warm=True, strict=True) as block:
        assert block.verify().huge_bytes == 16 * MB
        assert is_even(nodes_of(block), among, 2 * MB)
    with um.Block(16 * MB, pages="auto", numa=numa, shared=True, reserve=2048 * MB) as block:
        block.warm(threads=2)
        assert block.granted.pages == "4k"
        assert block.collapse().huge_bytes == 16 * MB
        assert is_even(nodes_of(block), among, 2 * MB)


@pytest.mark.parametrize("numa", ["bind:1", "interleave:0,1", "interleave:0-2"])
@pytest.mark.parametrize("pages", PAGES)
def test_memory_that_is_mapped_twice(pages: Pages, numa: str) -> None:
    """Its policy is the file's; pages elsewhere are moved although they are mapped twice."""
    piece, unit = 4 * MB, UNIT[pages]
    among = {1} if numa == "bind:1" else {0, 1} if numa == "interleave:0,1" else {0, 1, 2}
    with um.Block._mirrored(
        3 * piece, piece, pages=pages, numa=numa, warm=True, strict=True
    ) as block:
        images = block.as_array("uint64").reshape(6, -1)
        images[::2] = np.arange(images[::2].size).reshape(3, -1)
        assert is_even(block.verify().nodes, among, unit)
        assert sum(block.verify().nodes.values()) == 3 * piece
        for first in range(0, 6, 2):
            place, mirror = (block.address + i * piece for i in (first, first + 1))
            drop_page_tables(mirror, piece)
            move(place, piece, unit, 2)
        assert set(block.verify().nodes) == {2}
        assert block.repair().nodes == block.granted.nodes
        assert is_even(block.granted.nodes, among, unit)
        assert block.granted.huge_bytes == (0 if pages == "4k" else 3 * piece)
        # Touch the pages again, through both mappings.
        assert (page_nodes(block.address, block.nbytes, unit) >= 0).all()
        assert (images[::2].ravel() == np.arange(images[::2].size)).all()
        assert (images[::2] == images[1::2]).all()
        del images


def test_repair_leaves_what_is_right() -> None:
    with made("4k", "interleave:0,1") as block:
        before = page_nodes(block.address, block.nbytes, 4096)
        assert block.repair().nodes == nodes_of(block)
        assert (page_nodes(block.address, block.nbytes, 4096) == before).all()


def test_repair_says_what_it_could_not_move() -> None:
    # The kernel moves no page that is mapped twice, unless it moves it for all processes.
    with made("4k", "bind:1", shared=True) as block:
        move(block.address, 8 * MB, 4096, 0)
        with um.Block.attach(block.fileno(), writable=True) as second:
            second.warm()
            with pytest.warns(um.PlacementWarning, match=r"8\.0 MiB.*node.* 0"):
                placement = block.repair()
        assert placement.nodes == {0: 8 * MB, 1: block.nbytes - 8 * MB}
        assert block.repair().nodes == {1: block.nbytes}


# ---- nodes that cannot give ----


@pytest.fixture
def full_node() -> Iterator[int]:
    """Leave a node 32 to 48 MB of room."""
    room = limits.nodes()[2].available_bytes
    filler = um.Block((room - 40 * MB) // (2 * MB) * (2 * MB), pages="thp", numa="bind:2", warm=2)
    with filler:
        assert set(nodes_of(filler)) == {2}
        yield 2


@pytest.mark.parametrize("warm", [False, True])
def test_a_full_node_is_named(full_node: int, warm: bool) -> None:
    before = limits.nodes()[full_node].available_bytes
    with pytest.raises(um.PlacementError, match=f"node {full_node}"):
        um.Block(96 * MB, pages="4k", numa=f"bind:{full_node}", warm=warm, strict=True)
    assert abs(limits.nodes()[full_node].available_bytes - before) < 8 * MB
    named = f"node {full_node}"
    with fallen_back(named, 96 * MB, pages="4k", numa=f"bind:{full_node}", warm=warm) as block:
        block.as_array()[:] = 1
        nodes = nodes_of(block)
        assert sum(nodes.values()) == 96 * MB
        assert nodes.get(full_node, 0) < 64 * MB


def test_repair_with_a_full_node(full_node: int) -> None:
    numa = f"preferred:{full_node}"
    with fallen_back(r"MiB on node [01]", 64 * MB, pages="4k", numa=numa, warm=True) as block:
        assert nodes_of(block)[full_node] < 64 * MB
        with pytest.warns(um.PlacementWarning, match=r"could not be moved .*MiB on node [01]"):
            block.repair()
        assert sum(nodes_of(block).values()) == 64 * MB


def test_a_node_that_is_full_when_memory_is_touched() -> None:
    nbytes = limits.nodes()[2].available_bytes // 10 * 6 // (2 * MB) * (2 * MB)
    with (
        um.Block(nbytes, pages="thp", numa="bind:2", strict=True) as first,
        um.Block(nbytes, pages="thp", numa="bind:2", strict=True) as second,
        um.Block(2 * MB, reserve=nbytes, pages="thp", numa="bind:2", strict=True) as third,
    ):
        first.warm()
        # The kernel would kill this process.
        with pytest.raises(um.PlacementError, match="node 2"):
            second.warm()
        with pytest.raises(um.PlacementError, match="node 2"):
            third.commit(nbytes)
        assert nodes_of(second) == {}
        assert third.committed_bytes == 2 * MB
        third.warm()
        assert nodes_of(third) == {2: 2 * MB}


def test_a_pool_is_full_on_one_node() -> None:
    # The three pools have 192 MB, that of node 1 has 64.
    with pytest.raises(um.PlacementError, match=r"(?s)node 1.*nr_hugepages"):
        um.Block(80 * MB, pages="2m", numa="bind:1", strict=True)
    with fallen_back("node 1", 80 * MB, pages="2m", numa="bind:1", warm=True) as block:
        assert block.granted.pages == "thp"
        assert nodes_of(block) == {1: 80 * MB}
    with um.Block(80 * MB, numa="bind:1", warm=True) as block:
        assert nodes_of(block) == {1: 80 * MB}
    assert limits.huge_pools()["2m"].nodes[1] == (32, 32)


@pytest.mark.parametrize(
    ("numa", "named", "among"),
    [
        ("bind:5", "5", None),
        ("preferred:1023", "1023", None),
        ("interleave:5,700-702", "5,700", None),
        ("bind:1,5", "5", {1}),
        ("interleave:0,1,5", "5", {0, 1}),
        ("preferred:2,5", "5", {2}),
    ],
)
def test_nodes_that_do_not_exist(numa: str, named: str, among: set[int] | None) -> None:
    with pytest.raises(um.PlacementError, match=named):
        um.Block(4 * MB, numa=numa, strict=True)
    with fallen_back(named, 4 * MB, pages="4k", numa=numa, warm=True) as block:
        nodes = nodes_of(block)
        assert sum(nodes.values()) == 4 * MB
        assert among is None or is_even(nodes, among, 4096)


# ---- warming ----


@pytest.mark.parametrize("node", [0, 1])
def test_warming_threads_run_on_the_node(node: int) -> None:
    with um.Block(32 * MB, pages="4k", numa=f"bind:{node}", strict=True) as block:
        affinity = os.sched_getaffinity(0)
        before = numastat(node)
        block.warm(threads=2)
        given = {name: count - before[name] for name, count in numastat(node).items()}
        assert os.sched_getaffinity(0) == affinity
        assert given["local_node"] >= 0.98 * 8192
        assert given["other_node"] <= 0.05 * 8192


def test_warming_threads_are_spread_over_the_nodes() -> None:
    # A page that may lie on both nodes goes to the node of the touching thread.
    with um.Block(32 * MB, pages="4k", numa="bind:0,1", strict=True) as block:
        block.warm(threads=2)
        assert is_even(nodes_of(block), {0, 1}, 4 * MB)


def test_warming_a_node_without_cpus() -> None:
    seen = []
    with um.Block(32 * MB, pages="4k", numa="bind:2", strict=True) as block:
        block.warm(threads=4, progress=lambda done, total: seen.append((done, total)))
        assert nodes_of(block) == {2: 32 * MB}
    assert seen[-1] == (32 * MB, 32 * MB)
