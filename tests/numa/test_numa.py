"""Placement on several NUMA nodes, checked against what the kernel says of the pages."""

from __future__ import annotations

from pathlib import Path

import unimem


def test_the_machine_has_three_nodes_one_without_cpus() -> None:
    nodes = Path("/sys/devices/system/node")
    assert (nodes / "has_memory").read_text().strip() == "0-2"
    assert (nodes / "has_cpu").read_text().strip() == "0-1"
    assert unimem.__version__
