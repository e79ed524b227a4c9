"""Runs of many processes, which here only print prepared answers."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from unimem_bench import run as runs
from unimem_bench.record import CaseRecord, Record, SideRecord, SuiteRecord
from unimem_bench.run import Interrupted, merge, run
from unimem_bench.suite import Measure, NotMeasured, Suite, faster
from unimem_bench.suites import load_suite
from unimem_bench.tables import machine_facts
from unimem_bench.worker import TIME_IS_UP, asked_first, measure, share_end

Patch = pytest.MonkeyPatch
FASTER = faster("b", 2, issue=2)


def ours(*passes: list[float]) -> SideRecord:
    return SideRecord("unimem", "unimem", list(passes))


def record(name: str, *figures: float, **rest: Any) -> CaseRecord:
    sides = [ours([*figures])] if figures else []
    return CaseRecord("invented", name, "What?", "ns", sides=sides, **rest)


Answer = Callable[..., Path]


@pytest.fixture
def answer(monkeypatch: Patch, tmp_path: Path) -> Answer:
    """Make workers of a suite of two cases print records; their arguments go to a file.

    The suite has two passes, and replaces every suite.
    """
    invented = Suite("invented", "What?", passes=2, quick_passes=1)
    invented.case("one", "What?", unit="ns", targets=[FASTER])(lambda _: None)
    invented.case("two", "What?", unit="ns", in_quick=False)(lambda _: None)
    monkeypatch.setattr(runs, "load_suite", lambda name: invented)
    answers, script, seen = tmp_path / "answers", tmp_path / "worker", tmp_path / "seen"

    def answer_with(*records: CaseRecord, after: str = "exit 0") -> Path:
        lines = [json.dumps({"cpu_freq": "1=3 GHz"}), *(json.dumps(asdict(r)) for r in records)]
        answers.write_text("".join(f"{line}\n" for line in lines))
        script.write_text(f'#!/bin/sh\necho "$@" >> {seen}\ncat {answers}\n{after}\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return seen

    return answer_with


def test_a_run_merges_its_passes(answer: Answer, tmp_path: Path) -> None:
    seen = answer(record("one", 1.0, 2.0), record("two", 3.0))
    lines: list[str] = []
    found = run(["invented"], quick=False, folder=tmp_path, progress=lines.append)
    assert lines == ["invented, pass 1 of 2", "invented, pass 2 of 2"]
    arguments = f"-P -m unimem_bench.worker invented --dir {tmp_path} --case "
    assert seen.read_text().splitlines() == [arguments] * 2
    (got,) = found.suites
    assert (got.name, got.n_passes) == ("invented", 2)
    assert got.conditions == [{"cpu_freq": "1=3 GHz"}] * 2
    one, two = got.cases
    assert one.side("unimem") == ours(*[[1.0, 2.0]] * 2)
    assert two.side("unimem") == ours(*[[3.0]] * 2)
    assert one.targets == [FASTER]
    assert found.machine["schema"] == "unimem.doctor/1"
    assert found.versions["numpy"]
    assert not found.quick


def test_a_quick_run_has_its_own_cases_and_passes(answer: Answer, tmp_path: Path) -> None:
    seen = answer(record("one", 1.0))
    found = run(["invented"], quick=True, folder=tmp_path)
    assert [each.name for each in found.cases()] == ["one"]
    assert seen.read_text().split()[-1] == "--quick"
    assert found.quick
    with pytest.raises(ValueError, match=r"no case of invented has 'three' in its name"):
        run(["invented"], quick=False, folder=tmp_path, case="three")


def test_a_process_that_dies_is_an_error_of_its_cases(answer: Answer, tmp_path: Path) -> None:
    answer(record("one", 1.0), after="exit 7")
    one, two = run(["invented"], quick=False, folder=tmp_path).cases()
    assert (one.failed, one.is_error) == (None, False)
    died = "the process that measured it ended with status 7"
    assert (two.failed, two.is_error) == (died, True)


def test_a_pass_ends_long_after_its_time_and_that_is_no_error(
    answer: Answer, monkeypatch: Patch, tmp_path: Path
) -> None:
    seen = answer(record("one", 1.0), after="while :; do sleep 0.01; done")
    # Long enough for a shell to start on a busy machine.
    monkeypatch.setattr(runs, "MOST_QUICK_S", 10.0)
    (one,) = run(["invented"], quick=True, bounded=True, folder=tmp_path).cases()
    assert float(seen.read_text().split()[-1]) > time.monotonic() - 100
    assert (one.failed, one.is_error) == (None, False)
    answer(after="while :; do sleep 0.01; done")
    monkeypatch.setattr(runs, "MOST_QUICK_S", 0.5)
    (one,) = run(["invented"], quick=True, bounded=True, folder=tmp_path).cases()
    assert (one.failed, one.is_error) == (TIME_IS_UP, False)


def test_when_time_is_up_no_suite_has_a_second_pass(
    answer: Answer, monkeypatch: Patch, tmp_path: Path
) -> None:
    answer(record("one", 1.0), record("two", 2.0))
    monkeypatch.setattr(runs, "QUICK_S", -1.0)
    monkeypatch.setattr(runs, "_LEAST_S", 1000.0)
    monkeypatch.setattr(runs, "MOST_QUICK_S", 1000.0)
    (got,) = run(["invented"], quick=False, bounded=True, folder=tmp_path).suites
    assert got.n_passes == 1
    assert [each.side("unimem") for each in got.cases] == [ours([1.0]), ours([2.0])]


def test_first_passes_share_the_seconds_that_are_left(monkeypatch: Patch) -> None:
    names = ["calls", "decode", "gguf"]
    passes = runs.schedule(names, quick=True)
    assert len(passes) > 3, "some are second ones"
    monkeypatch.setattr(runs, "time", Mock(monotonic=lambda: 100.0))
    share = runs.QUICK_S / 5
    assert runs._limits(passes, 100.0) == (100 + share, 100 + 2 * share + 2)
    assert runs._limits(passes[1:], 100.0)[0] == 100 + runs.QUICK_S * 3 / 4
    assert runs._limits(passes, 100 - runs.QUICK_S) == (102.0, 106.0)
    assert runs._limits(passes, 99 - runs.MOST_QUICK_S)[1] == 100.0, "nothing begins"


def test_what_one_pass_had_no_time_for_another_measures(answer: Answer, tmp_path: Path) -> None:
    answer(record("one", failed=TIME_IS_UP))
    suite = runs.schedule(["invented"], quick=True)[0].suite
    two_passes = runs._Result(suite, suite.cases[:1])
    options: Any = {"quick": True, "folder": tmp_path, "case": "", "limits": None}
    two_passes.add_pass(**options)
    answer(record("one", 1.0))
    two_passes.add_pass(**options)
    (one,) = two_passes.record().cases
    assert (one.failed, one.side("unimem")) == (None, ours([], [1.0]))


def test_what_answers_a_question_is_measured_first() -> None:
    cases = load_suite("load").chosen(quick=True)
    names = [case.name for case in asked_first(cases)]
    assert names[:2] == ["cold", "staged"]
    rest = [case.name for case in cases if case.name not in names[:2]]
    assert names[2:] == rest
    assert len(rest) > 3


def test_a_case_begins_in_its_suites_time_only() -> None:
    suite = Suite("invented", "What?")
    suite.case("one", "What?", unit="ns")(lambda given: given.count("unimem", [given.builds]))
    options: Any = {"quick": True, "folder": Path()}
    late = measure(suite.cases[0], **options, until=time.monotonic() - 1, late=True)
    assert (late.failed, late.sides, late.is_error) == (TIME_IS_UP, [], False)
    early = measure(suite.cases[0], **options, until=time.monotonic() + 1000)
    assert early.side("unimem") == ours([0.0]), "it builds nothing"
    assert share_end(time.monotonic() + 90, 3) - time.monotonic() == pytest.approx(30, abs=5)


def test_an_interrupted_run_gives_what_it_has(answer: Answer, tmp_path: Path) -> None:
    answer(record("one", 1.0), record("two", 2.0))

    def interrupt(line: str) -> None:
        if "pass 2" in line:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        run(["invented"], quick=False, folder=tmp_path, progress=interrupt)
    (got,) = caught.value.record.suites
    assert got.n_passes == 1
    assert [each.side("unimem") for each in got.cases] == [ours([1.0]), ours([2.0])]


def test_an_interrupt_is_a_mild_signal(answer: Answer, monkeypatch: Patch, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    answer(record("one", 1.0), after="while :; do sleep 0.01; done")
    script = Path(sys.executable)
    trap = f"#!/bin/sh\ntrap 'touch {ended}; exit 0' TERM\n"
    script.write_text(script.read_text().replace("#!/bin/sh\n", trap))
    monkeypatch.setattr(runs, "merge", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(runs, "_END_S", 60.0)  # before it is killed
    with pytest.raises(Interrupted):
        run(["invented"], quick=False, folder=tmp_path)
    assert ended.exists()


def test_a_side_that_a_pass_lacks_is_empty_there() -> None:
    both = [ours([1.0]), SideRecord("torch", "peer", [[2.0]])]
    case = record("one")
    merged = merge(case, replace(case, sides=both[:1]), 0)
    merged = merge(merged, replace(case, sides=both), 1)
    merged = merge(merged, replace(case, sides=both[:1]), 2)
    assert [(side.name, side.passes) for side in merged.sides] == [
        ("unimem", [[1.0], [1.0], [1.0]]),
        ("torch", [[], [2.0], []]),
    ]


def test_what_passes_say_is_added() -> None:
    first = record("one", rounds_dropped=1, left_out={"a": "x"}, facts={"n": 1})
    second = record("one", failed="no", rounds_disturbed=2, left_out={"b": "y"}, facts={"m": 2})
    merged = merge(first, second, 1)
    assert (merged.rounds_dropped, merged.rounds_disturbed, merged.failed) == (1, 2, "no")
    assert merged.left_out == {"a": "x", "b": "y"}
    assert merged.facts == {"n": 1, "m": 2}


@pytest.mark.parametrize(("error", "failed", "is_error"), [
    (NotMeasured("wants two nodes, there is one"), "wants two nodes, there is one", False),
    (AssertionError("sides differ"), "AssertionError: sides differ", True),
])  # fmt: skip
def test_an_error_keeps_what_was_measured(error: Exception, failed: str, is_error: bool) -> None:
    def broken(given: Measure) -> None:
        given.count("unimem", [1])
        raise error

    suite = Suite("invented", "What?")
    suite.case("one", "What?", unit="ns")(broken)
    found = measure(suite.cases[0], quick=True, folder=Path())
    assert (found.failed, found.is_error) == (failed, is_error)
    assert found.side("unimem") == ours([1.0])


def whole_record(case: CaseRecord) -> Record:
    suite = SuiteRecord("invented", "What?", 1, 2.5, [case], [{"cpu_freq": "3 GHz"}])
    return Record("2026-01-01T00:00:00+00:00", True, 3.5, {"cpu": {}}, {"numpy": "2"}, [suite])


def test_a_record_is_the_same_after_json() -> None:
    facts = {"n": [1], "text": "[\n 1\n]"}
    whole = whole_record(record("one", 1.0, 2.5, -3e-9, targets=[FASTER], facts=facts))
    text = whole.to_json()
    assert Record.from_dict(json.loads(text)) == whole
    assert "[ 1.0, 2.5, -3e-09 ]" in text  # a pass a line, not a figure


def test_a_later_run_takes_the_place_of_its_suites() -> None:
    first, later = whole_record(record("one", 1.0)), whole_record(record("one", 2.0))
    other = replace(first.suites[0], name="other")
    first = replace(first, suites=[*first.suites, other])
    later = replace(later, when="2026-01-02T00:00:00+00:00", versions={"numpy": "3"})
    both = first.with_suites_of(later)
    run = f"{later.when}, unknown CPU"
    assert both.suites == [replace(later.suites[0], run=run), other]
    assert (both.when, both.versions) == (first.when, {"numpy": "3"})
    assert ("later run", f"{run}: invented") in machine_facts(both)
    with pytest.raises(ValueError, match="got one of each"):
        first.with_suites_of(replace(later, quick=False))


@pytest.mark.parametrize(("place", "value"), [
    ("machine", None),
    ("seconds", "3"),
    ("versions", {"numpy": 2}),
    ("suites 0 conditions", None),
    ("suites 0 cases 0 unit", 5),
    ("suites 0 cases 0 facts", []),
    ("suites 0 cases 0 sides 0 role", "other"),
    ("suites 0 cases 0 sides 0 passes", [["1"]]),
    ("suites 0 cases 0 sides 0 passes", [[math.nan]]),
    ("suites 0 cases 0 targets 0 kind", "other"),
])  # fmt: skip
def test_a_field_of_another_type_is_refused_by_name(place: str, value: Any) -> None:
    document = whole_record(record("one", 1.0, targets=[FASTER])).to_dict()
    *path, last = place.split()
    part: Any = document
    for name in path:
        part = part[int(name) if name.isdecimal() else name]
    part[last] = value
    with pytest.raises(ValueError, match=f"damaged record .*'{last}' cannot be "):
        Record.from_dict(document)


@pytest.mark.parametrize(("text", "message"), [
    ("[]", "expected the schema 'unimem.bench/1', found None"),
    ('{"schema": "unimem.report/1"}', "found 'unimem.report/1'"),
    ('{"schema": "unimem.bench/1"}', "damaged record"),
    ('{"schema": "unimem.bench/1", "suites": [{"cases": [{}]}]}', "damaged record"),
    ('{"schema": "unimem.bench/1", "suites": 1}', "damaged record"),
    ("{", "Expecting property name"),
    ("\x00", "expected a record in JSON: Expecting value"),
    pytest.param("[" * 100_000, "expected a record in JSON: ", id="deep"),
])  # fmt: skip
def test_a_file_that_is_no_record(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Record.read(path)
    assert str(caught.value).startswith(str(path))
