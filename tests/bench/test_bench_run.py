"""Runs of many processes, which here only print what they are told to."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from unimem_bench import run as runs
from unimem_bench.record import CaseRecord, Record, SideRecord, SuiteRecord
from unimem_bench.run import Interrupted, merge, run
from unimem_bench.suite import Measure, NotMeasured, Suite, faster
from unimem_bench.worker import measure


def record(name: str, *figures: float, failed: str | None = None) -> CaseRecord:
    sides = [SideRecord("unimem", "unimem", [list(figures)])] if figures else []
    return CaseRecord("invented", name, "What?", "ns", sides=sides, failed=failed)


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Suite:
    """A suite of two cases in two passes, in the place of every suite."""
    invented = Suite("invented", "What?", passes=2, quick_passes=1)
    invented.case("one", "What?", unit="ns", targets=[faster("b", 2, issue=2)])(lambda _: None)
    invented.case("two", "What?", unit="ns", in_quick=False)(lambda _: None)
    monkeypatch.setattr(runs, "load_suite", lambda name: invented)
    return invented


def answer_with(
    monkeypatch: pytest.MonkeyPatch, folder: Path, records: Sequence[CaseRecord], status: int = 0
) -> Path:
    """Make workers print these, and write their arguments to a file."""
    answers, script, seen = folder / "answers", folder / "worker", folder / "seen"
    lines = [json.dumps({"cpu_freq": "1=3 GHz"}), *(json.dumps(asdict(each)) for each in records)]
    answers.write_text("".join(f"{line}\n" for line in lines))
    script.write_text(f'#!/bin/sh\necho "$@" >> {seen}\ncat {answers}\nexit {status}\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return seen


@pytest.mark.usefixtures("suite")
def test_a_run_merges_its_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = answer_with(monkeypatch, tmp_path, [record("one", 1.0, 2.0), record("two", 3.0)])
    lines: list[str] = []
    found = run(["invented"], quick=False, folder=tmp_path, progress=lines.append)
    assert lines == ["invented, pass 1 of 2", "invented, pass 2 of 2"]
    arguments = f"-P -m unimem_bench.worker invented --dir {tmp_path} --case "
    assert seen.read_text().splitlines() == [arguments] * 2
    (got,) = found.suites
    assert (got.name, got.n_passes) == ("invented", 2)
    assert got.conditions == [{"cpu_freq": "1=3 GHz"}] * 2
    one, two = got.cases
    assert one.side("unimem") == SideRecord("unimem", "unimem", [[1.0, 2.0]] * 2)
    assert two.side("unimem") == SideRecord("unimem", "unimem", [[3.0]] * 2)
    assert one.targets == [faster("b", 2, issue=2)]
    assert found.machine["schema"] == "unimem.doctor/1"
    assert found.versions["numpy"]
    assert not found.quick


@pytest.mark.usefixtures("suite")
def test_a_quick_run_has_its_own_cases_and_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = answer_with(monkeypatch, tmp_path, [record("one", 1.0)])
    found = run(["invented"], quick=True, folder=tmp_path)
    assert [each.name for each in found.cases()] == ["one"]
    assert seen.read_text().split()[-1] == "--quick"
    assert found.quick


@pytest.mark.usefixtures("suite")
def test_a_process_that_dies_is_an_error_of_its_cases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer_with(monkeypatch, tmp_path, [record("one", 1.0)], status=7)
    one, two = run(["invented"], quick=False, folder=tmp_path).cases()
    assert (one.failed, one.is_error) == (None, False)
    assert (two.failed, two.is_error) == ("the process that measured it ended with status 7", True)


@pytest.mark.usefixtures("suite")
def test_an_interrupted_run_gives_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer_with(monkeypatch, tmp_path, [record("one", 1.0), record("two", 2.0)])

    def interrupt(line: str) -> None:
        if "pass 2" in line:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        run(["invented"], quick=False, folder=tmp_path, progress=interrupt)
    (got,) = caught.value.record.suites
    assert got.n_passes == 1
    assert [each.side("unimem") for each in got.cases] == [
        SideRecord("unimem", "unimem", [[1.0]]),
        SideRecord("unimem", "unimem", [[2.0]]),
    ]


@pytest.mark.usefixtures("suite")
def test_an_interrupt_ends_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It ends in order, by a signal that it can handle."""
    script, ended = tmp_path / "worker", tmp_path / "ended"
    line = json.dumps(asdict(record("one", 1.0)))
    script.write_text(
        f"#!/bin/sh\ntrap 'touch {ended}; exit 0' TERM\necho '{{}}'\necho '{line}'\n"
        "while :; do sleep 0.01; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    def interrupt(*_: object) -> CaseRecord:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "merge", interrupt)
    with pytest.raises(Interrupted):
        run(["invented"], quick=False, folder=tmp_path)
    assert ended.exists()


@pytest.mark.usefixtures("suite")
def test_no_case_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no case of invented has 'three' in its name"):
        run(["invented"], quick=False, folder=tmp_path, case="three")


# ---- merging ----


def test_a_side_that_a_pass_lacks_is_empty_there() -> None:
    both = [SideRecord("unimem", "unimem", [[1.0]]), SideRecord("torch", "peer", [[2.0]])]
    case = replace(record("one"), sides=[])
    merged = merge(case, replace(case, sides=both[:1]), 0)
    merged = merge(merged, replace(case, sides=both), 1)
    merged = merge(merged, replace(case, sides=both[:1]), 2)
    assert [(side.name, side.passes) for side in merged.sides] == [
        ("unimem", [[1.0], [1.0], [1.0]]),
        ("torch", [[], [2.0], []]),
    ]


def test_what_passes_say_is_added() -> None:
    first = replace(record("one"), rounds_dropped=1, left_out={"a": "x"}, facts={"n": 1})
    second = replace(
        record("one", failed="no"), rounds_disturbed=2, left_out={"b": "y"}, facts={"m": 2}
    )
    merged = merge(first, second, 1)
    assert (merged.rounds_dropped, merged.rounds_disturbed) == (1, 2)
    assert merged.left_out == {"a": "x", "b": "y"}
    assert merged.facts == {"n": 1, "m": 2}
    assert merged.failed == "no"


# ---- a case in its process ----


def declared(run_case: object) -> CaseRecord:
    suite = Suite("invented", "What?")
    suite.case("one", "What?", unit="ns")(run_case)  # type: ignore[arg-type]
    return measure(suite.cases[0], quick=True, folder=Path())


def test_what_cannot_be_measured_says_why() -> None:
    def two_nodes(_: Measure) -> None:
        raise NotMeasured("wants two nodes, there is one")

    found = declared(two_nodes)
    assert (found.failed, found.is_error) == ("wants two nodes, there is one", False)


def test_an_error_is_kept_and_so_is_what_was_measured_before() -> None:
    def broken(given: Measure) -> None:
        given.count("unimem", [1])
        raise AssertionError("sides differ")

    found = declared(broken)
    assert (found.failed, found.is_error) == ("AssertionError: sides differ", True)
    assert found.side("unimem") == SideRecord("unimem", "unimem", [[1.0]])


# ---- records ----


def test_a_record_is_the_same_after_json() -> None:
    case = record("one", 1.0, 2.5, -3e-9)
    case = replace(case, targets=[faster("b", 2, issue=2)], facts={"n": [1], "text": "[\n 1\n]"})
    suite = SuiteRecord("invented", "What?", 1, 2.5, [case], [{"cpu_freq": "3 GHz"}])
    whole = Record("2026-01-01T00:00:00+00:00", True, 3.5, {"cpu": {}}, {"numpy": "2"}, [suite])
    text = whole.to_json()
    assert Record.from_dict(json.loads(text)) == whole
    assert "[ 1.0, 2.5, -3e-09 ]" in text  # a pass a line, not a figure


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("machine",), None),
        (("seconds",), "3"),
        (("versions",), {"numpy": 2}),
        (("suites", 0, "conditions"), None),
        (("suites", 0, "cases", 0, "unit"), 5),
        (("suites", 0, "cases", 0, "facts"), []),
        (("suites", 0, "cases", 0, "sides", 0, "role"), "other"),
        (("suites", 0, "cases", 0, "sides", 0, "passes"), [["1"]]),
        (("suites", 0, "cases", 0, "sides", 0, "passes"), [[math.nan]]),
        (("suites", 0, "cases", 0, "targets", 0, "kind"), "other"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(place: tuple[Any, ...], value: Any) -> None:
    case = replace(record("one", 1.0), targets=[faster("b", 2, issue=2)])
    suite = SuiteRecord("invented", "What?", 1, 2.5, [case], [])
    document = Record("2026-01-01T00:00:00+00:00", True, 3.5, {}, {}, [suite]).to_dict()
    part: Any = document
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    with pytest.raises(ValueError, match=f"damaged record .*'{place[-1]}' cannot be "):
        Record.from_dict(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected the schema 'unimem.bench/1', found None"),
        ('{"schema": "unimem.report/1"}', "found 'unimem.report/1'"),
        ('{"schema": "unimem.bench/1"}', "damaged record"),
        ('{"schema": "unimem.bench/1", "suites": [{"cases": [{}]}]}', "damaged record"),
        ('{"schema": "unimem.bench/1", "suites": 1}', "damaged record"),
        ("{", "Expecting property name"),
        ("\x00", "expected a record in JSON: Expecting value"),
        ("[" * 100_000, "expected a record in JSON: "),
    ],
)
def test_a_file_that_is_no_record(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Record.read(path)
    assert str(caught.value).startswith(str(path))
