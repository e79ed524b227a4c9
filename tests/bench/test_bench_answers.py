"""The ten questions at the head of the page of benchmarks."""

from __future__ import annotations

from typing import Any

import pytest

from support.project.bench_records import (
    at_most,
    costs,
    faster,
    grows,
    record,
    sample_record,
    suite,
)
from unimem_bench.answers import answers
from unimem_bench.questions import QUESTIONS
from unimem_bench.record import BEST, CaseRecord, SideRecord
from unimem_bench.suites import NAMES, load_suite


def test_there_are_ten_and_a_suite_declares_the_target_of_each() -> None:
    declared = {
        (f"{case.suite}/{case.name}", target.other)
        for name in NAMES
        for case in load_suite(name).cases
        for target in case.targets
    }
    assert len({question.text for question in QUESTIONS}) == len(QUESTIONS) == 10
    assert {(each.case, each.other) for each in QUESTIONS} <= declared
    assert all(each.text.endswith("?") for each in QUESTIONS)


def case(name: str, unit: str, ours: float, theirs: dict[str, float], **rest: Any) -> CaseRecord:
    sides = [SideRecord("unimem", "unimem", [[ours] * 3] * 2)]
    sides += [SideRecord(name, "peer", [[figure] * 3] * 2) for name, figure in theirs.items()]
    suite, _, short = name.partition("/")
    return CaseRecord(suite, short, "Why?", unit, sides=sides, **rest)


def scaled(figures: dict[float, float]) -> CaseRecord:
    sides = [SideRecord("unimem", "unimem", [[y] * 3] * 2, at=x) for x, y in figures.items()]
    return CaseRecord("scaling", "append-after", "Why?", "ns", "tokens", sides, [grows(0.1)])


LLAMA = {"llama.cpp": 40.0}


@pytest.mark.parametrize(
    ("made", "answer", "outcome", "tone"),
    [
        (
            case("decode/decode-q8_0", "tokens/s", 40, LLAMA,
                 targets=[faster("llama.cpp", 0.9, 2)]),
            "40 tokens/s: no difference from llama.cpp", "met", "plain",
        ),
        (
            case("decode/prefill-q4_k_m", "tokens/s", 20, LLAMA,
                 targets=[faster("llama.cpp", 0.9, 2)]),
            "20 tokens/s: 2x slower than llama.cpp", "missed", "bad",
        ),
        (
            case("load/staged", "ms", 50, {"the file, as it was written": 125},
                 targets=[costs("the file, as it was written", 0.6, 6)]),
            "50 ms: 2.50x faster than the file, as it was written", "met", "plain",
        ),
        (
            case("load/cold", "ms", 1500, {"C": 3000, "C, io_uring": 2250},
                 targets=[faster(BEST, 0.95, 6)], facts={"file_bytes": 3 << 30}),
            "1.50 s for 3 GiB: 1.50x faster than C, io_uring", "met", "plain",
        ),
        (
            case("decode/python-q8_0", "% of a token's time", 0.5, {}, targets=[at_most(0.25, 2)]),
            "0.500 % of a token's time", "missed", "bad",
        ),
        (
            scaled({10.0: 70.0, 1000.0: 70.0}),
            "constant, n^0.00 (0.00 to 0.00), up to 1,000 tokens", "met", "plain",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, CaseRecord) else "",
)  # fmt: skip
def test_a_target_answers(made: CaseRecord, answer: str, outcome: str, tone: str) -> None:
    table = answers(record(suite(made.suite, "Why?", made)))
    name = f"{made.suite}/{made.name}"
    (row,) = (row for row in table.rows if row.cells[2] == name)
    assert row.cells[1:] == (answer, name, outcome)
    assert row.tone == tone


def test_what_a_record_lacks_is_not_measured() -> None:
    rows = answers(sample_record(quick=True)).rows
    assert [row.cells for row in rows] == [(x.text, "", x.case, "not measured") for x in QUESTIONS]
