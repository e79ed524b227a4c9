"""Placements, written and summed up."""

from __future__ import annotations

import unimem as um
from unimem.system.placement import sum_placements

SMALL = um.Placement("4k", 4096, 8192, 0, 4096, 0, 8192, {0: 8192})
HUGE = um.Placement("thp", 2 << 20, 2 << 20, 2 << 20, 0, 4096, 2 << 20, {0: 1 << 20, 1: 1 << 20})


def test_only_figures_above_zero_are_written() -> None:
    assert str(SMALL) == "4k, 8.0 KiB in RAM, 4.0 KiB locked"
    assert str(HUGE) == (
        "thp, 2.0 MiB in RAM, 2.0 MiB in huge pages, 4.0 KiB swapped out, 1.0 MiB on node 0, "
        "1.0 MiB on node 1"
    )


def test_a_sum_has_the_smallest_pages_and_all_bytes() -> None:
    both = sum_placements([HUGE, SMALL])
    assert (both.pages, both.page_bytes) == ("4k", 4096)
    assert (both.resident_bytes, both.locked_bytes, both.swapped_bytes) == (2105344, 4096, 4096)
    assert both.nodes == {0: (1 << 20) + 8192, 1: 1 << 20}
    assert sum_placements([HUGE]) is HUGE
