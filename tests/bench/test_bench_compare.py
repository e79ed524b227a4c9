"""Two invented records compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from support.project.bench_records import MACHINE, record, sample_record, suite
from unimem_bench import markdown
from unimem_bench.cli.view import difference_lines
from unimem_bench.compare import (
    Change,
    Differences,
    Pair,
    change_table,
    compare,
    pair_table,
    suite_table,
    summary,
)
from unimem_bench.record import CaseRecord, Record, SideRecord
from unimem_bench.stats import Ratio, Spread
from unimem_bench.tables import TableRow


def run(*cases: CaseRecord, **rest: Any) -> Record:
    return replace(record(suite("calls", "What do calls cost?", *cases)), **rest)


def case(
    name: str, ours: float, *peers: float, subject: str = "unimem", at: Sequence[float] = ()
) -> CaseRecord:
    """Make figures that do not vary, so that a ratio agrees only with itself."""
    sides = []
    for size in at or (None,):
        sides.append(SideRecord(subject, "unimem", [[ours, ours]], size))
        sides += [SideRecord(f"peer {i}", "peer", [[n, n]], size) for i, n in enumerate(peers)]
    return CaseRecord("calls", name, "What?", "ns", x="bytes" if at else None, sides=sides)


def pair(name: str, a: Ratio, b: Ratio, ours: str = "unimem", other: str = "C") -> Pair:
    return Pair(name, "ns", ours, other, a, b)


def change(name: str, a: Spread, b: Spread, unit: str = "ns") -> Change:
    return Change(name, unit, "unimem", a, b)


def test_a_record_agrees_with_itself() -> None:
    made = sample_record()
    found = compare(made, made)
    assert len(found.pairs) > 30
    assert all(pair.agrees and pair.distance == 0 for pair in found.pairs)
    assert (found.only_a, found.only_b, found.warnings, found.share) == ([], [], [], 1)
    n = len(found.pairs)
    assert summary(found) == f"{n} of {n} ratios of B (100%) are in the intervals of A"


def test_what_differs_most_comes_first() -> None:
    a = run(case("one", 10, 20, 30), case("two", 10, 20, at=(64, 1024)), case("three", 10, 40))
    b = run(case("one", 20, 40, 90), case("two", 11, 22, at=(1024, 4096)), case("three", 10, 10))
    found = compare(a, b)
    assert [(pair.name, pair.other, pair.a.value, pair.b.value) for pair in found.pairs] == [
        ("calls/three", "peer 0", 4.0, 1.0), ("calls/one", "peer 1", 3.0, 4.5),
        ("calls/one", "peer 0", 2.0, 2.0), ("calls/two 1 KiB", "peer 0", 2.0, 2.0),
    ]  # fmt: skip
    assert [pair.agrees for pair in found.pairs] == [False, False, True, True]
    assert found.share == 0.5
    assert [(each.name, each.a.median, each.b.median) for each in found.changes] == [
        ("calls/one", 10, 20),
        ("calls/two 1 KiB", 10, 11),
        ("calls/three", 10, 10),
    ]


@pytest.mark.parametrize(("a", "b", "agree"), [
    (Ratio(2.0, 1.5, 2.5), Ratio(2.2, 1.9, 2.4), True),
    (Ratio(2.0, 1.5, 2.5), Ratio(2.2, 2.1, 2.4), True),
    (Ratio(2.0, 1.9, 2.1), Ratio(2.2, 1.5, 2.5), False),
    (Ratio(2.0, 2.0, 2.0), Ratio(2.0, 2.0, 2.0), True),
])  # fmt: skip
def test_a_second_ratio_agrees_in_the_interval_of_the_first(a: Any, b: Any, agree: bool) -> None:
    assert pair("calls/one", a, b).agrees is agree


@pytest.mark.parametrize(("a", "b", "agree"), [
    (Spread(10, 8, 12), Spread(11, 9, 12), True),
    (Spread(10, 8, 12), Spread(11, 10.5, 12), False),
    (Spread(10, 8, 12), Spread(13, 9, 14), False),
    (Spread(10, 8, 12), Spread(10, 10, 10), True),
])  # fmt: skip
def test_medians_agree_between_each_others_percentiles(a: Any, b: Any, agree: bool) -> None:
    assert change("calls/one", a, b).agrees is change("calls/one", b, a).agrees is agree


def test_what_only_one_record_has_is_listed() -> None:
    failed = CaseRecord("calls", "failed", "What?", "ns", failed="no")
    a = run(case("one", 1, 2), case("both", 1, 2), replace(case("x", 1, 2), name="failed"))
    found = compare(a, run(case("both", 1, 2), case("two", 1, 2), failed))
    assert (found.only_a, found.only_b) == (["calls/one", "calls/failed"], ["calls/two"])
    # Subjects that are not the same have no ratio.
    found = compare(run(case("one", 1, 2)), run(case("one", 1, 2, subject="unimem, mapped")))
    assert (found.pairs, found.changes, found.share) == ([], [], 1)
    assert summary(found) == "The two have no ratio in common"


def test_another_machine_versions_and_kind_of_run_are_warned_of() -> None:
    a = run()
    machine = MACHINE | {"cpu": MACHINE["cpu"] | {"model": "Xeon"}, "thp": {}}
    machine["memory"] = MACHINE["memory"] | {"available_bytes": 1}
    versions = a.versions | {"numpy": "2.0.0", "kernel": "7"}
    del versions["torch"]
    found = compare(a, replace(a, machine=machine, versions=versions, quick=True))
    assert found.warnings == [
        "a whole run and a quick one: sizes and rounds differ",
        "cpu.model differs: AMD EPYC and Xeon",
        "thp.enabled differs: madvise and None",
        "thp.defrag differs: madvise and None",
        "thp.shmem_enabled differs: never and None",
        "thp.shm_mount differs: never and None",
        "numpy differs: 2.4.6 and 2.0.0",
        "torch differs: 2.13.0+cpu and none",
    ]


DIFFERENCES = Differences(
    [
        pair("a/b", Ratio(2.0, 1.5, 2.5), Ratio(3.1, 3.0, 3.2)),
        pair("a/c", Ratio(0.5, 0.5, 0.5), Ratio(0.5, 0.5, 0.5), "unimem, mapped"),
    ],
    [
        change("a/b", Spread(2e3, 1e3, 3e3), Spread(1e3, 1e3, 1e3)),
        change("a/c", Spread(0, 0, 0), Spread(1, 1, 1), "faults"),
    ],
    ["x/y"],
    [],
    ["a|b"],
)


def test_tables_and_markdown() -> None:
    assert pair_table(DIFFERENCES).rows == (
        TableRow(("a/b", "C", "2.00x (1.50 to 2.50)", "3.10x (3.00 to 3.20)", "differ"), "bad"),
        TableRow(("a/c", "unimem, mapped / C", "0.500x", "0.500x", "agree")),
    )
    assert change_table(DIFFERENCES).rows == (
        TableRow(("a/b", "unimem", "2 us", "1 us", "0.500x")),
        TableRow(("a/c", "unimem", "0 faults", "1 faults", "")),
    )
    lines = list(markdown.difference_lines(DIFFERENCES))
    assert lines[:3] == [r"- warning: a\|b", "- only in A: x/y", ""]
    assert "| a/b | C | 2.00x (1.50 to 2.50) | 3.10x (3.00 to 3.20) | **differ** |" in lines
    assert "| a/b | unimem | 2 us | 1 us | 0.500x |" in lines
    assert lines[-1] == "**1 of 2 ratios of B (50%) are in the intervals of A.**"


def test_suites_keep_the_order_of_the_record() -> None:
    same, other, figure = Ratio(2, 2, 2), Ratio(3, 3, 3), Spread(1, 1, 1)
    pairs = [pair("z/b", same, other), pair("a/b", same, same)]
    changes = [change(f"{name}/b", figure, figure) for name in "yaz"]
    rows = suite_table(DIFFERENCES._replace(pairs=pairs, changes=changes)).rows
    assert [row.cells for row in rows] == [
        ("y", "", "1 of 1"),
        ("a", "1 of 1", "1 of 1"),
        ("z", "0 of 1", "1 of 1"),
    ]


def test_a_terminal_of_80_columns_cuts_no_name_and_shows_what_differs() -> None:
    long, short = "buffers/a question of many words, with a size 1,000", "calls/take"
    wide, apart, one = Ratio(0.0292, 0.0181, 0.0469), Ratio(10.8, 0.01, 3412.1), Spread(1, 1, 1)
    pairs = [
        pair(long, wide, apart, "unimem, plain cache", "C memcpy of all tokens"),
        pair(short, wide, wide, "unimem", "np.empty"),
    ]
    changes = [change(long, Spread(2e3, 1e3, 3e3), Spread(5e3, 5e3, 5e3)), change(short, one, one)]
    lines = list(difference_lines(DIFFERENCES._replace(pairs=pairs, changes=changes)))
    assert max(map(len, lines)) <= 80
    assert "..." not in "".join(lines)
    assert [line.split("  ")[0] for line in lines if line][2:] == [
        "Medians of unimem that lie outside the other's 5 to 95 %",
        "case: side",
        f"{long}: unimem",
        "How many times as fast unimem is, where that differs, most first",
        "case: against",
        "buffers/a question of many",
        "words, with a size 1,000:",
        "unimem, plain cache / C",
        "memcpy of all tokens",
        "suite",
        "buffers",
        "calls",
        "1 of 2 ratios of B (50%) are in the intervals of A.",
    ]
