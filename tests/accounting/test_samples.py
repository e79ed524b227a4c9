"""Rates between samples, and the evenly spaced points that a watch keeps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from support.terminal.watch_samples import DECODER, MIB, report, sample
from unimem.accounting.samples import MemoryGrowth, Rates, rates

BEFORE = sample(10.0, report())
NOW = sample(
    12.0, report(), faults=(3000, 5), read=3 * MIB, cpu=3.0,
    published=DECODER | {"n_generated_tokens": 701}, paged_in_bytes=10 * MIB,
)  # fmt: skip


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


def test_rates_are_differences_by_time() -> None:
    assert rates(BEFORE, NOW) == Rates(
        1500.0, 2.5, 1.5 * MIB, 5 * MIB, 1.5, 0.0, 100.5, 0.0, 0.0, 0.0, 0.0
    )


def test_the_first_sample_and_one_without_passed_time_have_no_rates() -> None:
    assert rates(None, NOW) == rates(NOW, NOW) == rates(NOW, BEFORE) == Rates()
    assert set(Rates()) == {None}


def test_counts_that_decrease_or_are_missing_have_no_rates() -> None:
    counters = replace(NOW.counters, minor_faults=0, read_bytes=None)
    odd = replace(NOW, seconds=14.0, counters=counters, published={}, paged_in_bytes=None)
    assert rates(NOW, odd) == Rates(major_faults=0.0, cpu_seconds=0.0)
