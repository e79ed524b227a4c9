"""Placement in other processes: sharing, cpusets, containers, cgroups."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from numa.books import node_bytes
from support.kernel.cgroups import small_cgroup
from support.kernel.seccomp import FORBID
from unimem.system.placement import Pages

MB = 1 << 20
TESTS = Path(__file__).parent.parent


def run(script: str, *arguments: str, cgroup: Path | None = None, fd: int | None = None) -> Any:
    """Return the JSON that a script prints; it runs in the cgroup and has the descriptor."""
    enter = f"echo $$ >{cgroup}/cgroup.procs && " if cgroup else ""
    ended = subprocess.run(
        ["sh", "-c", enter + 'exec "$@"', "sh", sys.executable, "-c", script, *arguments],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        pass_fds=() if fd is None else (fd,),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # A kill by the kernel shows as -9.
    assert ended.returncode == 0, f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return json.loads(ended.stdout)


ATTACH = """
import json, os, socket, sys
import unimem as um
from numa.books import node_bytes

os.sched_setaffinity(0, {0})  # of node 0, where pages without a policy would come to
with socket.socket(fileno=int(sys.argv[1])) as link:
    _, fds, _, _ = socket.recv_fds(link, 1, 8)
found = []
for source in (*fds, sys.argv[2]):
    block = um.Block.attach(source, writable=True)
    block.as_array()[:] = 7
    nodes = node_bytes(block.address, block.nbytes)
    assert block.verify().nodes == nodes
    found.append(list(nodes.items()))
print(json.dumps(found))
"""


def test_a_shared_block_is_placed_whoever_touches_it() -> None:
    kinds: list[tuple[Pages, str]]
    kinds = [("4k", "bind:1"), ("2m", "bind:2"), ("4k", "interleave:0,1"), ("4k", "preferred:1")]
    blocks = [
        um.Block(16 * MB, pages=pages, numa=numa, shared=True, strict=True) for pages, numa in kinds
    ]
    named = um.Block(16 * MB, numa="bind:1", shared=f"unimem-{os.getpid()}", strict=True)
    assert named.path is not None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [block.fileno() for block in blocks])
        found = run(ATTACH, str(theirs.fileno()), named.path, fd=theirs.fileno())
    expected = [{1: 16 * MB}, {2: 16 * MB}, {0: 8 * MB, 1: 8 * MB}, {1: 16 * MB}, {1: 16 * MB}]
    assert [dict(nodes) for nodes in found] == expected
    for block, nodes in zip([*blocks, named], expected, strict=True):
        assert (block.as_array() == 7).all()
        assert node_bytes(block.address, block.nbytes) == nodes
        assert block.verify().nodes == nodes
        block.close()


# Makes blocks with each policy, and prints the results.
MAKE = """
import json, sys, warnings
import unimem as um
from numa.books import node_bytes
from unimem.system import limits

def attempt(numa, strict):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with um.Block(4 << 20, pages="4k", numa=numa, strict=strict, warm=2) as block:
                nodes = node_bytes(block.address, block.nbytes)
                return {"nodes": list(nodes), "warnings": [str(w.message) for w in warned]}
        except um.PlacementError as error:
            return {"error": str(error)}

allowed = {id: node.allowed for id, node in limits.nodes().items()}
found = [[attempt(numa, strict) for strict in (True, False)] for numa in sys.argv[1:]]
print(json.dumps({"allowed": list(allowed.values()), "found": found}))
"""


@pytest.fixture
def cpuset_of_node_0() -> Iterator[Path]:
    """Make a cgroup that may use memory of node 0 alone."""
    folder = Path(f"/sys/fs/cgroup/unimem-numa-{os.getpid()}")
    folder.mkdir()
    try:
        (folder / "cpuset.mems").write_text("0")
        yield folder
    finally:
        folder.rmdir()


def test_nodes_that_the_cpuset_forbids_are_named(cpuset_of_node_0: Path) -> None:
    told = run(MAKE, "bind:1", "bind:0-1", "interleave", "bind:0", cgroup=cpuset_of_node_0)
    assert told["allowed"] == [True, False, False]
    (bind_1, fallback), (bind_both, rest), all_allowed, bind_0 = told["found"]
    for refused in (bind_1, bind_both):
        assert re.search(r"node 1.*cpuset", refused["error"], re.S)
    for taken in (fallback, rest):
        assert taken["nodes"] == [0]
        (warning,) = taken["warnings"]
        assert "node 1" in warning
    for attempt in (*all_allowed, *bind_0):
        assert attempt == {"nodes": [0], "warnings": []}


def test_a_container_without_the_capability() -> None:
    refused, taken = run(FORBID + "forbid('EPERM', [237])  # mbind\n" + MAKE, "bind:1")["found"][0]
    for message in (refused["error"], *taken["warnings"]):
        assert "CAP_SYS_NICE" in message
    assert len(taken["warnings"]) == 1


# Some blocks fit; others would pass the cgroup's limit while they are made, warmed or grown.
OUTGROW = """
import json
import unimem as um

def refusal(call):
    try:
        call()
    except um.CapacityError as error:
        return str(error)

MB = 1 << 20
refused = [refusal(lambda: um.Block(600 * MB))]
first, second = um.Block(300 * MB), um.Block(300 * MB, reserve=4096 * MB)
first.warm()
refused.append(refusal(second.warm))
refused.append(refusal(lambda: second.commit(3000 * MB)))
print(json.dumps({"refused": refused, "committed": second.committed_bytes}))
"""


def test_a_cgroup_of_version_2_is_not_outgrown() -> None:
    with small_cgroup() as cgroup:
        assert (cgroup.folder / "memory.max").exists()
        told = run(OUTGROW, cgroup=cgroup.folder)
    assert told["committed"] == 300 * MB
    for message in told["refused"]:
        assert cgroup.name in message
