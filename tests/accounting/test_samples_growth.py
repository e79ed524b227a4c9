"""What is remembered of a watch: few points, evenly, however long it was."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from support.terminal.watch_samples import MIB, report, sample
from unimem.accounting.growth import MemoryGrowth


def watched(n: int) -> list[float]:
    growth, one = MemoryGrowth(), sample(0.0, report())
    for i in range(n):
        growth.take(replace(one, seconds=float(i), report_seconds=float(i)))
    return [point.seconds for point in growth.points]


@pytest.mark.parametrize("n", [0, 1, 2, 240, 241, 242, 481, 1000, 5000])
def test_points_are_few_and_even_and_end_with_the_last(n: int) -> None:
    seconds = watched(n)
    assert len(seconds) <= 242
    assert len(seconds) == n or len(seconds) > 100
    assert seconds[:1] == [0.0][:n]
    assert seconds[-1:] == [n - 1.0][:n]
    steps = {b - a for a, b in pairwise(seconds[:-1])}
    assert len(steps) <= 1


def test_points_have_main_memory_and_a_report_counts_once() -> None:
    growth, one = MemoryGrowth(), sample(5.0, report())
    growth.take(one)
    growth.take(replace(one, seconds=6.0))  # memory was not read again
    (point,) = growth.points
    assert point.seconds == 5.0
    assert point.resident_bytes["kv"] == 130 * MIB
    assert sum(point.resident_bytes.values()) == one.report.resident_bytes
