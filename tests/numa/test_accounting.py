"""Plans and reports of memory on several nodes, held against numa_maps."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import unimem as um
from unimem.system import limits

MB = 1 << 20
DIMS = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)


def nodes_of_process() -> Counter[int]:
    """Bytes on each node, by numa_maps."""
    found: Counter[int] = Counter()
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        size = re.search(r" kernelpagesize_kB=(\d+)", line)
        for node, n in re.findall(r" N(\d+)=(\d+)", line):
            found[int(node)] += int(n) * (int(size[1]) << 10 if size else 4096)
    return found


@pytest.mark.parametrize(
    ("numa", "expected"),
    [
        ("bind:2", {2: 12 * MB}),
        ("interleave:0,1", {0: 6 * MB, 1: 6 * MB}),
    ],
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


def test_a_plan_is_held_against_the_nodes_that_it_is_for() -> None:
    nodes = limits.nodes()
    plan = um.plan(DIMS, ctx=100, numa="bind:1", pages="4k", load="copy")
    (check,) = [check for check in plan.checks if check.name.startswith("node")]
    assert check.name == "node 1"
    assert check.limit_bytes == nodes[1].total_bytes
    assert check.fits
    too_much = um.ModelDims(4096, 14336, 32, 8, 128, 32000, 32, 8192)
    plan = um.plan(too_much, ctx=100, numa="interleave:0,2", pages="4k", load="copy")
    checks = [check for check in plan.checks if check.name.startswith("node")]
    assert [check.name for check in checks] == ["node 0", "node 2"]
    assert not any(check.fits for check in checks)
    assert checks[0].needed_bytes == checks[1].needed_bytes
    assert not plan.fits
