"""Models, plans and reports on several nodes name the node of each tensor and row."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from numa.books import node_bytes, page_nodes
from support.files.weight_bytes import write, write_hole
from unimem.engine import Decoder, embedded_model
from unimem.system import limits
from unimem.system.placement import Pages
from unimem.weights.opened import Weights

MB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
SIZES = (100, 3 * MB, 5000, 2 * MB + 4, 40_000, 12)
TINY = embedded_model()
DIMS = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", *SIZES)


def check_each_tensor(weights: Weights) -> None:
    look = weights.residency()
    for tensor in weights.tensors.values():
        first = tensor.address // PAGE * PAGE
        nodes = page_nodes(first, tensor.address + tensor.nbytes - first, PAGE)
        expected: Counter[int] = Counter()
        for i, node in enumerate(nodes.tolist()):
            low, high = first + i * PAGE, first + (i + 1) * PAGE
            expected[node] += min(high, tensor.address + tensor.nbytes) - max(low, tensor.address)
        part = look.tensors[tensor.name]
        assert {node: nbytes for node, nbytes in part.nodes.items() if nbytes} == dict(expected)
        assert part.mapped_bytes == part.nbytes == tensor.nbytes


@pytest.mark.parametrize("pages", ["4k", "thp", "2m"])
@pytest.mark.parametrize("numa", ["interleave:0,1", "bind:2"])
def test_each_tensor_of_a_copy(model: Path, pages: Pages, numa: str) -> None:
    with um.open_weights(model, load="copy", pages=pages, numa=numa, strict=True) as weights:
        check_each_tensor(weights)
        nodes = {node for node, nbytes in weights.residency().nodes.items() if nbytes}
        assert nodes == ({2} if numa == "bind:2" else {0, 1})


def test_each_tensor_of_a_mapped_file(model: Path) -> None:
    with um.open_weights(model, load="map", warm=True) as weights:
        (block,) = weights.blocks
        check_each_tensor(weights)
        kernel, ours = node_bytes(block.address, block.nbytes), weights.residency().nodes
        # The kernel counts all of the file's last page.
        assert set(kernel) == {node for node, nbytes in ours.items() if nbytes}
        assert sum(kernel.values()) - sum(ours.values()) == -block.nbytes % PAGE


# ---- staged models ----


@pytest.mark.parametrize(
    ("backing", "pages"),
    [("tmpfs", "4k"), ("tmpfs", "thp"), ("memfd", "4k"), ("memfd", "auto"), ("shm", "auto")],
)
@pytest.mark.parametrize(
    ("numa", "expected"),
    [
        ("bind:1", {1: 8 * MB}),
        ("bind:2", {2: 8 * MB}),  # a node without CPUs
        ("interleave:0,1", {0: 4 * MB, 1: 4 * MB}),
        ("weighted:0,2", {0: 4 * MB, 2: 4 * MB}),
        ("preferred:1", {1: 8 * MB}),
    ],
)
def test_pages_are_where_they_were_asked_for(
    backing: Any, pages: Any, numa: str, expected: dict[int, int], tmp_path: Path
) -> None:
    model = write_hole(tmp_path / "model.gguf", 8 * MB - 256)
    with um.stage(model, backing=backing, pages=pages, numa=numa, strict=True) as staged:
        assert staged.granted.nodes == expected
        with um.Block.map(staged.path) as block:
            block.warm()
            assert node_bytes(block.address, block.nbytes) == expected


# ---- plans and reports ----


def nodes_of_process() -> Counter[int]:
    """Return the bytes on each node, by numa_maps."""
    found: Counter[int] = Counter()
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        size = re.search(r" kernelpagesize_kB=(\d+)", line)
        for node, n in re.findall(r" N(\d+)=(\d+)", line):
            found[int(node)] += int(n) * (int(size[1]) << 10 if size else 4096)
    return found


@pytest.mark.parametrize(
    ("numa", "expected"), [("bind:2", {2: 12 * MB}), ("interleave:0,1", {0: 6 * MB, 1: 6 * MB})]
)
def test_a_row_says_on_which_nodes_it_is(numa: str, expected: dict[int, int]) -> None:
    with um.Block(12 * MB, pages="4k", numa=numa, warm=True, strict=True, category="staging"):
        report = um.report()
    (row,) = [row for row in report.rows if row.category == "staging"]
    assert row.granted is not None
    assert row.granted.nodes == expected


def test_the_rows_add_up_to_the_nodes_of_the_process() -> None:
    with um.Block(12 * MB, pages="4k", numa="interleave", warm=True, strict=True):
        report = um.report()
        kernel = nodes_of_process()
    rows: Counter[int] = Counter()
    for row in report.rows:
        if row.granted is not None:
            rows.update(row.granted.nodes)
    # Python's own memory moves a little between the two readings.
    assert rows.keys() == kernel.keys()
    for node, nbytes in kernel.items():
        assert abs(rows[node] - nbytes) < MB


def test_a_plan_names_the_node_whose_reads_are_nearest() -> None:
    """The two nodes with CPUs are equally near; the firmware says which one is faster."""
    found = um.plan(TINY, ctx=64).spread
    assert found is not None
    assert found.distances == {"one node": 10, "mirror": 10, "interleave": 15}
    assert [cost.distance for cost in found.nodes] == [15, 15, 27.5]
    assert [cost.alone_bytes is None for cost in found.nodes] == [False, False, True]
    assert found.numa == "mirror:1"
    assert "node 1 reads 25,600 MB/s (HMAT)" in found.reason
    before = os.sched_getaffinity(0)
    with Decoder(TINY, ctx=64, numa=found.numa) as decoder:
        assert decoder.weights.verify().nodes.keys() == {1}
        assert os.sched_getaffinity(0) == set(limits.nodes()[1].cpus)
        decoder.prefill([1, 2, 3])
        (kv,) = [row for row in decoder.report().rows if row.category == "kv"]
        assert kv.granted is not None
        assert set(kv.granted.nodes) == {1}
    assert os.sched_getaffinity(0) == before


def test_a_plan_is_held_against_the_nodes_that_it_is_for() -> None:
    nodes = limits.nodes()
    plan = um.plan(DIMS, ctx=100, numa="bind:1", pages="4k", load="copy")
    (check,) = [check for check in plan.checks if check.name.startswith("node")]
    assert (check.name, check.limit_bytes) == ("node 1", nodes[1].total_bytes)
    assert check.fits
    too_much = um.ModelDims(4096, 14336, 32, 8, 128, 32000, 32, 8192)
    plan = um.plan(too_much, ctx=100, numa="interleave:0,2", pages="4k", load="copy")
    checks = [check for check in plan.checks if check.name.startswith("node")]
    assert [check.name for check in checks] == ["node 0", "node 2"]
    assert not any(check.fits for check in checks)
    assert checks[0].needed_bytes == checks[1].needed_bytes
    assert not plan.fits


# ---- chunks of a store of prefixes ----


@pytest.mark.parametrize(("numa", "nodes"), [("bind:2", {2}), ("interleave:0,1", {0, 1})])
def test_chunks_in_ram_lie_on_their_nodes(tmp_path: Path, numa: str, nodes: set[int]) -> None:
    options: dict[str, Any] = {"ram_bytes": 8 * MB, "disk_bytes": 0, "chunk_tokens": 64}
    with (
        um.KVStore(tmp_path / "s", numa=numa, **options) as store,
        um.KVCache(2, 8, 64, 64, pages="4k") as kv,
    ):
        kv.reserve(64)
        kv.commit(64)
        assert store.put(kv, range(64), model="m") == 64
        path = Path(store.stat().tiers[0].path, "pool")
        with um.Block.map(path, category="staging") as block:
            block.warm()
            assert set(node_bytes(block.address, block.nbytes)) == nodes
        assert store.granted is not None
        assert set(store.granted.nodes) == nodes
