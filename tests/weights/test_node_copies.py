"""Mirrored weights, and mapped ones that are moved, on a machine with one node.

A second node is invented if needed: memory bound to it lies anywhere, with a warning. tests/numa
asks the kernel, on three nodes.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files.weight_bytes import READS, check, write
from unimem.engine import Decoder, embedded_model
from unimem.engine.model_memory import Reader
from unimem.system import limits
from unimem.system.limits import Node
from unimem.weights.loading import ONE_COPY
from unimem.weights.node_copies import find_nearest
from unimem.weights.opened import WeightsCopy

MIB = 1 << 20
SIZES = (100, 3 * MIB, 5000, 12)
NODE = min(n for n, node in limits.nodes().items() if node.allowed and node.total_bytes)
OTHER = 1000  # a node that no machine has
CPUS = sorted(os.sched_getaffinity(0))
CPUS_OF = {NODE: CPUS[::2], OTHER: CPUS[1::2] or CPUS}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", *SIZES)


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second node, as large as the first."""
    room = limits.nodes()[NODE]
    made = {
        n: replace(room, id=n, cpus=tuple(cpus), distances=(10, 20) if n == NODE else (20, 10))
        for n, cpus in CPUS_OF.items()
    }
    monkeypatch.setattr(limits, "nodes", lambda: made)


def opened(path: Path | str, **options: Any) -> um.Weights:
    with pytest.warns(um.PlacementWarning, match=f"numa='bind:{OTHER}'"):
        return um.open_weights(path, numa="mirror", pages="4k", **options)


def test_on_one_node_nothing_changes(model: Path) -> None:
    if len(limits.nodes()) > 1:
        pytest.skip("this machine has several nodes: make test-numa")
    plan = um.plan(model, numa="mirror")
    same = um.plan(model)
    assert (plan.rows, plan.numa) == (same.rows, "mirror")
    assert plan.facts["numa"] == ONE_COPY
    with um.open_weights(model, numa="mirror", strict=True) as weights:
        assert (weights.load, weights.copies) == (same.load, {})
        assert weights.load_reason.endswith(ONE_COPY)
        assert weights.on() is weights.on(NODE) is weights
        check(weights)
        with pytest.raises(ValueError, match=rf"node: expected one of {NODE}, got {OTHER}"):
            weights.on(OTHER)
    assert um.plan(model, numa="mirror", load="repack").rows == same.rows  # nothing is repacked
    with Decoder(embedded_model(), ctx=64, numa="mirror") as decoder:
        assert decoder.report().facts["numa"] is None


@pytest.mark.locks
@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("load", READS)
def test_copies_are_one_row_to_the_byte(model: Path, load: Any) -> None:
    plan = um.plan(model, numa="mirror", pages="4k", load=load)
    with opened(model, load=load) as weights:
        report = um.report()
        assert list(weights.copies) == [NODE, OTHER]
        first, second = (copy.tensors for copy in weights.copies.values())
        for name, tensor in first.items():
            other = second[name].as_array()
            assert not other.flags.writeable
            assert second[name].address != tensor.address
            assert (other == tensor.as_array()).all()
        check(weights)
        assert weights.mapped_bytes == sum(block.nbytes for block in weights.blocks)
        assert weights.verify().resident_bytes == weights.mapped_bytes
        weights.lock("onfault")
        assert weights.verify().locked_bytes == weights.mapped_bytes
        weights.lock(False)
        assert weights.verify().locked_bytes == 0
        assert report["weights:i8"].nbytes == 2 * sum(SIZES)
        for category in ("weights:i8", "weights:padding"):
            assert report[category].nbytes == plan[category].nbytes
        named = [mapping.name for mapping in report.mappings]
        assert {f"{model} (copy on node {node})" for node in (NODE, OTHER)} <= set(named)
        assert f"a copy on each of the nodes {NODE},{OTHER}" in repr(weights)
        with pytest.raises(BufferError):  # `other` uses it
            weights.close()
        assert weights.copies  # nothing was closed
        del other
    with pytest.raises(um.ClosedError):
        first["t0"].as_array()


def test_the_nearest_copy() -> None:
    nodes = {
        n: Node(n, 1, 1, 1, (), distances, True)
        for n, distances in {0: (10, 20, 17), 1: (20, 10, 28), 4: (17, 28, 10)}.items()
    }
    assert find_nearest(nodes, (0, 1)) == {0: 0, 1: 1, 4: 0}
    assert find_nearest(nodes, (4, 1)) == {0: 4, 1: 1, 4: 4}


@pytest.mark.usefixtures("two_nodes")
def test_a_failed_copy_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = um.report().total_bytes

    def refuse(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("unimem.weights.node_copies.run_in_threads", refuse)
    with pytest.raises(KeyboardInterrupt):
        um.open_weights(model, numa="mirror", load="copy", pages="4k")
    assert "weights:i8" not in [row.category for row in um.report().rows if row.nbytes]
    assert um.report().total_bytes - before < sum(SIZES)


@pytest.mark.usefixtures("two_nodes")
def test_a_model_staged_on_each_node(model: Path) -> None:
    told: list[tuple[int, int]] = []
    with pytest.warns(um.PlacementWarning, match=f"numa='bind:{OTHER}'"):
        staged = um.stage(model, numa="mirror", pages="4k", progress=lambda *n: told.append(n))
    with staged:
        assert list(staged.copies) == [NODE, OTHER]
        assert staged.copies[NODE] is staged
        paths = {each.path for each in staged.copies.values()}
        assert len(paths) == 2
        for path in paths:
            assert Path(path).read_bytes() == model.read_bytes()
        assert um.report()["staging"].nbytes >= 2 * model.stat().st_size
    assert all(each.closed for each in staged.copies.values())
    assert told[-1] == (2 * model.stat().st_size,) * 2
    assert [done for done, of in told if done == of] == [told[-1][0]]


@pytest.mark.usefixtures("two_nodes")
def test_decoders_in_two_threads_read_two_copies() -> None:
    found: dict[int, tuple[Any, set[int]]] = {}
    both = threading.Barrier(2)

    def read(number: int) -> None:
        both.wait(60)
        reader = Reader(weights)
        found[number] = reader.contents, os.sched_getaffinity(0)
        both.wait(60)
        reader.end()

    with opened(embedded_model(), load="copy") as weights:
        # The second sees the first.
        first = Reader(weights)
        assert isinstance(first.contents, WeightsCopy)
        assert os.sched_getaffinity(0) == set(CPUS_OF[first.contents.node])
        first.end()
        assert os.sched_getaffinity(0) == set(CPUS)
        threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {contents.node for contents, _ in found.values()} == {NODE, OTHER}
    for contents, cpus in found.values():
        assert cpus == set(CPUS_OF[contents.node])


@pytest.mark.usefixtures("two_nodes")
def test_a_decoder_reads_one_copy_and_says_which() -> None:
    with Decoder(embedded_model(), ctx=64) as decoder:
        expected = "".join(decoder.generate("Once upon a time", 8))
    with opened(embedded_model(), load="copy") as weights, Decoder(weights, ctx=64) as decoder:
        # A single CPU belongs to both nodes.
        near = [n for n in CPUS_OF if os.sched_getaffinity(0) == set(CPUS_OF[n])] or [NODE]
        said = decoder.report().facts["numa"]
        copies = f"copies of the weights on nodes {NODE},{OTHER}"
        (node,) = [n for n in near if said == f"{copies}; that on node {n} is read"]
        read = {tensor.address for tensor in decoder._memory.tensors.values()}
        assert read == {tensor.address for tensor in weights.copies[node].tensors.values()}
        assert "".join(decoder.generate("Once upon a time", 8)) == expected
    assert os.sched_getaffinity(0) == set(CPUS)


@pytest.mark.usefixtures("two_nodes")
def test_a_layout_for_mirrored_weights() -> None:
    with pytest.warns(um.PlacementWarning, match=f"numa='bind:{OTHER}'"):
        layout = um.Layout.for_model(embedded_model(), ctx=64, numa="mirror")
    assert isinstance(layout.weights, um.Weights)
    assert layout.plan is not None
    with layout, Decoder(layout.weights, ctx=64, layout=layout) as decoder:
        report = decoder.report()
        assert layout.history.block.requested["numa"] is None
        for row in layout.plan.rows:
            if row.category not in ("diagnostics", "other"):
                assert report[row.category].nbytes == row.nbytes, row.category
        layout.freeze()


@pytest.mark.parametrize(
    "call",
    [
        lambda path: um.Block(4096, numa="mirror"),
        lambda path: um.Layout(4096, 4096, 4096, numa="mirror:0"),
        lambda path: um.KVCache(1, 1, 64, 64, numa="mirror"),
        lambda path: um.KVStore(path.parent / "s", ram_bytes=MIB, numa="mirror"),
    ],
)
def test_objects_without_copies_refuse_mirror(model: Path, call: Any) -> None:
    with pytest.raises(ValueError, match=r"numa.*mirror"):
        call(model)


def test_all_memory_of_a_decoder_lies_on_its_node() -> None:
    numa = f"bind:{NODE}"
    with Decoder(embedded_model(), ctx=64, numa=numa) as decoder:
        placed = [decoder.layout.history.block, decoder.layout.scratch.block]
        placed += decoder.weights.blocks
        assert {block.requested["numa"] for block in placed} == {numa}
        assert all(set(block.verify().nodes) == {NODE} for block in placed)


def test_a_layout_is_placed_already() -> None:
    with (
        um.Layout.for_model(embedded_model(), ctx=64) as layout,
        pytest.raises(ValueError, match="numa='mirror': the layout's memory is placed already"),
    ):
        Decoder(embedded_model(), ctx=64, layout=layout, numa="mirror")


@pytest.mark.parametrize("numa", [f"bind:{NODE}", f"preferred:{NODE}", f"interleave:{NODE}"])
def test_a_mapped_file_on_its_nodes(model: Path, numa: str) -> None:
    with um.open_weights(model, load="map", numa=numa, strict=True) as weights:
        (block,) = weights.blocks
        assert (weights.load, block.requested["numa"]) == ("map", numa)
        assert weights.verify().nodes == {NODE: weights.verify().resident_bytes}
        assert weights.residency().mapped_bytes == block.nbytes
        assert weights.repair() == weights.verify()
        check(weights)


def test_a_mapped_file_on_missing_nodes(model: Path) -> None:
    named = f"node {OTHER} is offline or does not exist"
    with pytest.raises(um.PlacementError, match=named):
        um.open_weights(model, load="map", numa=f"bind:{OTHER}", strict=True)
    with pytest.warns(um.PlacementWarning, match=named) as warned:
        weights = um.open_weights(model, load="map", numa=f"bind:{OTHER}")
    with weights:
        assert len(warned) == 1
        with pytest.raises(ValueError, match="has no NUMA policy"):
            weights.repair()
    with (
        um.Tape(4 * MIB) as tape,
        um.open_weights(model, tape=tape) as weights,
        pytest.raises(ValueError, match=r"tape\.block\.repair"),
    ):
        weights.repair()
