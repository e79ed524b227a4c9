"""Mirrored weights, and pages of the page cache moved between nodes."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from numa.books import drop_page_tables, move, node_bytes, page_nodes
from support.files.weight_bytes import check, write, write_hole
from unimem.system import limits
from unimem.system.placement import Pages

MB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
SIZES = (100, 3 * MB, 5000, 2 * MB + 4, 40_000, 12)
TINY = Path(um.__file__).parent / "engine" / "models" / "tiny.gguf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", *SIZES)


def nodes_of(block: um.Block) -> dict[int, int]:
    """Return the bytes on each node, by move_pages."""
    found = Counter(page_nodes(block.address, block.nbytes, PAGE).tolist())
    return {node: n * PAGE for node, n in sorted(found.items())}


# ---- copies ----


@pytest.mark.parametrize("pages", ["4k", "thp", "2m"])
@pytest.mark.parametrize(
    ("numa", "nodes"), [("mirror", (0, 1)), ("mirror:0-2", (0, 1, 2)), ("mirror:1", (1,))]
)
def test_each_node_has_a_copy(model: Path, pages: Pages, numa: str, nodes: Any) -> None:
    """By default these are the nodes with CPUs; the third has memory alone."""
    with um.open_weights(model, numa=numa, pages=pages, strict=True) as weights:
        assert tuple(weights.copies) == nodes
        assert len(weights.blocks) == len(nodes)
        for block, (node, copy) in zip(weights.blocks, weights.copies.items(), strict=True):
            assert nodes_of(block) == {node: block.nbytes} == copy.verify().nodes
            for name, tensor in copy.tensors.items():
                assert block.address <= tensor.address < block.address + block.nbytes
                assert (tensor.as_array() == weights.tensors[name].as_array()).all()
        check(weights)
        assert weights.verify().nodes == dict(
            zip(nodes, (block.nbytes for block in weights.blocks), strict=True)
        )


def on_node(node: int, work: Any) -> Any:
    """Return the result of a call in a thread on a node's CPUs."""
    said = []

    def run() -> None:
        os.sched_setaffinity(0, limits.nodes()[node].cpus)
        said.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return said[0]


def test_threads_read_the_copy_of_their_node(model: Path) -> None:
    with um.open_weights(model, numa="mirror", strict=True) as weights:
        for node in (0, 1):
            tensors = on_node(node, lambda: weights.tensors)
            at = [tensors[name].address for name in tensors]
            assert at == [each.address for each in weights.copies[node].tensors.values()]
            assert on_node(node, weights.on) is weights.copies[node]
        assert weights.on(2) is weights.copies[1]  # it is nearer
    with um.open_weights(model, numa="mirror:2", strict=True) as weights:
        assert on_node(1, weights.on) is weights.copies[2]


def test_repair_brings_each_copy_back_to_its_node(model: Path) -> None:
    with um.open_weights(model, numa="mirror", pages="4k", strict=True) as weights:
        first, second = weights.blocks
        move(first.address, first.nbytes, PAGE, 1)
        move(second.address, MB, PAGE, 2)
        assert weights.copies[0].verify().nodes == {1: first.nbytes}
        assert weights.copies[1].verify().nodes == {1: second.nbytes - MB, 2: MB}
        assert weights.repair().nodes == {0: first.nbytes, 1: second.nbytes}
        assert (nodes_of(first), nodes_of(second)) == ({0: first.nbytes}, {1: second.nbytes})
        check(weights)


def test_what_was_planned_is_what_is_there(model: Path) -> None:
    plan = um.plan(model, numa="mirror", pages="4k")
    assert plan.load in ("copy", "direct")
    assert plan.facts["numa"] == "mirror: 2 copies of the weights, on nodes 0-1"
    checks = {one.name: one for one in plan.checks if one.name.startswith("node")}
    with um.open_weights(model, numa="mirror", pages="4k", strict=True) as weights:
        report = um.report()
        (nbytes,) = {block.nbytes for block in weights.blocks}
    assert {name: one.needed_bytes for name, one in checks.items()} == dict.fromkeys(
        ("node 0", "node 1"), nbytes
    )
    for category in ("weights:i8", "weights:padding"):
        row = report[category]
        assert row.nbytes == plan[category].nbytes
        assert row.granted is not None
        assert row.granted.nodes == {0: row.nbytes // 2, 1: row.nbytes // 2}
    assert report["weights:i8"].nbytes == 2 * sum(SIZES)


def test_a_stage_on_each_node(model: Path) -> None:
    with um.stage(model, numa="mirror", strict=True) as staged:
        assert tuple(staged.copies) == (0, 1)
        for node, copy in staged.copies.items():
            with um.Block.map(copy.path) as block:
                block.warm()
                assert set(nodes_of(block)) == {node}


# ---- a node that has no room ----


@pytest.fixture
def full_node() -> Iterator[int]:
    """Leave a node 32 to 48 MB of room."""
    room = limits.nodes()[2].available_bytes
    nbytes = (room - 40 * MB) // (2 * MB) * (2 * MB)
    with um.Block(nbytes, pages="thp", numa="bind:2", warm=2):
        yield 2


def test_a_node_without_room_is_refused_before_anything_is_read(
    full_node: int, tmp_path: Path
) -> None:
    model = write_hole(tmp_path / "model.gguf", 64 * MB)
    read: list[tuple[int, int]] = []
    named = r"a copy on node 2 needs 64\.0 MiB, and node 2 has \d+\.\d MiB of .* available"
    plan = um.plan(model, numa="mirror:0,2", pages="4k", strict=True)
    (worst,) = [one for one in plan.checks if not one.fits]
    assert (worst.name, worst.needed_bytes // MB, worst.is_hard) == ("node 2", 64, True)
    with pytest.raises(um.PlacementError, match=named):
        um.open_weights(
            model, numa="mirror:0,2", pages="4k", strict=True, progress=lambda *n: read.append(n)
        )
    assert read == []
    # Without `strict` the other nodes get their copies, and the plan says so.
    plan = um.plan(model, numa="mirror:0,2", pages="4k")
    with pytest.warns(um.PlacementWarning, match=named):
        weights = um.open_weights(model, numa="mirror:0,2", pages="4k")
    with weights:
        assert list(weights.copies) == [0]
        assert weights.on(2) is weights.copies[0]
        assert plan["weights:i8"].nbytes == um.report()["weights:i8"].nbytes == 64 * MB


# ---- the page cache ----


@pytest.fixture(params=["memory", "9p"])
def mapped(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a model to a file system in memory, and one to a disk, here 9p."""
    if request.param == "memory":
        return write(tmp_path / "model.gguf", *SIZES)
    assert TINY.stat().st_size > 8 * PAGE
    return TINY


@pytest.mark.parametrize("numa", ["bind:0", "bind:1", "bind:2", "preferred:1", "interleave:0,2"])
def test_pages_of_the_page_cache_are_moved(mapped: Path, numa: str) -> None:
    wanted = {int(node) for node in re.findall(r"\d", numa)}
    with um.open_weights(mapped, load="map", numa=numa, strict=True) as weights:
        (block,) = weights.blocks
        nodes = page_nodes(block.address, block.nbytes, PAGE)
        assert set(nodes.tolist()) <= wanted
        if len(wanted) > 1 and block.nbytes > 4 * MB:
            assert len(set(nodes.tolist())) == 2
        assert set(weights.residency().nodes) <= wanted
        check(weights)
    # The pages belong to the file, for every process.
    with um.Block.map(mapped) as block:
        block.warm()
        assert (page_nodes(block.address, block.nbytes, PAGE) == nodes).all()


def test_repair_moves_what_has_come_elsewhere(mapped: Path) -> None:
    with um.open_weights(mapped, load="map", numa="bind:1", strict=True) as weights:
        (block,) = weights.blocks
        n_pages = -(-block.nbytes // PAGE)
        move(block.address, block.nbytes, PAGE, 2)
        assert weights.verify().nodes == {2: n_pages * PAGE}
        assert weights.repair().nodes == {1: n_pages * PAGE}
        assert nodes_of(block) == {1: n_pages * PAGE}


def test_pages_that_others_have_mapped_stay_and_are_told(model: Path) -> None:
    with um.Block.map(model) as other:
        other.warm()
        before = page_nodes(other.address, other.nbytes, PAGE)
        wanted = 2 if 2 not in before else 1
        with pytest.warns(um.PlacementWarning, match=rf"could not be moved .*bind:{wanted}"):
            weights = um.open_weights(model, load="map", numa=f"bind:{wanted}")
        with weights:
            assert (page_nodes(other.address, other.nbytes, PAGE) == before).all()
            drop_page_tables(other.address, other.nbytes)
            assert set(weights.repair().nodes) == {wanted}
            check(weights)


def test_a_mapping_has_no_copies(model: Path) -> None:
    with pytest.raises(um.PlacementError, match=r"numa='mirror'.*load='copy'"):
        um.open_weights(model, load="map", numa="mirror", strict=True)
    with pytest.warns(um.PlacementWarning, match="numa='mirror'"):
        weights = um.open_weights(model, load="map", numa="mirror")
    with weights:
        assert weights.copies == {}
        assert weights.on() is weights


def test_a_copy_of_a_copied_model_is_told_by_its_nodes(tmp_path: Path) -> None:
    """The model in the package, read past the page cache, is tried too."""
    model = shutil.copy(TINY, tmp_path)
    with um.open_weights(model, load="copy", numa="mirror", strict=True) as weights:
        blocks = weights.blocks
        assert [node_bytes(block.address, block.nbytes) for block in blocks] == [
            {node: block.nbytes} for node, block in enumerate(blocks)
        ]
        first, second = weights.copies.values()
        for name, tensor in first.tensors.items():
            assert np.array_equal(
                tensor.as_array().view("uint8"), second.tensors[name].as_array().view("uint8")
            )
