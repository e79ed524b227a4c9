"""NUMA policies of blocks, as far as a machine with one node can show them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import unimem as um
from conftest import Run
from support.kernel import proc_maps
from support.kernel.seccomp import FORBID, NO_SECCOMP
from support.processes.child_checks import CHECKS
from unimem.system import limits

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20
NODE = min(n for n, node in limits.nodes().items() if node.allowed and node.total_bytes)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("pages", ["4k", "auto", "thp"])
@pytest.mark.parametrize("numa", [f"bind:{NODE}", f"preferred:{NODE}", f"interleave:{NODE}"])
def test_policies_reach_the_kernel(numa: str, pages: Any, shared: bool) -> None:
    with um.Block(5 * MIB, pages=pages, numa=numa, warm=2, shared=shared, strict=True) as block:
        assert (block.requested["numa"], block.granted.nodes) == (numa, {NODE: block.nbytes})
        proc_maps.assert_granted(block)
        assert proc_maps.policies(block.address, block.nbytes) == {
            numa.replace("preferred:", "prefer:")
        }
        assert block.repair() == block.granted  # nothing was elsewhere


@pytest.mark.parametrize("numa", ["interleave", "weighted"])
def test_without_nodes_it_is_all_that_can_be_used(numa: str) -> None:
    usable = {n for n, node in limits.nodes().items() if node.allowed and node.total_bytes}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with um.Block(4 * MIB, pages="4k", numa=numa, warm=True) as block:
            assert set(block.granted.nodes) <= usable
            assert sum(block.granted.nodes.values()) == block.nbytes
    # A kernel before 6.9 has no weights.
    assert all(numa == "weighted" and "6.9" in str(warning.message) for warning in caught)


@pytest.mark.usefixtures("eight_huge_pages")
def test_bound_hugetlb_pages_are_there_at_once() -> None:
    with um.Block(4 * MIB, pages="2m", numa=f"bind:{NODE}", strict=True) as block:
        assert (block.granted.pages, block.granted.nodes) == ("2m", {NODE: 4 * MIB})
        proc_maps.assert_granted(block)
    with um.Block(4 * MIB, pages="2m", numa=f"interleave:{NODE}", strict=True) as block:
        assert block.granted.resident_bytes == 0


def test_a_node_that_is_not_there_is_named() -> None:
    with pytest.raises(um.PlacementError, match=r"'kv'.*node 1023 is offline or does not exist"):
        um.Block(4096, numa="bind:1023", strict=True, name="kv")
    with pytest.warns(um.PlacementWarning, match="node 1023"):
        block = um.Block(4096, numa=f"bind:{NODE},1023", warm=True)
    with block:
        assert block.granted.nodes == {NODE: 4096}
        block.repair()
    with pytest.warns(um.PlacementWarning, match="node 1023"):
        block = um.Block(4096, numa="bind:1023")
    with block, pytest.raises(ValueError, match="no NUMA policy"):
        block.repair()
    with um.Block(4096) as block, pytest.raises(ValueError, match="make it with numa="):
        block.repair()


@pytest.mark.parametrize("numa", ["bind", "nowhere:0", "bind:1024", 0, "bind:0:1"])
def test_grammar_errors_leave_nothing(numa: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="bind:NODES"):
        um.Block(4096, numa=numa)


def test_every_class_takes_a_policy() -> None:
    numa = f"bind:{NODE}"
    with um.Layout(4096, 4096, 4096, numa=numa, lock="onfault") as layout:
        assert isinstance(layout.weights, um.Tape)
        for tape in (layout.weights, layout.scratch, layout.history):
            assert tape.block.requested["numa"] == numa
            assert (tape.block.requested["lock"], tape.total_bytes) == ("onfault", 4096)
    with um.Grid(64, 4, numa=numa) as grid:
        assert grid.tape.block.requested["numa"] == numa
    with um.KVCache(1, 1, 8, 4, numa=numa, lock=True) as kv:
        assert kv.block is not None
        assert kv.block.requested["numa"] == numa
        assert kv.block.granted.locked_bytes == kv.block.nbytes


def test_a_kernel_that_refuses_policies_is_told(run_python: Run) -> None:
    # What a container's filter of system calls does to mbind, done by a filter of our own.
    done = run_python(
        CHECKS
        + FORBID
        + """
import platform
forbid("EPERM", [{"x86_64": 237, "aarch64": 235}[platform.machine()]])  # mbind
with um.Block(4096, warm=True) as block:
    node = next(iter(block.granted.nodes))
um.Block(4096, shared=True).close()
for shared in (False, True, f"unimem-test-mbind-{os.getpid()}"):
    def make(policy, **more):
        return um.Block(MIB, numa=f"{policy}:{node}", shared=shared, **more)
    refused(um.PlacementError, lambda: make("bind", strict=True), "CAP_SYS_NICE")
    with warned(lambda: make("interleave", warm=True), "CAP_SYS_NICE") as block:
        assert block.granted.resident_bytes == MIB
"""
    )
    assert done.returncode == 0, done.stderr
    if NO_SECCOMP in done.stdout:
        pytest.skip("this kernel has no seccomp filters")
