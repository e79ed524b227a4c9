"""Tables of invented records, to the letter, and as Markdown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.project.bench_records import (
    MACHINE,
    at_most,
    costs,
    faster,
    grows,
    record,
    sample_record,
    suite,
)
from unimem_bench import markdown
from unimem_bench.record import BEST, CaseRecord, Role, SideRecord, Target
from unimem_bench.tables import (
    CaseTable,
    Table,
    TableRow,
    case_table,
    machine_facts,
    suite_table,
    suite_targets,
    suite_title,
    targets,
)
from unimem_bench.texts import claim

NO_TORCH = {"torch": "torch is not installed"}
INTERRUPTED = "the run was interrupted before"


def side(name: str, *figures: float, role: Role = "peer", at: float | None = None) -> SideRecord:
    return SideRecord(name, role, [list(figures)] * 2, at)


def ours(*figures: float, at: float | None = None) -> SideRecord:
    return side("unimem", *figures, role="unimem", at=at)


def case(*sides: SideRecord, name: str = "take", unit: str = "ns", **rest: Any) -> CaseRecord:
    return CaseRecord("calls", name, "What does take cost?", unit, sides=list(sides), **rest)


def tabled(*sides: SideRecord, **rest: Any) -> tuple[CaseTable, Table]:
    made = case_table(case(*sides, **rest))
    assert made.table is not None
    return made, made.table


FOUR_SIDES = [
    ours(50.0, 40.0, 60.0), side("np.empty", 100.0, 80.0, 120.0),
    side("a faster peer", 25.0, 20.0, 30.0), side("C memcpy", 40.0, 32.0, 48.0, role="limit"),
]  # fmt: skip


def test_a_row_a_side() -> None:
    made, table = tabled(
        *FOUR_SIDES, side("equal", 50.0, 40.0, 60.0), left_out=NO_TORCH,
        facts={"bytes": 16384, "huge": True}, rounds_dropped=3, rounds_disturbed=1,
    )  # fmt: skip
    assert (made.name, made.question) == ("calls/take", "What does take cost?")
    assert (made.problem, made.is_error) == (None, False)
    assert table.head == ("", "", "median (5 to 95 %)", "unimem against it")
    assert table.align == "<<><"
    assert table.rows == (
        TableRow(("unimem", "", "50 ns (40 to 60)", ""), "subject"),
        TableRow(("np.empty", "peer", "100 ns (80 to 120)", "2x faster")),
        TableRow(("a faster peer", "peer", "25 ns (20 to 30)", "2x slower"), "bad"),
        TableRow(("C memcpy", "limit", "40 ns (32 to 48)", "1.25x slower")),
        TableRow(("equal", "peer", "50 ns (40 to 60)", "no difference")),
    )
    assert made.notes == (
        "torch is left out: torch is not installed",
        "bytes: 16,384",
        "huge: yes",
        "6 rounds in 2 passes (1 of them disturbed), 3 more dropped: other processes took CPU time",
    )


def test_a_result_is_noisy_where_most_rounds_were_disturbed() -> None:
    for n, noisy in ((3, False), (4, True)):
        made = case(*FOUR_SIDES, rounds_disturbed=n, targets=[faster("np.empty", 1.5, 2)])
        assert case_table(made).notes[-1].startswith("noisy: 6 rounds") is noisy
        (row,) = targets(record(suite("calls", "What?", made))).table.rows
        assert row.cells[-1].endswith(", noisy") is noisy


def test_a_ratio_has_its_interval() -> None:
    passes = [[10.0, 11.0, 9.0, 10.0], [10.0, 10.0, 12.0, 9.0]]
    noisy = SideRecord("np.empty", "peer", [[2.4 * x for x in each] for each in passes[::-1]])
    _, table = tabled(SideRecord("unimem", "unimem", passes), noisy)
    value, _, word, low, to, high = table.rows[1].cells[-1].replace("x", " x").split()
    assert (word, to) == ("faster", "to")
    assert 1 < float(low[1:]) < float(value) < float(high[:-1])


@pytest.mark.parametrize(("unit", "figures", "head", "cells"), [
    ("ms", (0.5, 7082.0), "median", ["500 us", "", "7.08 s", "14,164x faster"]),
    ("GB/s", (20.0, 25.0), "median", ["20 GB/s", "", "25 GB/s", "1.25x slower"]),
    ("x the bound", (1.0, 1.25), "x the bound", ["1", "", "1.25", "1.25x better"]),
])  # fmt: skip
def test_units_suit(unit: str, figures: tuple[float, float], head: str, cells: list[str]) -> None:
    _, table = tabled(ours(figures[0]), side("other", figures[1]), unit=unit)
    assert table.head[2] == f"{head} (5 to 95 %)"
    assert [cell for row in table.rows for cell in row.cells[2:]] == cells


def test_a_row_a_size() -> None:
    sizes = (1024.0, 65536.0, 4194304.0)
    sides = [ours(50.0, at=at) for at in sizes]
    sides += [side("np.empty", 50 * (at / 1024), at=at) for at in sizes[:2]]
    made, table = tabled(*sides, x="bytes of the tape")
    assert table.head == ("bytes of the tape", "unimem", "np.empty")
    assert table.align == "><<"
    assert [row.cells for row in table.rows] == [
        ("1 KiB", "50 ns", "50 ns (same)"),
        ("64 KiB", "50 ns", "3.20 us (64x)"),
        ("4 MiB", "50 ns", "-"),
    ]
    assert made.notes == (
        "In brackets: how many times as fast unimem is; same: no difference.",
        "unimem grows as n^0.00 (0.00 to 0.00): constant",
        "np.empty grows as n^1.00 (1.00 to 1.00): linear",
        "2 rounds in 2 passes",
    )


def test_speeds_grow_with_threads() -> None:
    sides = [ours(12.0 * n**0.5, at=n) for n in (1.0, 4.0)]
    made, table = tabled(*sides, unit="tokens/s", x="threads")
    assert table.head == ("threads", "unimem, tokens/s")
    assert [row.cells for row in table.rows] == [("1", "12"), ("4", "24")]
    assert made.notes[0] == "unimem grows as n^0.50 (0.50 to 0.50): less than linear"


@pytest.mark.parametrize(("made", "problem", "line"), [
    (case(failed="wants *a* GPU"), "wants *a* GPU", r"Not measured: wants \*a\* GPU"),
    (case(failed="ValueError: no", is_error=True), "ValueError: no", "Failed: ValueError: no"),
    (case(), INTERRUPTED, f"Not measured: {INTERRUPTED}"),
    (case(SideRecord("unimem", "unimem", [[], []])), INTERRUPTED, f"Not measured: {INTERRUPTED}"),
])  # fmt: skip
def test_what_was_not_measured(made: CaseRecord, problem: str, line: str) -> None:
    table = case_table(made)
    assert (table.table, table.notes) == (None, ())
    assert (table.problem, table.is_error) == (problem, made.is_error)
    assert list(markdown.case_lines(made))[1:] == ["", line]


def test_what_was_measured_in_part_has_a_table_and_a_problem() -> None:
    made, _ = tabled(ours(50.0), failed="pass 2 ended with status 1", is_error=True)
    assert made.problem == "pass 2 ended with status 1"


def test_a_suite_says_what_it_took() -> None:
    made = replace(suite("calls", "What do calls cost?", case(ours(50.0)), seconds=75), n_passes=5)
    assert suite_title(made) == "What do calls cost? (5 passes, 1:15)"


def test_a_row_a_case_with_the_nearest_peer_and_limit() -> None:
    alone, missing = case(ours(5.0), name="alone"), case(name="missing", failed="not here")
    made = suite_table(suite("calls", "What?", case(*FOUR_SIDES), alone, missing))
    assert made.head == ("case", "question", "unimem", "peer", "limit")
    assert [row.cells for row in made.rows] == [
        (
            "take",
            "What does take cost?",
            "50 ns (40 to 60)",
            "a faster peer: 2x slower",
            "C memcpy: 1.25x slower",
        ),
        ("alone", "What does take cost?", "5 ns", "", ""),
    ]


def test_of_scaling_a_row_has_the_largest_size_and_the_growth() -> None:
    sides = [ours(float(n), at=n) for n in (10, 1000)]
    sides += [side("NumPy", 2.0 * n, at=n) for n in (10, 1000)]
    grown = case(*sides, x="tokens", targets=[grows(1.1)])
    (row,) = suite_table(suite("calls", "What?", grown)).rows
    assert row.cells[2:] == ("1 us at 1,000 tokens, n^1.00 (1.00 to 1.00)", "NumPy: 2x faster", "")
    (row,) = suite_table(suite("calls", "What?", replace(grown, x="bytes", targets=[]))).rows
    assert row.cells[2] == "1 us at 1 kB"


def test_a_row_a_suite_with_what_became_of_its_targets() -> None:
    measured = [ours(50.0), side("np.empty", 100.0)]
    good = case(*measured, targets=[faster("np.empty", limit, 2) for limit in (2.0, 1.5)])
    bad = case(*measured, targets=[faster("np.empty", 3.0, 2), faster("torch", 1.0, 2)])
    calls, kv = suite("calls", "What?", good, bad), suite("kv", "How?", replace(good, suite="kv"))
    made = suite_targets(record(calls, kv, suite("gpu", "So?")))
    assert made.head == ("suite", "question", "met", "not measured", "missed")
    assert made.rows == (
        TableRow(("calls", "What?", "2", "1", "1"), "bad"),
        TableRow(("kv", "How?", "2", "", "")),
    )


def test_each_target_has_its_verdict() -> None:
    noisy = SideRecord("noisy", "peer", [[40.0, 90.0, 60.0, 55.0], [35.0, 50.0, 80.0, 45.0]])
    sides = [ours(*[50.0] * 4), side("np.empty", *[100.0] * 4)]
    asked = [faster("np.empty", 3.0, 5), faster("np.empty", 1.5, 2), faster("torch", 9.0, 2)]
    scaling = [ours(50.0, at=at) for at in (1.0, 100.0)]
    cases = [
        case(*sides, targets=[*asked, faster(BEST, 1.0, 6)], left_out=NO_TORCH),
        case(*sides, noisy, name="noisy", targets=[costs("noisy", 1.0, 4)]),
        case(*scaling, name="grow", x="bytes", targets=[grows(0.05)]),
        case(name="gpu", failed="CUDA sees no GPU", targets=[costs("cupy", 1.0, 5)] * 2),
        case(name="late", targets=[at_most(2e3, 7, side="x")]),
    ]
    made = targets(record(suite("calls", "What do calls cost?", *cases)))
    assert made.table.head == ("case", "claim", "measured", "verdict")
    rows = {row.cells[:2]: row for row in made.table.rows}
    row = rows.pop(("calls/noisy", "costs at most as much as noisy"))
    assert row.cells[3] in ("met, within noise", "missed, within noise")
    grown, best = "n^0.00 (0.00 to 0.00)", "at least as fast as the best peer, np.empty"
    assert [(*row.cells, row.tone) for row in rows.values()] == [
        ("calls/take", "at least 1.5x as fast as np.empty", "2x", "met", "plain"),
        ("calls/take", "at least 9x as fast as torch", "-", "not measured", "missing"),
        ("calls/take", "at least 3x as fast as np.empty", "2x", "missed", "bad"),
        ("calls/gpu", "costs at most as much as cupy", "-", "not measured", "missing"),
        ("calls/take", best, "2x", "met", "plain"),
        ("calls/late", "x: at most 2 us", "-", "not measured", "missing"),
        ("calls/grow", "grows no faster than n^0.05", grown, "met", "plain"),
    ]
    assert made.notes == (
        "not measured, torch is not installed: calls/take",
        "not measured, CUDA sees no GPU: calls/gpu (2)",
        "not measured, the run was interrupted before: calls/late",
    )
    n_met = 4 if row.cells[3].startswith("met") else 3
    assert made.summary == f"{n_met} of 9 targets met, {5 - n_met} missed, 4 not measured"
    assert not made.is_good


def test_the_reason_of_a_best_peer_and_of_figures_that_are_not_there() -> None:
    left_out = NO_TORCH | {"cupy": "torch is not installed"}
    alone = case(ours(50.0), targets=[faster(BEST, 1.0, 6)], left_out=left_out)
    other = case(ours(50.0), name="other", targets=[faster("C", 1.0, 6)])
    made = targets(record(suite("calls", "What do calls cost?", alone, other)))
    assert made.notes == (
        "not measured, torch is not installed: calls/take",
        "not measured, there are no figures of C: calls/other",
    )
    assert made.is_good, "none was missed"
    assert made.summary == "0 of 2 targets met, 2 not measured"


@pytest.mark.parametrize(("target", "text"), [
    (faster(BEST, 2.5, 2), "at least 2.5x as fast as the best peer"),
    (Target("cost", "unimem, copied", "read", False, 1.05, 2),
     "unimem, copied: costs at most 1.05x as much as read"),
    (Target("figure", "unimem", None, True, 0.95, 2), "at least 950 us"),
    (at_most(0, 2), "at most 0 ms"),
    (grows(0.5), "grows no faster than n^0.5"),
])  # fmt: skip
def test_claims_are_sentences(target: Target, text: str) -> None:
    assert claim(case(unit="ms"), target) == text


def test_the_machine_is_named() -> None:
    facts = dict(machine_facts(sample_record(quick=True)))
    assert facts["cpu"] == "AMD EPYC: 2 cores, 2 threads"
    assert facts["memory"] == "23.5 GiB, 1 NUMA node"
    assert facts["pages"] == "THP madvise, memfds never, no hugetlb pages"
    assert facts["kernel"] == "Linux 6.18.44, x86_64"
    assert facts["versions"].startswith("python 3.11.7, ")
    assert facts["run"].startswith("2026-11-22T05:00:00+00:00, quick, ")
    assert facts["run"].endswith("; load average 0.2 to 0.2")
    cpu = MACHINE["cpu"] | {"quota": {}, "usable_cores": 1}
    pools = {"2m": {"total_pages": 2560}, "1g": {"total_pages": 0}}
    machine = MACHINE | {"cpu": cpu, "pools": pools}
    facts = dict(machine_facts(replace(record(), machine=machine)))
    assert facts["cpu"].endswith(", 1 of them ours by quota")
    assert facts["pages"].endswith(", 2,560 hugetlb pages of 2m")
    assert "load" not in facts["run"], "it was not measured"


def test_a_case_as_markdown() -> None:
    made = case(ours(50.0), side("a | <b>", 25.0), facts={"n": 1})
    assert list(markdown.case_lines(made)) == [
        "**What does take cost?** `calls/take`",
        "",
        "|  |  | median (5 to 95 %) | unimem against it |",
        "|---|---|--:|---|",
        "| **unimem** |  | 50 ns |  |",
        r"| a \| \<b\> | peer | 25 ns | **2x slower** |",
        "",
        "- n: 1",
        "- 2 rounds in 2 passes",
    ]


def test_a_record_as_markdown_has_all_of_it() -> None:
    made = sample_record()
    text = "\n".join(markdown.record_lines(made))
    for each in made.cases():
        assert f"`{each.suite}/{each.name}`" in text
    for row in targets(made).table.rows:
        assert f"| {row.cells[0]} | {row.cells[1]} | {markdown.escape(row.cells[2])} | " in text
    assert text.endswith(f"**{targets(made).summary}.**")
