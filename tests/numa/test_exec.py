"""`unimem exec` on several nodes puts each function's memory where the policy says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import unimem_exec as launch

MIB = 1 << 20
NBYTES = 24 * MIB
MAIN = "import sys; from unimem_command import main; sys.exit(main())"
# Prints the node of each function's pages, by move_pages. It runs on node 0.
PROGRAM = """
import ctypes, json, mmap, os
os.sched_setaffinity(0, {0})
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
n = 24 << 20
def nodes(at):
    ctypes.memset(at, 7, n)
    count = n // 4096
    pages = (ctypes.c_void_p * count)(*range(at, at + n, 4096))
    status = (ctypes.c_int * count)()
    assert c.syscall(279, 0, ctypes.c_ulong(count), pages, None, status, 0) == 0
    found = {}
    for node in status:
        found[node] = found.get(node, 0) + 4096
    return found
aligned = ctypes.c_void_p()
assert c.posix_memalign(ctypes.byref(aligned), 64, ctypes.c_size_t(n)) == 0
mapped = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
print(json.dumps([nodes(c.malloc(ctypes.c_size_t(n))), nodes(aligned.value), nodes(at)]))
"""


@pytest.mark.parametrize(
    ("numa", "expected"),
    [
        ("bind:1", {1: NBYTES}),
        ("preferred:2", {2: NBYTES}),
        ("interleave:0-2", {0: NBYTES // 3, 1: NBYTES // 3, 2: NBYTES // 3}),
        ("weighted:0-2", None),
    ],
)
def test_memory_lies_where_it_is_asked_for(numa: str, expected: dict[int, int] | None) -> None:
    assert launch.find_library() is not None, "libunimem-exec.so is not installed: make install"
    words = ["exec", "--numa", numa, "--", sys.executable, "-I", "-S", "-c", PROGRAM]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout):
        nodes = {int(node): nbytes for node, nbytes in found.items()}
        if expected is None:
            assert set(nodes) == {0, 1, 2}, nodes
        else:
            # Huge pages are dealt out whole.
            assert set(nodes) == set(expected)
            for node, nbytes in expected.items():
                assert abs(nodes[node] - nbytes) <= 4 * MIB, nodes


def test_a_node_that_is_not_there_is_refused() -> None:
    words = ["exec", "--numa", "bind:7", "--", "true"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "node 7" in done.stderr
